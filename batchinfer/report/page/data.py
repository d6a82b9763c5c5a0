"""What the page of a run shows besides its figures: rows of queries/*.sql over time, ranks, experts."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchinfer.data.duckdb_sql import read_parquet
from batchinfer.report.computed import Computed
from batchinfer.report.read import Report, report_of
from batchinfer.rundir import RunDir, read_json

MAX_BINS = 48
# stretches of time that people count in, seconds; a day's run gets hours
WIDTHS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1200, 3600, 7200, 14400, 43200, 86400)
TEXT_CHARS = 300  # of an answer or an error that are shown
# tables on the page
LISTS = (
    "throughput", "occupancy", "revenue", "rank_work", "rank_times", "expert_tokens", "slowest", "failed",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """The run's time in stretches of equal length."""

    start_s: float  # Unix time; a whole number of stretches after midnight (UTC) when they are minutes or longer
    width_s: float
    num_bins: int


@dataclass(frozen=True, slots=True)
class ShownRow:
    """An output row with the start of its text."""

    shard: str
    row: int
    sample: int
    id: str
    text: str  # the answer, or the error of a failed row; at most TEXT_CHARS characters of it
    text_chars: int  # of all of it
    prompt_tokens: int
    completion_tokens: int
    seconds: float | None  # from prefill to the last token


@dataclass(frozen=True, slots=True)
class PageData:
    """Everything on the page of one run. The lists have the columns of the query of that name."""

    report: Report
    axis: TimeAxis | None  # None: no session is known
    throughput: list[dict[str, Any]]
    occupancy: list[dict[str, Any]]
    revenue: list[dict[str, Any]]
    rank_work: list[dict[str, Any]]
    rank_times: list[dict[str, Any]]
    expert_tokens: list[dict[str, Any]]
    slowest: list[ShownRow]
    failed: list[ShownRow]


def read_page_data(run_folder: Path) -> PageData:
    """Read a finished run.

    Raises:
        ConfigError: the folder is no run folder, is not finished, or holds a table that cannot be read.
    """
    with Computed([run_folder]) as computed:
        ((start_s, end_s),) = computed.rows(
            "SELECT min(start_s) FILTER (num_ranks > 0), max(end_s) FILTER (num_ranks > 0) FROM sessions"
        )
        axis = None if start_s is None else time_axis(start_s, end_s)
        start_s, width_s, num_bins = (0.0, 1.0, 0) if axis is None else (axis.start_s, axis.width_s, axis.num_bins)
        # Python writes a float so that it reads back as the same one
        computed.rows(
            f"CREATE TEMP TABLE axis AS SELECT {start_s!r}::DOUBLE AS start_s, {width_s!r}::DOUBLE AS width_s, "
            f"{num_bins} AS num_bins"
        )
        computed.create(["bins", *LISTS])
        found: dict[str, Any] = {name: computed.records(f"SELECT * FROM {name}") for name in LISTS}
        for name in ("slowest", "failed"):
            found[name] = _with_texts(computed, RunDir(Path(run_folder)), found[name])
        return PageData(report_of(computed), axis, **found)


def time_axis(start_s: float, end_s: float) -> TimeAxis:
    """At most MAX_BINS stretches from `start_s` to `end_s`, of a length that people count in.

    Args:
        start_s, end_s: Unix times.
    """
    for width_s in (*WIDTHS_S, *(86400.0 * 2**power for power in range(1, 30))):
        first_s = math.floor(start_s / width_s) * width_s if width_s >= 60 else start_s
        num_bins = max(1, math.ceil((end_s - first_s) / width_s - 1e-9))
        if num_bins <= MAX_BINS:
            return TimeAxis(first_s, float(width_s), num_bins)
    return TimeAxis(start_s, max(1.0, end_s - start_s), 1)


def _with_texts(computed: Computed, run: RunDir, rows: list[dict[str, Any]]) -> list[ShownRow]:
    """The rows with id and text, read from their shards' outputs."""
    names = {shard["index"]: shard["name"] for shard in read_json(run.run_json).get("shards", [])}
    texts: dict[tuple[int, int, int], tuple[Any, ...]] = {}
    for shard in {row["shard"] for row in rows}:
        file = run.output(names.get(shard, ""))
        if not file.is_file():
            continue
        wanted = ", ".join(str(int(row["row"])) for row in rows if row["shard"] == shard)
        found = computed.rows(
            f"SELECT row, sample, CAST(id AS VARCHAR), left(shown, {TEXT_CHARS}), length(shown) FROM "
            f"(SELECT *, coalesce(CASE WHEN status = 'ok' THEN text ELSE error END, '') AS shown "
            f"FROM {read_parquet(file)} WHERE row IN ({wanted}))"
        )
        texts |= {(shard, row, sample): tuple(rest) for row, sample, *rest in found}
    shown = []
    for row in rows:
        key = row["shard"], row["row"], row["sample"]
        row_id, text, text_chars = texts.get(key, (None, "", 0))
        shown.append(
            ShownRow(
                shard=str(names.get(row["shard"], row["shard"])),
                row=row["row"],
                sample=row["sample"],
                id="" if row_id is None else row_id,
                text=text,
                text_chars=text_chars,
                prompt_tokens=row.get("prompt_tokens", 0),
                completion_tokens=row.get("completion_tokens", 0),
                seconds=row.get("seconds"),
            )
        )
    return shown
