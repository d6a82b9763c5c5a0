"""Data of a run's page in addition to its figures: rows of queries/*.sql over time, ranks and experts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchinfer.checked_json import read_json
from batchinfer.data.duckdb_sql import read_parquet
from batchinfer.report.computed import Computed
from batchinfer.report.page.prompts import read_prompts
from batchinfer.report.page.settings import read_settings
from batchinfer.report.read import Report, report_of
from batchinfer.report.time_axis import TimeAxis, time_axis
from batchinfer.rundir import RunDir

MAX_BINS = 48
TEXT_CHARS = 600  # read characters of an answer or an error
# tables on the page
LISTS = (
    "throughput", "occupancy", "revenue", "rank_work", "rank_times", "decode_times", "decode_over_time",
    "expert_tokens", "examples", "slowest", "failed",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShownRow:
    """An output row with the start of its text."""

    shard: str
    row: int
    sample: int
    id: str
    text: str  # the answer, or the error of a failed row; its first TEXT_CHARS characters
    text_chars: int  # length of the whole text
    prompt_tokens: int
    completion_tokens: int
    seconds: float | None  # from prefill to the last token
    prompt: str = ""  # of an example


@dataclass(frozen=True, slots=True)
class PageData:
    """All data on the page of one run. Each list has the columns of the query of its name."""

    report: Report
    axis: TimeAxis | None  # None: no session is known
    throughput: list[dict[str, Any]]
    occupancy: list[dict[str, Any]]
    revenue: list[dict[str, Any]]
    rank_work: list[dict[str, Any]]
    rank_times: list[dict[str, Any]]
    decode_times: list[dict[str, Any]]
    decode_over_time: list[dict[str, Any]]
    expert_tokens: list[dict[str, Any]]
    examples: list[ShownRow]
    slowest: list[ShownRow]
    failed: list[ShownRow]
    settings: list[tuple[str, str]]  # name and value


def read_page_data(run_folder: Path) -> PageData:
    """Read the page's data from a finished run.

    Raises:
        ConfigError: the folder is no run folder, is not finished, or holds a table that cannot be read.
    """
    with Computed([run_folder]) as computed:
        ((start_s, end_s),) = computed.rows(
            "SELECT min(start_s) FILTER (num_ranks > 0), max(end_s) FILTER (num_ranks > 0) FROM sessions"
        )
        report = report_of(computed)
        axis = None if start_s is None else time_axis(start_s, end_s, MAX_BINS)
        computed.add_axis(axis or TimeAxis(0.0, 1.0, 0))
        computed.create(LISTS)
        found: dict[str, Any] = {name: computed.records(f"SELECT * FROM {name}") for name in LISTS}
        if report.unfinished is not None:
            found["examples"] = []  # texts of answers are in the outputs only
        run = RunDir(Path(run_folder))
        model = Path(report.model)
        prompts = read_prompts(computed, run, model, [(row["shard"], row["row"]) for row in found["examples"]])
        for row in found["examples"]:
            row["prompt"] = prompts.get((row["shard"], row["row"]), "")
        for name in ("examples", "slowest", "failed"):
            found[name] = _with_texts(computed, run, found[name])
        return PageData(
            report, axis, settings=read_settings(computed, run, is_finished=report.unfinished is None), **found
        )


def _with_texts(computed: Computed, run: RunDir, rows: list[dict[str, Any]]) -> list[ShownRow]:
    """Add id and text to the rows, read from their shards' outputs."""
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
                prompt=row.get("prompt", ""),
            )
        )
    return shown
