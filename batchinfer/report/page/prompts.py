"""Prompts of a run as the model got them: token ids of the run folder, decoded by the model's tokenizer."""

from collections.abc import Collection
from pathlib import Path

from batchinfer.checked_json import read_json
from batchinfer.data.duckdb_sql import read_parquet
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.manifest import Manifest
from batchinfer.records import ConfigError, ModelError
from batchinfer.report.computed import Computed
from batchinfer.rundir import RunDir
from batchinfer.sanitize import first_line

EDGE_TOKENS = 200  # decoded at each end of a long prompt
EDGE_CHARS = 300  # shown at each end of a long prompt


def read_prompts(
    computed: Computed, run: RunDir, model: Path, rows: Collection[tuple[int, int]]
) -> dict[tuple[int, int], str]:
    """Return the prompts of rows by (shard, row); a long prompt has its start and its end.

    Where the run folder or the model folder is incomplete, the reason is in place of the prompt.
    """
    prompts: dict[tuple[int, int], str] = {}
    try:
        tokenizer = load_tokenizer(model)
        manifest = Manifest(run.root, read_json(run.run_json).get("files"))
        for shard in {shard for shard, _ in rows}:
            file = run.tokens(shard)
            manifest.check(file)
            wanted = ", ".join(str(row) for other, row in rows if other == shard)
            columns = f"token_ids[:{2 * EDGE_TOKENS}], token_ids[-{EDGE_TOKENS}:], len(token_ids)"
            for row, first, last, num_tokens in computed.rows(
                f"SELECT row, {columns} FROM {read_parquet(file)} WHERE row IN ({wanted})"
            ):
                if num_tokens > 2 * EDGE_TOKENS:
                    start, end = (tokenizer.decode(ids, with_special=True) for ids in (first[:EDGE_TOKENS], last))
                    prompts[shard, row] = _cut(start, end, num_tokens)
                else:
                    text = tokenizer.decode(first, with_special=True)
                    prompts[shard, row] = text if len(text) <= 2 * EDGE_CHARS else _cut(text, text, num_tokens)
    except (ConfigError, ModelError, OSError) as error:
        return dict.fromkeys(rows, f"(not shown: {first_line(error)})") | prompts
    return prompts


def _cut(start: str, end: str, num_tokens: int) -> str:
    """Return the start and the end of a prompt of `num_tokens`, with a note between them."""
    return f"{start[:EDGE_CHARS]}\n[… cut: {num_tokens:,} tokens in all …]\n{end[-EDGE_CHARS:]}"
