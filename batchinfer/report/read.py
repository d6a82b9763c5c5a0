"""The report of one or several runs, read from their views by queries/*.sql."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from batchinfer.checked_json import read_json
from batchinfer.equal_rows import UNEQUAL
from batchinfer.report.computed import Computed
from batchinfer.report.figure import Values
from batchinfer.report.figures import FIGURES, PARTS, changes, document
from batchinfer.report.forms import Value
from batchinfer.report.price import margin
from batchinfer.report.time_axis import time_axis
from batchinfer.report.unfinished import KEY, OF_THE_WHOLE, Unfinished, known_so_far, read_unfinished, together
from batchinfer.report.views import query_text
from batchinfer.rundir import RunDir

MAX_ERRORS = 5  # different error texts that a report shows
DECODE_STRETCHES = 8  # most stretches into which the time with decode steps is cut
# tables of one row; each column is a value, the figures by their keys
ONE_ROW_TABLES = (
    "tokens", "speeds", "extra_work", "communication", "times", "held", "finish_reasons", "answers", "balance",
    "decode_balance", "trouble", "store", "expert_balance", "speculation", "graphs", "weights", "clocks",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankDetails:
    """The work of one rank, added up over the sessions that had a rank of this number."""

    rank: int
    role: str  # 'prefill + decode', 'prefill' or 'decode'
    prefill_tokens: int  # run in prefill steps
    output_tokens: int  # sampled in decode steps
    busy_s: float
    expert_rows: int  # (token, expert) rows that its experts computed


@dataclass(frozen=True, slots=True)
class Prediction:
    """The planned and the actual value of a figure; None if it is not known or does not apply."""

    name: str  # as in queries/predictions.sql
    planned: float | None
    happened: float | None
    at_best: float | None  # lower bound of any plan


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a run, or of several runs together."""

    run: str
    model: str
    dtype: str
    values: dict[str, Value]  # every key of FIGURES, and other columns of the tables; None: not known or not defined
    seconds: dict[str, float]  # rank-seconds by the names of PARTS; their sum is the time in which ranks were held
    predictions: tuple[Prediction, ...]
    ranks: tuple[RankDetails, ...]  # in the order of their numbers
    lengths: tuple[dict[str, Any], ...]  # queries/lengths.sql
    decode_over_time: tuple[dict[str, Any], ...]  # queries/decode_over_time.sql, from the first decode step on
    unreadable_shards: tuple[tuple[str, str], ...]  # (path, problem)
    errors: tuple[tuple[str, int], ...]  # (error text, number of rows), most frequent first, at most MAX_ERRORS
    num_error_texts: int  # different texts in all
    bit_equal: bool | None  # whether a row's bits do not depend on its batch; None: not known
    bit_equal_reason: str | None  # why bit_equal is False or None
    processor: str | None  # processor of the ranks, with its vector units; None: nothing was computed
    no_graph: str | None  # most frequent reason of decode steps without a CUDA graph; None: not known
    unfinished: Unfinished | None = None  # None: the run is finished

    @property
    def warnings(self) -> list[str]:
        """Sentences on what a reader must know before the figures."""
        found = [f"{UNEQUAL}: {self.bit_equal_reason}"] if self.bit_equal is False else []
        outside_s = self.values["steps_outside_s"]
        if outside_s is not None:
            found.append(
                f"steps lie up to {outside_s:,.0f} s outside the time of their session: a host's clock is wrong, "
                "or was set during the run; do not trust times, speeds and cost"
            )
        return found


def is_worth_showing(found: Prediction) -> bool:
    """Return whether to show a prediction: a balance always (it has a bound), other figures only if planned."""
    return found.happened is not None and (found.planned is not None or found.name.endswith("_balance"))


