"""The ends of killed sessions: their last heartbeats."""

import pyarrow as pa

from batchinfer.data.parquet import read_rows, table_writer
from batchinfer.data.schemas.statistics import STATS_NODES
from batchinfer.run.heartbeat import signs_of_life
from batchinfer.run.store.interface import Storage, put_statistics


def keep_last_signs(storage: Storage) -> None:
    """Set the end of killed sessions in stats/nodes to their last heartbeat.

    Their own rows end with the last commit, which may be much earlier.

    Raises:
        ConfigError: a file is damaged or cannot be written.
    """
    for session, sign in signs_of_life(storage.run).items():
        path = storage.run.session_stats("nodes", session)
        if sign.may_live or not path.exists():
            continue
        (row,) = read_rows(path)
        if row["state"] == "running" and row["end_s"] < sign.time_s:
            with table_writer(path, STATS_NODES.schema) as writer:
                writer.write_table(pa.Table.from_pylist([{**row, "end_s": sign.time_s}], schema=STATS_NODES.schema))
            put_statistics(storage, session)
