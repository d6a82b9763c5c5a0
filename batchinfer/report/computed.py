"""The computed tables of a report: queries/*.sql run over the views of run folders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from batchinfer.balance.decode_series import balance_of_steps
from batchinfer.records import ConfigError
from batchinfer.report.time_axis import TimeAxis
from batchinfer.report.views import open_views, query_text
from batchinfer.sanitize import first_line

# queries/<name>.sql in this order, each a table that the ones after it use
QUERIES = (
    "sessions", "spans", "held", "times", "tokens", "speeds", "extra_work", "communication", "ranks", "balance",
    "expert_balance",
    "predictions", "store", "finish_reasons", "answers", "trouble", "rank_seconds",
    "speculation", "graphs", "weights", "clocks",
)  # fmt: skip
# tables with a session; names of sessions may repeat in runs that were copied
SESSION_TABLES = ("steps", "experts", "expert_rows", "placements", "nodes", "kv", "decode_steps")
MEMORY_LIMIT = "600MB"  # beyond this limit DuckDB spills to disk


class Computed:
    """A DuckDB connection with the views of one or several runs and their computed tables; a context manager.

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
            self._add_decode_balance()
            self.create(QUERIES)
        except BaseException:
            self.connection.close()
            raise

    def __enter__(self) -> Computed:
        return self

    def __exit__(self, *exception: object) -> None:
        self.connection.close()

    def create(self, names: Iterable[str], table: str | None = None) -> None:
        """Create a table from queries/<name>.sql for each name, called `table` or like the query."""
        for name in names:
            self.rows(f"CREATE TEMP TABLE {table or name} AS {query_text(name)}")

    def add_axis(self, axis: TimeAxis) -> None:
        """Create the tables axis and bins, which queries over time read; the tables of an earlier axis are replaced."""
        # Python writes a float so that it reads back as the same one
        self.rows(
            f"CREATE OR REPLACE TEMP TABLE axis AS SELECT {axis.start_s!r}::DOUBLE AS start_s, "
            f"{axis.width_s!r}::DOUBLE AS width_s, {axis.num_bins} AS num_bins"
        )
        self.rows(f"CREATE OR REPLACE TEMP TABLE bins AS {query_text('bins')}")

    def _add_decode_balance(self) -> None:
        """Create the one-row table decode_balance: `balance_of_steps` of all decode steps, by KV and by requests."""
        values = []
        for kind in ("kv", "requests"):
            columns = ", ".join(f"{kind}_{name}::DOUBLE" for name in ("busiest", "mean", "at_least"))
            steps = np.array(self.rows(f"SELECT {columns} FROM decode_steps ORDER BY session, step")).reshape(-1, 3)
            found = balance_of_steps(*steps.T)
            max_over_mean, bound = (None, None) if found is None else (found.max_over_mean, found.bound)
            values += [
                f"{'NULL' if value is None else repr(value)}::DOUBLE AS decode_{kind}_{name}"
                for name, value in (("max_over_mean", max_over_mean), ("bound", bound))
            ]
        self.rows(f"CREATE TEMP TABLE decode_balance AS SELECT {', '.join(values)}")

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        try:
            return self.connection.execute(sql).fetchall()
        except duckdb.Error as error:
            raise self._unreadable(error) from None

    def records(self, sql: str) -> list[dict[str, Any]]:
        """Return all rows of a query as dicts by column name."""
        rows = self.rows(sql)
        names = [column[0] for column in self.connection.description or []]
        return [dict(zip(names, row, strict=True)) for row in rows]

    def one_row(self, table: str) -> dict[str, Any]:
        """Return the only row of a table; raise ConfigError if the table has another number of rows."""
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
        return ConfigError(
            f"cannot compute the report of {self._where}: {first_line(error)}; run "
            f"`batchinfer finish {self.folders[0]}` again"
        )