def as_document(report: Report) -> dict[str, Any]:
    """Return the report as a JSON document: published figures, bit equality, predictions, lists, and its progress."""
    equality = {key: getattr(report, key) for key in ("bit_equal", "bit_equal_reason", "processor", "no_graph")}
    predictions = {found.name: {"planned": found.planned, "happened": found.happened, "at_best": found.at_best}
                   for found in report.predictions}  # fmt: skip
    over_time = [{key: value for key, value in stretch.items() if key != "bin"} for stretch in report.decode_over_time]
    lists = {"output_lengths": list(report.lengths), "decode_over_time": over_time}
    how_far = {KEY: report.unfinished and asdict(report.unfinished)}
    return {**how_far, **document(report.values), **equality, "predictions": predictions, **lists}


def changes_between(before: Report, after: Report) -> dict[str, Any]:
    """Return the change of each published figure as a JSON document, with the progress of unfinished runs."""
    how_far = {name: one.unfinished and asdict(one.unfinished) for name, one in (("before", before), ("after", after))}
    return {KEY: how_far, **changes(before.values, after.values)}


def read_report(run_folder: Path) -> Report:
    """Read the report of a finished run, or of an unfinished run's statistics; no value is NaN or infinite.

    Raises:
        ConfigError: the folder is no run folder, is not finished, or holds a table that cannot be read.
    """
    with Computed([run_folder]) as computed:
        return report_of(computed)


def read_together(run_folders: Sequence[Path], each: Sequence[Report]) -> Report:
    """Read several runs as one: tokens, times and money add up, rates are over all runs.

    Args:
        run_folders: at least one; a folder that is given twice counts once.
        each: the report of every folder; money is added up from them, because runs may have different prices.

    Raises:
        ConfigError: as read_report.
    """
    values_of = {Path(folder).resolve(): report.values for folder, report in zip(run_folders, each, strict=True)}
    with Computed(list(values_of)) as computed:
        return report_of(computed, list(values_of.values()))


def report_of(computed: Computed, each: Sequence[Values] = ()) -> Report:
    """Compute the report of runs whose tables are open; `each` has the values of every run if there are several."""
    run = computed.one_row("run")
    seconds = computed.one_row("rank_seconds")
    prefill_share = seconds.pop("prefill_share")
    unfinished = together([one for folder in computed.folders if (one := read_unfinished(RunDir(folder)))])
    if unfinished is not None:
        seconds = _without_waste(seconds)
    values: dict[str, Any] = {"prefill_share": prefill_share}
    for table in ONE_ROW_TABLES:
        values |= computed.one_row(table)
    values |= _cost_and_revenue(values, run)
    if each:
        added_up = [figure.key for figure in FIGURES.values() if figure.is_added_up]
        values |= {key: _total([one[key] for one in each]) for key in added_up}
    values |= margin.money(values["cost_usd"], values["revenue_usd"], values["output_tokens"])
    parts = seconds
    if each and values["cost_usd"]:
        parts, values["prefill_share"] = _dollars(each)
        parts = parts if unfinished is None else _without_waste(parts)
    values |= _shares_of_cost(values, parts)
    if unfinished is not None:
        values = known_so_far(values)
    errors = computed.rows(f"SELECT error, rows, num_texts FROM ({query_text('errors')}) LIMIT {MAX_ERRORS}")
    return Report(
        run=str(run["run"]),
        model=str(run["model"]),
        dtype=str(run["dtype"]),
        values={key: _finite(value) for key, value in values.items()},
        seconds=seconds,
        predictions=_predictions(computed, values, is_whole=unfinished is None),
        lengths=tuple(computed.records(query_text("lengths"))),
        decode_over_time=_decode_over_time(computed),
        ranks=tuple(RankDetails(*rank) for rank in computed.rows("SELECT * FROM ranks ORDER BY rank")),
        unreadable_shards=tuple(shard for folder in computed.folders for shard in _unreadable_shards(folder)),
        errors=tuple((error, num_rows) for error, num_rows, _ in errors),
        num_error_texts=errors[0][2] if errors else 0,
        bit_equal=run["bit_equal"],
        bit_equal_reason=run["bit_equal_reason"],
        processor=run["processor"],
        no_graph=computed.one_row("graphs")["no_graph"],
        unfinished=unfinished,
    )


