"""The bad rows of a planned run, from its token files."""

from collections.abc import Iterator

import pyarrow.compute as pc

from batchinfer.data.parquet import own_parquet
from batchinfer.manifest import Manifest
from batchinfer.rundir import RunDir, read_state, shards_of_state


def bad_rows(run: RunDir) -> Iterator[str]:
    """Yield a sentence for each bad row, in input order.

    Raises:
        DamagedFileError: a token file is missing or damaged.
    """
    state = read_state(run)
    manifest = Manifest(run.root, state["files"])
    for shard in shards_of_state(state):
        if shard.problem is not None:
            continue
        first = 0
        with own_parquet(run.tokens(shard.index), manifest) as file:
            for batch in file.iter_batches(columns=["id", "error"], use_threads=False):
                for place in pc.indices_nonzero(pc.is_valid(batch["error"])).to_pylist():
                    row_id = batch["id"][place].as_py()
                    named = "" if row_id is None else f", id {row_id}"
                    yield f"{shard.path}, row {first + place}{named}: {batch['error'][place].as_py()}"
                first += batch.num_rows
