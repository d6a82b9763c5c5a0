"""The figures of a finished run, computed by queries/*.sql over its views. Called by `batchinfer report` and `run`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import duckdb

from batchinfer.records import ConfigError
from batchinfer.report import pricing
from batchinfer.report.views import open_views
from batchinfer.rundir import RunDir, read_json

Figure = float | int | None

MAX_ERRORS = 5  # different texts that a report shows
# queries/<name>.sql in this order, each a table that the ones after it use; errors.sql stands alone
QUERIES = (
    "sessions",
    "spans",
    "held",
    "times",
    "tokens",
    "speeds",
    "extra_work",
    "communication",
    "ranks",
    "balance",
    "predictions",
    "store",
)

METRICS: dict[str, str] = {
    "rows": "output rows: input rows times samples",
    "rows_ok": "output rows with status ok; all token counts below are theirs",
    "rows_error": "output rows with status error",
    "input_tokens": "prompt tokens, counted once per sample",
    "cached_tokens": "prompt tokens not computed for their row: found in memory, loaded from disk, or a duplicate's",
    "cache_hit_rate": "cached_tokens / input_tokens",
    "optimal_cached_tokens": "input_tokens minus tokens of distinct prefixes that were not on disk: a perfect cache",
    "output_tokens": "tokens delivered, a duplicate's delivered output included",
    "output_tokens_per_s_per_request": "mean over generated requests of (tokens - 1) / (time of last - of first token)",
    "mean_kv_tokens_per_output_token": "mean KV length that a generated token attended to",
    "prefill_tokens_per_s_per_node": "prompt tokens, cached ones included, per second of prefill steps on one node",
    "decode_tokens_per_s_per_node": "generated tokens per second of decode steps on one node",
    "replicated_tokens": "prefix tokens computed on more than one rank on purpose",
    "wasted_tokens": "tokens run through the model in vain: lost with a killed session, done again, or of failed rows",
    "hidden_comm_share": "share of communication time hidden behind computation; null when there was none",
    "wall_s": "seconds in which a session of the run was alive (planning and finishing too); gaps do not count",
    "busy_s": "seconds in model steps; busy, idle, startup: means over ranks, together the time ranks were held",
    "idle_s": "seconds in which ranks were held but neither starting up nor in a step",
    "startup_s": "seconds from the start of a session that holds ranks to its first prefill step",
    "peak_nodes": "most hosts on which ranks were held at one time",
    "mean_nodes": "mean number of hosts held, over the time in which any was",
    "gpu_hours": "ranks held x hours held",
    "cost_usd": "gpu_hours x the price of an accelerator-hour; null without that price",
    "revenue_usd": "hit, miss and output tokens at their list prices; null unless all three are set",
    "cost_profit_margin": "(revenue - cost) / cost, a ratio: 5.45 means 545 %",
    "gross_margin": "(revenue - cost) / revenue, a ratio: 0.845 means 84.5 %",
}


@dataclass(frozen=True, slots=True)
class RankDetails:
    """What one rank did, added up over the sessions that had a rank of this number."""

    rank: int
    role: str  # 'prefill + decode', 'prefill' or 'decode'
    prefill_tokens: int  # run in prefill steps
    output_tokens: int  # sampled in decode steps
    busy_s: float
    expert_rows: int  # (token, expert) rows that its experts computed


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the plan said of a figure, and what became of it; None where it is not known or does not apply."""

    name: str  # as in queries/predictions.sql
    planned: float | None
    happened: float | None
    at_best: float | None  # what no plan could go below


@dataclass(frozen=True, slots=True)
class StoreDetails:
    """What the KV store on disk did, over all ranks."""

    read_bytes: int
    written_bytes: int
    wait_s: float  # that prefill waited for blocks, rank-seconds
    damaged_files: int  # moved to quarantine, computed again
    unwritten_blocks: int  # the disk was too slow, or all that the store held was worth more
    evicted_bytes: int


@dataclass(frozen=True, slots=True)
class RunDetails:
    """What a person wants to know beside the figures."""

    run: str
    model: str
    dtype: str
    memory_tokens: int  # prompt tokens found in memory
    disk_tokens: int  # read from the store on disk
    duplicate_tokens: int  # of rows that another one answers
    computed_tokens: int  # prompt tokens of requests that were run, without what was cached
    predictions: tuple[Prediction, ...]
    decode_idle_share: float | None  # of the decode ranks' turns: those without a request; None with one rank
    tail_s: float | None  # seconds at the end in which not all decode ranks had requests; None with one rank
    has_gpu_price: bool
    has_token_prices: bool
    unreadable_shards: tuple[tuple[str, str], ...]  # (path, problem)
    errors: tuple[tuple[str, int], ...]  # (error text, number of rows), most frequent first, at most max_errors
    num_error_texts: int  # different texts in all
    comm_s: float  # in which an expert exchange was under way, added up over ranks
    ranks: tuple[RankDetails, ...]  # in the order of their numbers
    restarts: int  # how often ranks were started again after one died
    moves: int  # running requests that went from one rank to another
    store: StoreDetails | None  # None: no KV store on disk


def report_metrics(run_folder: Path) -> dict[str, Figure]:
    """Every key of METRICS, in that order; None for what is not known or not defined, never NaN or infinity.

    Raises:
        ConfigError: the folder is no run folder, is not finished, or holds a table that cannot be read.
    """
    with _computed(run_folder) as connection:
        return _metrics(connection, run_folder)


