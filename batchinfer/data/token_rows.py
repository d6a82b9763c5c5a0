"""Prompts of single rows, from the token files of a plan."""

from pathlib import Path

from batchinfer.data.parquet import own_parquet
from batchinfer.manifest import Manifest


def prompt_ids(path: Path, manifest: Manifest, row: int, sample: int) -> list[int]:
    """Return the token ids of a request's prompt, with the choice that ends it in a job with choices.

    Args:
        path: a token file (schemas.TOKENS).
        row: of a good row, its position in the file.
        sample: number of the sample, or of the choice.

    Raises:
        DamagedFileError: the file is missing or damaged.
    """
    with own_parquet(path, manifest) as file:
        group, first = 0, 0
        while row >= first + file.metadata.row_group(group).num_rows:
            first += file.metadata.row_group(group).num_rows
            group += 1
        table = file.read_row_group(group, columns=["token_ids", "choices"]).slice(row - first, 1)
    (found,) = table.to_pylist()
    ids: list[int] = found["token_ids"]
    return ids if found["choices"] is None else ids + found["choices"][sample]
