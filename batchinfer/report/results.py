"""A view of the durable answers of a run in any state: running, interrupted or finished."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb

from batchinfer.data.duckdb_sql import read_parquet
from batchinfer.data.parquet import own_parquet
from batchinfer.data.schemas.internal import RESULTS
from batchinfer.manifest import Manifest
from batchinfer.records import ConfigError
from batchinfer.report.foreign_sql import answer
from batchinfer.report.query_limits import SQL_S
from batchinfer.report.views import connect
from batchinfer.rundir import RunDir
from batchinfer.sanitize import first_line

# the columns of a quick look; the text of a failed row is its error
FIRST_COLUMNS = "coalesce(id, 'row ' || row) AS id, status, finish_reason, left(coalesce(error, text), 1000) AS text"
# the columns next to a prompt
PROMPT_COLUMNS = (
    "shard, row, sample, coalesce(id, 'row ' || row) AS id, status, finish_reason, completion_tokens, "
    "coalesce(error, text) AS text"
)


def newest_rows(num_rows: int, columns: str = FIRST_COLUMNS) -> str:
    """Return SQL for the `num_rows` rows that ended last, in the order of their ends."""
    return (
        f"SELECT {columns} FROM (SELECT * FROM results ORDER BY finished_s DESC, shard, row, sample "
        f"LIMIT {num_rows}) ORDER BY finished_s, shard, row, sample"
    )


ALL_ROWS = f"SELECT {FIRST_COLUMNS} FROM results ORDER BY finished_s, shard, row, sample"


def newest_prompts(
    run: RunDir, manifest: Manifest, files: list[Path], num_rows: int, decode: Callable[[list[int]], str]
) -> list[dict[str, Any]]:
    """Return the `num_rows` rows that ended last, with their prompts as text, in the order of their ends.

    Args:
        files: the result files to read.
        decode: returns the text of token ids.

    Raises:
        ConfigError: a file cannot be read.
    """
    names, rows = query_results(run, files, newest_rows(num_rows, PROMPT_COLUMNS))
    found = [dict(zip(names, row, strict=True)) for row in rows]
    for item in found:
        ids = _prompt_ids(run.tokens(item.pop("shard")), manifest, item["row"], item["sample"])
        item |= {"prompt": decode(ids), "prompt_tokens": len(ids)}
    return found


def _prompt_ids(path: Path, manifest: Manifest, row: int, sample: int) -> list[int]:
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


def query_results(run: RunDir, files: list[Path], sql: str) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """Run one SELECT on the view `results`: schemas.RESULTS with the row's id in front.

    Args:
        files: the result files to read.

    Returns:
        As report.foreign_sql.run_query.

    Raises:
        ConfigError: a file cannot be read, or as report.foreign_sql.run_query.
    """
    tokens = sorted(path for path in run.tokens(0).parent.glob("*.parquet") if not path.name.startswith("."))
    connection = connect()
    try:
        if files:
            rows = read_parquet(*files)
        else:
            connection.register("no_rows", RESULTS.schema.empty_table())
            connection.execute("CREATE TABLE no_results AS SELECT * FROM no_rows")
            connection.unregister("no_rows")
            rows = "no_results"
        ids = f"SELECT id, shard, row FROM {read_parquet(*tokens)}" if tokens else "SELECT NULL::VARCHAR AS id, 0, 0"
        connection.execute(
            f"CREATE VIEW results AS SELECT ids.id, found.* FROM {rows} AS found "
            f"LEFT JOIN ({ids}) AS ids(id, shard, row) USING (shard, row)"
        )
    except (duckdb.Error, UnicodeEncodeError) as error:
        connection.close()
        raise ConfigError(f"cannot read the answers in {run.root}: {first_line(error)}") from None
    return answer(connection, [*files, *tokens], sql, seconds=SQL_S, views=["results"])
