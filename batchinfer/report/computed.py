"""The views of run folders with the tables of queries/*.sql on top."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import duckdb

from batchinfer.records import ConfigError
from batchinfer.report.views import open_views

# queries/<name>.sql in this order, each a table that the ones after it use
QUERIES = (
    "sessions", "spans", "held", "times", "tokens", "speeds", "extra_work", "communication", "ranks", "balance",
    "expert_balance",
    "predictions", "store", "finish_reasons", "trouble", "rank_seconds",
)  # fmt: skip
# tables with a session; names of sessions may repeat in runs that were copied
SESSION_TABLES = ("steps", "experts", "expert_rows", "placements", "nodes", "kv")
MEMORY_LIMIT = "600MB"  # beyond that DuckDB goes to disk


def query_text(name: str) -> str:
    """The SQL of queries/<name>.sql."""
    return (resources.files("batchinfer.report") / "queries" / f"{name}.sql").read_text(encoding="utf-8")


class Computed:
    """A connection with the views of one or several runs and the computed tables; a context manager.

    With several runs the tables are those of all of them together: tokens and times add up, a host that two runs held
    at one time is one node, and `run` has one row for all (see queries/together.sql).
    """

    def __init__(self, run_folders: Sequence[Path]) -> None:
        """Open the runs and compute QUERIES.

        Raises:
            ConfigError: a folder is no run folder, is not finished, or holds a table that cannot be read.
        """
        self.folders = [Path(folder) for folder in run_folders]
        self.connection: duckdb.DuckDBPyConnection = open_views(self.folders)
        try:
            self.connection.execute(f"SET memory_limit = '{MEMORY_LIMIT}'")
            if len({folder.resolve() for folder in self.folders}) > 1:
                for table in SESSION_TABLES:
                    told_apart = "SELECT * REPLACE (run || '/' || session AS session) FROM memory.main"
                    self.connection.execute(f"CREATE TEMP VIEW {table} AS {told_apart}.{table}")
                self.create(["together"], "run")
            self.create(QUERIES)
        except BaseException:
            self.connection.close()
            raise

    def __enter__(self) -> Computed:
        return self

    def __exit__(self, *exception: object) -> None:
        self.connection.close()

    def create(self, names: Iterable[str], table: str | None = None) -> None:
        """Make a table of queries/<name>.sql for each name, called like the query unless `table` says otherwise."""
        for name in names:
            self.rows(f"CREATE TEMP TABLE {table or name} AS {query_text(name)}")

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        try:
            return self.connection.execute(sql).fetchall()
        except duckdb.Error as error:
            raise self._unreadable(error) from None

    def records(self, sql: str) -> list[dict[str, Any]]:
        """All rows of a query by column names."""
        rows = self.rows(sql)
        names = [column[0] for column in self.connection.description or []]
        return [dict(zip(names, row, strict=True)) for row in rows]

    def one_row(self, table: str) -> dict[str, Any]:
        """The only row of a table."""
        records = self.records(f"SELECT * FROM {table}")
        if len(records) != 1:
            raise ConfigError(
                f"the table {table} of {self._where} has {len(records)} rows, not 1; run `batchinfer finish` again"
            )
        return records[0]

    @property
    def _where(self) -> str:
        return " and ".join(map(str, self.folders))

    def _unreadable(self, error: duckdb.Error) -> ConfigError:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return ConfigError(
            f"cannot compute the report of {self._where}: {line}; run `batchinfer finish {self.folders[0]}` again"
        )
