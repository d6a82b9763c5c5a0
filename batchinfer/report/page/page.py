"""The HTML page of finished runs: one file without scripts and external resources."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from batchinfer.equal_rows import UNEQUAL
from batchinfer.report import forms
from batchinfer.report.export import refuse_inside_runs
from batchinfer.report.figure import Values, groups_of
from batchinfer.report.figures import ANSWERS, GROUPS, MONEY, PREDICTIONS, PUBLISHED
from batchinfer.report.forms import Value
from batchinfer.report.page import charts, loads, over_time
from batchinfer.report.page.charts import Axis, Series
from batchinfer.report.page.data import PageData, ShownRow, read_page_data
from batchinfer.report.page.markup import Card, Section, Table, render, shown
from batchinfer.report.read import Report, is_worth_showing, read_together
from batchinfer.sanitize import fit
from batchinfer.whole_files import publish_text

MAX_SHARDS = 50  # unreadable shards that are listed
MAX_LENGTH_MARKS = 6  # below a picture of lengths


@dataclass(frozen=True, slots=True)
class RunPart:
    """The part of the page that shows one run."""

    name: str
    about: str
    warnings: Sequence[str]
    tiles: Sequence[tuple[str, str, str]]  # label, value, note
    hint: str  # how to get tiles of money; "": they are there
    sections: Sequence[Section]


def write_page(run_folders: Sequence[Path], file: Path) -> None:
    """Write the page atomically; several runs are compared at its start.

    Raises:
        ConfigError: a run cannot be read, or the file cannot be written or is among a run's own files.
    """
    refuse_inside_runs(run_folders, file)
    runs = [read_page_data(folder) for folder in run_folders]
    together = read_together(run_folders, [data.report for data in runs]) if len(runs) > 1 else None
    publish_text(file, page(runs, together))


def page(runs: Sequence[PageData], together: Report | None = None) -> str:
    """Return the HTML document; if `together` is given, the document begins with a table that compares the runs."""
    title = f"batchinfer report: {' + '.join(data.report.run for data in runs)}"
    return render(
        title=fit(title, 120),
        comparison=None if together is None else _comparison(runs, together),
        runs=[_run(f"r{index}", data) for index, data in enumerate(runs)],
    )


def _run(key: str, data: PageData) -> RunPart:
    report, values = data.report, data.report.values
    is_priced = values["cost_usd"] is not None or values["revenue_usd"] is not None
    return RunPart(
        name=report.run,
        about=_about(data),
        warnings=_warnings(report),
        tiles=_tiles(values) + (_money_tiles(values) if is_priced else []),
        hint="" if is_priced else MONEY.why_empty or "",
        sections=[
            Section("Over time", over_time.over_time(key, data)),
            Section("Nodes and money", over_time.nodes_and_money(key, data)),
            Section("Time and cost", over_time.where_time_went(key, data)),
            Section("Load", loads.load(key, data)),
            Section("Answers", _answers(key, data)),
            _section("Plan", _plan(report)),
            _section("Slowest rows", _slowest(data)),
            _section("Failed rows", _failed(data)),
            _section("Unreadable shards", _unreadable(report)),
            _section("All figures", _figures(values)),
        ],
    )


def _warnings(report: Report) -> list[str]:
    found = [] if report.unfinished is None else [f"This run is {report.unfinished.sentence()}"]
    return found + ([f"Warning: {UNEQUAL}: {report.bit_equal_reason}"] if report.bit_equal is False else [])


def _about(data: PageData) -> str:
    report, wall_s, when = data.report, data.report.values["wall_s"], ""
    if data.axis is not None:
        when = f", from {datetime.fromtimestamp(data.axis.start_s, UTC):%Y-%m-%d %H:%M} UTC"
    parts = Path(report.model).parts
    model = "/".join(("…", *parts[-2:])) if len(parts) > 3 else report.model
    return f"{model}, {report.dtype}{when}, {forms.duration(wall_s) or f'{forms.rate(wall_s)} s'}"


def _tiles(m: Values) -> list[tuple[str, str, str]]:
    best = (m["optimal_cached_tokens"] or 0) / m["input_tokens"] if m["input_tokens"] else None
    error_note = f"{forms.count(m['rows_error'])} error rows" if m["rows_error"] else "no error row"
    cut = m["finish_reasons.length"]
    return [
        ("rows ok", forms.count(m["rows_ok"]), f"{error_note}; {forms.count(cut)} cut at max_tokens"),
        (
            "input tokens",
            forms.count(m["input_tokens"]),
            f"{_percent(m['cache_hit_rate'])} from a cache; at best {_percent(best)}",
        ),
        (
            "output tokens",
            forms.count(m["output_tokens"]),
            f"{forms.rate(m['output_tokens_per_s_per_request'])}/s per request",
        ),
        ("prefill per node", forms.rate(m["prefill_tokens_per_s_per_node"]), "tokens/s, cached included"),
        ("decode per node", forms.rate(m["decode_tokens_per_s_per_node"]), "tokens/s"),
        ("nodes, mean", forms.rate(m["mean_nodes"]), f"{forms.count(m['peak_nodes'])} at most"),
        ("GPU-hours", forms.hours(m["gpu_hours"]), "ranks held × hours held"),
    ]


def _money_tiles(m: Values) -> list[tuple[str, str, str]]:
    return [
        ("cost", forms.usd(m["cost_usd"]), f"{forms.usd(m['usd_per_million_output_tokens'])} per M output"),
        ("revenue at list prices", forms.usd(m["revenue_usd"]), "of input and output tokens"),
        ("cost profit margin", _percent(m["cost_profit_margin"]), "profit ÷ cost"),
        ("gross margin", _percent(m["gross_margin"]), "profit ÷ revenue"),
    ]


def _answers(key: str, data: PageData) -> list[Card]:
    """Return cards with histograms of answer and thinking lengths, and a table of the figures of answers."""
    lengths, values = data.report.lengths, data.report.values
    cards = [_lengths(key, "rows", "Length of answers", "output tokens, thinking included", lengths)]
    if values["reasoning.rows"]:
        cards.append(_lengths(key, "reasoning_rows", "Length of thinking", "tokens of thinking", lengths))
    figures = [figure for _, found in groups_of([values], [ANSWERS]) for figure in found]
    rows = [[one.label.strip(), f"{one.form(values[one.key])} {one.unit}", one.note_of(values)] for one in figures]
    table = Table("What is known of answers", [("figure", "name"), ("value", "number"), ("of", "text")], rows)
    return [*(cards if lengths else []), *([Card(tables=[table], is_wide=True)] if rows else [])]


def _lengths(key: str, field: str, title: str, unit: str, lengths: tuple[dict[str, Any], ...]) -> Card:
    names = [forms.span(length["from_tokens"], length["to_tokens"]) for length in lengths]
    every = max(1, math.ceil(len(names) / MAX_LENGTH_MARKS))
    marks = [(place, charts.short(lengths[place]["from_tokens"])) for place in range(0, len(names), every)]
    axis = Axis([f"{name} tokens" for name in names], marks)
    rows = [length[field] for length in lengths]
    picture = charts.columns(
        f"{key}-{field}", f"Rows by their {unit}", axis, [Series("rows", "s0", rows)], lambda value: f"{value:,.0f}"
    )
    counts = list(zip(names, map(forms.count, rows), strict=True))
    numbers = Table(f"Rows by their {unit}", [("tokens", "name"), ("rows", "number")], counts)
    return Card(title, f"Rows by their {unit}; two columns for each doubling", picture, numbers=numbers)


def _section(title: str, table: Table) -> Section:
    return Section(title, [Card(tables=[table], is_wide=True)] if table.rows else [])


def _plan(report: Report) -> Table:
    rows = []
    for found in filter(is_worth_showing, report.predictions):
        label, form = PREDICTIONS[found.name]
        rows.append([label, form(found.planned), form(found.happened), form(found.at_best)])
    headers = [("", "name"), ("planned", "number"), ("happened", "number"), ("at best", "number")]
    return Table("What the plan said, what happened, and what no plan could go below", headers, rows)


def _slowest(data: PageData) -> Table:
    numbers = [(name, "number") for name in ("seconds", "prompt", "output")]
    rows = [
        [
            _where(row),
            forms.rate(row.seconds),
            forms.count(row.prompt_tokens),
            forms.count(row.completion_tokens),
            shown(row.text, num_chars=row.text_chars),
        ]
        for row in data.slowest
    ]
    caption = f"The {len(rows)} requests that took longest from prefill to their last token"
    return Table(caption, [("row", "name"), *numbers, ("answer begins", "text")], rows)


def _failed(data: PageData) -> Table:
    rows = [[_where(row), shown(row.text, num_chars=row.text_chars)] for row in data.failed]
    num_failed = forms.count(data.report.values["rows_error"])
    caption = f"{len(rows)} of {num_failed} error rows, in the order of the input"
    return Table(caption, [("row", "name"), ("error", "text")], rows)


def _unreadable(report: Report) -> Table:
    rows = report.unreadable_shards[:MAX_SHARDS]
    caption = f"{len(rows)} of {len(report.unreadable_shards):,} shards that could not be read"
    return Table(caption, [("shard", "name"), ("problem", "text")], rows)


def _where(row: ShownRow) -> Markup:
    sample = f", sample {row.sample}" if row.sample else ""
    position = shown(row.shard, 60) + f" row {row.row:,}{sample}"
    return shown(row.id, 60) + Markup("<br>") + position if row.id else position


def _figures(values: Values) -> Table:
    rows = [[figure.key, _in_json(values[figure.key]), figure.meaning] for figure in PUBLISHED]
    headers = [("key of --json", "name"), ("value", "number"), ("meaning", "text")]
    return Table("The report as --json has it", headers, rows)


def _comparison(runs: Sequence[PageData], together: Report) -> Section:
    reports = [*(data.report for data in runs), together]
    names = [data.report.run + " (unfinished)" * (data.report.unfinished is not None) for data in runs] + ["together"]
    rows = [
        [f"{group.title}: {figure.label.strip()}{f', {figure.unit}' if figure.unit else ''}",
         *(figure.form(report.values[figure.key]) for report in reports)]
        for group, figures in groups_of([report.values for report in reports], GROUPS)
        for figure in figures
    ]  # fmt: skip
    headers = [("figure", "name"), *((fit(name, 40), "number") for name in names)]
    return _section("Compared", Table("Side by side and together", headers, rows))


def _in_json(value: Value) -> str:
    return f"{value:,.6g}" if isinstance(value, float) and abs(value) < 1e6 else forms.count(value)


def _percent(value: Value) -> str:
    return forms.DASH if value is None else f"{forms.percent(value)} %"