def _metrics(connection: duckdb.DuckDBPyConnection, run_folder: Path) -> dict[str, Figure]:
    figures: dict[str, Any] = {}
    for name in ("tokens", "speeds", "extra_work", "communication", "times", "held"):
        figures |= _one_row(connection, name, run_folder)
    run = _one_row(connection, "run", run_folder)
    hit_tokens = figures["cached_tokens"]
    miss_tokens = figures["input_tokens"] - hit_tokens
    prices = {name: run[name] for name in ("input_hit", "input_miss", "output")}
    cost = pricing.cost(figures["gpu_hours"], run["gpu_hour"])
    revenue = pricing.revenue(hit_tokens, miss_tokens, figures["output_tokens"], **prices)
    figures |= {
        "cost_usd": cost,
        "revenue_usd": revenue,
        "cost_profit_margin": pricing.cost_profit_margin(revenue, cost),
        "gross_margin": pricing.gross_margin(revenue, cost),
    }
    return {key: _finite(figures[key]) for key in METRICS}


def report_details(run_folder: Path, max_errors: int = MAX_ERRORS) -> RunDetails:
    """The run's name, prediction, ranks, unreadable shards and most frequent errors.

    Raises:
        ConfigError: as report_metrics.
    """
    with _computed(run_folder) as connection:
        return _details(connection, run_folder, max_errors)


def metrics_and_details(run_folder: Path) -> tuple[dict[str, Figure], RunDetails]:
    """`report_metrics` and `report_details` of a run, from one reading of its tables."""
    with _computed(run_folder) as connection:
        return _metrics(connection, run_folder), _details(connection, run_folder, MAX_ERRORS)


def _details(connection: duckdb.DuckDBPyConnection, run_folder: Path, max_errors: int) -> RunDetails:
    run = _one_row(connection, "run", run_folder)
    tokens = _one_row(connection, "tokens", run_folder)
    communication = _one_row(connection, "communication", run_folder)
    balance = _one_row(connection, "balance", run_folder)
    store = _one_row(connection, "store", run_folder)
    predictions = _query(
        connection, "SELECT name, planned, happened, at_best FROM predictions ORDER BY place", run_folder
    )
    ranks = _query(connection, "SELECT * FROM ranks ORDER BY rank", run_folder)
    ((restarts, moves),) = _query(
        connection, "SELECT coalesce(sum(restarts), 0), coalesce(sum(moves), 0) FROM nodes", run_folder
    )
    errors = _query(
        connection, f"SELECT error, rows, num_texts FROM ({query_text('errors')}) LIMIT {max_errors}", run_folder
    )
    return RunDetails(
        run=str(run["run"]),
        model=str(run["model"]),
        dtype=str(run["dtype"]),
        memory_tokens=tokens["memory_tokens"],
        disk_tokens=tokens["disk_tokens"],
        duplicate_tokens=tokens["duplicate_tokens"],
        computed_tokens=tokens["computed_tokens"],
        predictions=tuple(Prediction(*row) for row in predictions),
        decode_idle_share=balance["decode_idle_share"],
        tail_s=balance["tail_s"],
        has_gpu_price=run["gpu_hour"] is not None,
        has_token_prices=None not in (run["input_hit"], run["input_miss"], run["output"]),
        unreadable_shards=_unreadable_shards(run_folder),
        errors=tuple((error, num_rows) for error, num_rows, _ in errors),
        num_error_texts=errors[0][2] if errors else 0,
        comm_s=communication["comm_s"],
        ranks=tuple(RankDetails(*rank) for rank in ranks),
        restarts=restarts,
        moves=moves,
        store=StoreDetails(**store) if store.pop("is_used") else None,
    )


def query_text(name: str) -> str:
    """The SQL of queries/<name>.sql."""
    return (resources.files("batchinfer.report") / "queries" / f"{name}.sql").read_text(encoding="utf-8")


def _computed(run_folder: Path) -> duckdb.DuckDBPyConnection:
    """The run's views with the computed ones on top."""
    connection = open_views([run_folder])
    try:
        for name in QUERIES:
            connection.execute(f"CREATE TEMP TABLE {name} AS {query_text(name)}")
    except duckdb.Error as error:
        connection.close()
        raise _unreadable(run_folder, error) from None
    return connection


def _one_row(connection: duckdb.DuckDBPyConnection, table: str, run_folder: Path) -> dict[str, Any]:
    rows = _query(connection, f"SELECT * FROM {table}", run_folder)
    names = [column[0] for column in connection.description or []]
    if len(rows) != 1:
        raise ConfigError(
            f"the table {table} of {run_folder} has {len(rows)} rows instead of 1; run `batchinfer finish` again"
        )
    return dict(zip(names, rows[0], strict=True))


def _query(connection: duckdb.DuckDBPyConnection, sql: str, run_folder: Path) -> list[tuple[Any, ...]]:
    try:
        return connection.execute(sql).fetchall()
    except duckdb.Error as error:
        raise _unreadable(run_folder, error) from None


def _unreadable(run_folder: Path, error: duckdb.Error) -> ConfigError:
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ConfigError(f"cannot compute the report of {run_folder}: {line}; run `batchinfer finish {run_folder}` again")


def _unreadable_shards(run_folder: Path) -> tuple[tuple[str, str], ...]:
    shards = read_json(RunDir(Path(run_folder)).run_json).get("shards", [])
    return tuple((str(shard["path"]), str(shard["problem"])) for shard in shards if shard.get("problem") is not None)


def _finite(value: Figure) -> Figure:
    return None if isinstance(value, float) and not math.isfinite(value) else value