def _predictions(computed: Computed, values: Values, *, is_whole: bool) -> tuple[Prediction, ...]:
    rows = computed.rows("SELECT name, planned, happened, at_best FROM predictions ORDER BY position")
    found = [Prediction(*row) for row in rows]
    # of several runs, which may have different prices, the sum of their costs
    found = [replace(one, happened=values["cost_usd"]) if one.name == "cost_usd" else one for one in found]
    return tuple(
        one if is_whole or one.name not in OF_THE_WHOLE else replace(one, happened=None, at_best=None) for one in found
    )


def _decode_over_time(computed: Computed) -> tuple[dict[str, Any], ...]:
    """Return KV tokens and requests of decode ranks by stretch of time; nothing if a single rank decodes."""
    ((start_s, end_s),) = computed.rows("SELECT min(start_s), max(end_s) FROM decode_steps WHERE kv_mean > 0")
    if start_s is None:
        return ()
    computed.add_axis(time_axis(start_s, end_s, DECODE_STRETCHES))
    return tuple(computed.records(query_text("decode_over_time")))


def _cost_and_revenue(values: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Value]:
    hit_tokens = values["cached_tokens"]
    miss_tokens = values["input_tokens"] - hit_tokens
    prices = {name: run[name] for name in ("input_hit", "input_miss", "output")}
    return {
        "cost_usd": margin.cost(values["gpu_hours"], run["gpu_hour"]),
        "revenue_usd": margin.revenue(hit_tokens, miss_tokens, values["output_tokens"], **prices),
    }


def _dollars(each: Sequence[Values]) -> tuple[dict[str, float], float | None]:
    """Return the cost of several runs by part, and prefill's share of it; a run without steps is split like others."""
    parts = {part: sum(one[f"{part}_cost_usd"] or 0.0 for one in each) for part in PARTS}
    known = [(one["cost_usd"] or 0.0, share) for one in each if (share := one["prefill_share"]) is not None]
    total = sum(cost for cost, _ in known)
    return parts, sum(cost * share for cost, share in known) / total if total else None


def _shares_of_cost(values: Values, parts: Mapping[str, float]) -> dict[str, Value]:
    """Return the cost by pool and by part: the part's share of all `parts`, which are seconds or dollars."""
    cost, inputs, outputs = values["cost_usd"], values["input_tokens"] or 0, values["output_tokens"]
    prefill_share, total = values["prefill_share"], sum(parts.values())
    prefill = None if cost is None or prefill_share is None else cost * prefill_share
    decode = None if cost is None or prefill is None else cost - prefill
    return {
        "usd_per_million_tokens": margin.per_million(cost, inputs + (outputs or 0)),
        "prefill_usd_per_million_input_tokens": margin.per_million(prefill, inputs),
        "decode_usd_per_million_output_tokens": margin.per_million(decode, outputs),
        **{f"{part}_cost_usd": cost * amount / total if cost is not None and total else None
           for part, amount in parts.items()},
    }  # fmt: skip


def _without_waste(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the parts with waste spread over steps: in an unfinished run, undelivered work may be in progress."""
    steps = ("prefill", "decode", "exchange")
    useful = sum(seconds[part] for part in steps)
    grown = 1 + seconds["waste"] / useful if useful else 1.0
    return {part: part_s * grown if part in steps else part_s for part, part_s in seconds.items() if part != "waste"}


def _total(values: list[Value]) -> Value:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _unreadable_shards(run_folder: Path) -> tuple[tuple[str, str], ...]:
    shards = read_json(RunDir(Path(run_folder)).run_json).get("shards", [])
    return tuple((str(shard["path"]), str(shard["problem"])) for shard in shards if shard.get("problem") is not None)


def _finite(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value
