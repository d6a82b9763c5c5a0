"""The figures of a finished run, computed by queries/*.sql over its views. Called by `batchinfer report` and `run`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from batchinfer.report.computed import Computed, query_text
from batchinfer.report.price import margin
from batchinfer.rundir import RunDir, read_json

Figure = float | int | None

MAX_ERRORS = 5  # different texts that a report shows
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
class RankSeconds:
    """Where each second of each rank went: parts that add up to all seconds in which ranks were held."""

    startup: float = 0.0  # until the first prefill step
    prefill: float = 0.0  # in prefill steps, without what stands below
    decode: float = 0.0  # in decode steps, without what stands below
    exchange: float = 0.0  # in steps, while experts' rows travelled and nothing was computed
    waste: float = 0.0  # in steps, for wasted_tokens
    tail: float = 0.0  # after a rank's last tokens, while others of its session had some
    idle: float = 0.0  # the rest: planning and finishing with ranks held, waiting

    @property
    def total(self) -> float:
        return sum(astuple(self))


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """$ per million tokens by the three usual conventions; None: not known, or there were no such tokens."""

    usd_per_million_output_tokens: float | None = None  # all cost on the output tokens
    usd_per_million_tokens: float | None = None  # all cost on input and output tokens
    prefill_usd_per_million_input_tokens: float | None = None  # by pool: what prefill cost on the input tokens
    decode_usd_per_million_output_tokens: float | None = None  # by pool: what decode cost on the output tokens


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
    seconds: RankSeconds = RankSeconds()
    unit_costs: UnitCosts = UnitCosts()
    bit_equal: bool | None = None  # whether a row has the same bits whatever it is batched with; None: not known
    bit_equal_reason: str | None = None  # why it is false or not known
    processor: str | None = None  # where ranks computed, with vector units; None: nothing was computed


def is_worth_showing(found: Prediction) -> bool:
    """Balance always has a bound to be measured by; other figures say something only beside a plan."""
    return found.happened is not None and (found.planned is not None or found.name.endswith("_balance"))


def report_metrics(run_folder: Path) -> dict[str, Figure]:
    """Every key of METRICS, in that order; None for what is not known or not defined, never NaN or infinity.

    Raises:
        ConfigError: the folder is no run folder, is not finished, or holds a table that cannot be read.
    """
    with Computed([run_folder]) as computed:
        return _metrics(computed)


def report_details(run_folder: Path, max_errors: int = MAX_ERRORS) -> RunDetails:
    """The run's name, prediction, ranks, unreadable shards and most frequent errors.

    Raises:
        ConfigError: as report_metrics.
    """
    with Computed([run_folder]) as computed:
        return _details(computed, _metrics(computed), max_errors)


def metrics_and_details(run_folder: Path) -> tuple[dict[str, Figure], RunDetails]:
    """`report_metrics` and `report_details` of a run, from one reading of its tables."""
    with Computed([run_folder]) as computed:
        return figures_of(computed)


def figures_of(computed: Computed) -> tuple[dict[str, Figure], RunDetails]:
    """The figures of one run whose tables are open."""
    metrics = _metrics(computed)
    return metrics, _details(computed, metrics, MAX_ERRORS)


def metrics_together(
    run_folders: Sequence[Path], each: Sequence[dict[str, Figure]]
) -> tuple[dict[str, Figure], RunDetails]:
    """The figures of several runs as if they were one: tokens, times and money add up, rates are over all of them.

    Args:
        run_folders: at least one; one that is given twice counts once.
        each: `report_metrics` of every folder. Runs may have different prices, so money is added up from these.

    Raises:
        ConfigError: as report_metrics.
    """
    folders = list(dict.fromkeys(Path(folder).resolve() for folder in run_folders))
    metrics_of = {Path(folder).resolve(): metrics for folder, metrics in zip(run_folders, each, strict=True)}
    with Computed(folders) as computed:
        metrics = _metrics(computed)
        money = {key: _total([metrics_of[folder][key] for folder in folders]) for key in ("cost_usd", "revenue_usd")}
        metrics |= money | _margins(money["revenue_usd"], money["cost_usd"])
        return metrics, _details(computed, metrics, MAX_ERRORS)


def _metrics(computed: Computed) -> dict[str, Figure]:
    figures: dict[str, Any] = {}
    for name in ("tokens", "speeds", "extra_work", "communication", "times", "held"):
        figures |= computed.one_row(name)
    run = computed.one_row("run")
    hit_tokens = figures["cached_tokens"]
    miss_tokens = figures["input_tokens"] - hit_tokens
    prices = {name: run[name] for name in ("input_hit", "input_miss", "output")}
    cost = margin.cost(figures["gpu_hours"], run["gpu_hour"])
    revenue = margin.revenue(hit_tokens, miss_tokens, figures["output_tokens"], **prices)
    figures |= {"cost_usd": cost, "revenue_usd": revenue} | _margins(revenue, cost)
    return {key: _finite(figures[key]) for key in METRICS}


def _margins(revenue: Figure, cost: Figure) -> dict[str, Figure]:
    return {
        "cost_profit_margin": margin.cost_profit_margin(revenue, cost),
        "gross_margin": margin.gross_margin(revenue, cost),
    }


def _total(values: list[Figure]) -> Figure:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _details(computed: Computed, metrics: dict[str, Figure], max_errors: int) -> RunDetails:
    run = computed.one_row("run")
    tokens = computed.one_row("tokens")
    communication = computed.one_row("communication")
    balance = computed.one_row("balance")
    store = computed.one_row("store")
    seconds = computed.one_row("rank_seconds")
    prefill_share = seconds.pop("prefill_share")
    predictions = computed.rows("SELECT name, planned, happened, at_best FROM predictions ORDER BY place")
    ranks = computed.rows("SELECT * FROM ranks ORDER BY rank")
    ((restarts, moves),) = computed.rows("SELECT coalesce(sum(restarts), 0), coalesce(sum(moves), 0) FROM nodes")
    errors = computed.rows(f"SELECT error, rows, num_texts FROM ({query_text('errors')}) LIMIT {max_errors}")
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
        unreadable_shards=tuple(shard for folder in computed.folders for shard in _unreadable_shards(folder)),
        errors=tuple((error, num_rows) for error, num_rows, _ in errors),
        num_error_texts=errors[0][2] if errors else 0,
        comm_s=communication["comm_s"],
        ranks=tuple(RankDetails(*rank) for rank in ranks),
        restarts=restarts,
        moves=moves,
        store=StoreDetails(**store) if store.pop("is_used") else None,
        bit_equal=run["bit_equal"],
        bit_equal_reason=run["bit_equal_reason"],
        processor=run["processor"],
        seconds=RankSeconds(**seconds),
        unit_costs=_unit_costs(metrics, prefill_share),
    )


def _unit_costs(metrics: dict[str, Figure], prefill_share: float | None) -> UnitCosts:
    cost, inputs, outputs = metrics["cost_usd"], metrics["input_tokens"] or 0, metrics["output_tokens"] or 0
    whole = UnitCosts(margin.per_million(cost, outputs), margin.per_million(cost, inputs + outputs))
    if cost is None or prefill_share is None:
        return whole
    return replace(
        whole,
        prefill_usd_per_million_input_tokens=margin.per_million(cost * prefill_share, inputs),
        decode_usd_per_million_output_tokens=margin.per_million(cost * (1 - prefill_share), outputs),
    )


def _unreadable_shards(run_folder: Path) -> tuple[tuple[str, str], ...]:
    shards = read_json(RunDir(Path(run_folder)).run_json).get("shards", [])
    return tuple((str(shard["path"]), str(shard["problem"])) for shard in shards if shard.get("problem") is not None)


def _finite(value: Figure) -> Figure:
    return None if isinstance(value, float) and not math.isfinite(value) else value
