"""The HTML page of finished runs: one file without scripts and external resources."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from batchinfer.report import forms
from batchinfer.report.export import refuse_inside_runs
from batchinfer.report.figure import Figure, Group, Values, groups_of
from batchinfer.report.figures import ANSWERS, GROUPS, PREDICTIONS, PUBLISHED
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
SHOWN_CHARS = 700  # of an example's prompt and of its answer


@dataclass(frozen=True, slots=True)
class RunPart:
    """The part of the page that shows one run."""

    name: str
    about: str
    warnings: Sequence[str]
    tiles: Sequence[tuple[str, str, str]]  # label, value, note
    money: Sequence[tuple[str, str, str]]  # the same; empty without prices
    sections: Sequence[Section]


def write_page(run_folders: Sequence[Path], file: Path, *, compare: bool = False) -> None:
    """Write the page atomically; several runs have a table of all figures at its start.

    Args:
        run_folders: finished runs, or unfinished ones with their statistics so far.
        file: the page.
        compare: show two runs side by side throughout, with the change of each figure.

    Raises:
        ConfigError: a run cannot be read, or the file cannot be written or is among a run's own files.
    """
    refuse_inside_runs(run_folders, file)
    runs = [read_page_data(folder) for folder in run_folders]
    if compare:
        publish_text(file, comparison(*runs))
        return
    together = read_together(run_folders, [data.report for data in runs]) if len(runs) > 1 else None
    publish_text(file, page(runs, together))


def page(runs: Sequence[PageData], together: Report | None = None) -> str:
    """Return the HTML document; if `together` is given, the document begins with a table that compares the runs."""
    title = f"batchinfer report: {' + '.join(data.report.run for data in runs)}"
    return render(
        title=fit(title, 120),
        heading=f"{len(runs)} runs" if len(runs) > 1 else "",
        comparison=[] if together is None else [_comparison(runs, together)],
        runs=[_run(f"r{index}", data.report.run, data) for index, data in enumerate(runs)],
        pairs=[],
    )


def comparison(before: PageData, after: PageData) -> str:
    """Return the HTML document of two runs side by side."""
    names = [f"before: {before.report.run}", f"after: {after.report.run}"]
    parts = [_run(f"r{index}", names[index], data) for index, data in enumerate((before, after))]
    return render(
        title=fit(f"batchinfer report: {before.report.run} and {after.report.run}", 120),
        heading="Two runs side by side",
        comparison=[_changes(before.report, after.report, names), _differences(before, after, names)],
        runs=[replace(part, sections=()) for part in parts],
        pairs=_paired(*parts),
    )


def _run(key: str, name: str, data: PageData) -> RunPart:
    report, values = data.report, data.report.values
    return RunPart(
        name=name,
        about=_about(data),
        warnings=_warnings(report),
        tiles=_tiles(values),
        money=_money_tiles(values),
        sections=[
            _section("Settings", _settings(data)),
            Section("Examples", _examples(data)),
            Section("Over time", over_time.over_time(key, data)),
            Section("Time and cost", [*over_time.where_time_went(key, data), *over_time.money(key, data)]),
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
    return found + [f"Warning: {warning}" for warning in report.warnings]


def _about(data: PageData) -> str:
    report, wall_s, when = data.report, data.report.values["wall_s"], ""
    if data.axis is not None:
        when = f", from {datetime.fromtimestamp(data.axis.start_s, UTC):%Y-%m-%d %H:%M} UTC"
    parts = Path(report.model).parts
    model = "/".join(("…", *parts[-2:])) if len(parts) > 3 else report.model
    return f"{model}, {report.dtype}{when}, {forms.duration(wall_s) or f'{forms.rate(wall_s)} s'}"


def _tiles(m: Values) -> list[tuple[str, str, str]]:
    most, inputs = m["optimal_cached_tokens"], m["input_tokens"]
    best = most / inputs if most is not None and inputs else None
    share = (m["rows_error"] or 0) / m["rows"] if m["rows"] else None
    return [
        ("rows", forms.count(m["rows"]), f"{forms.count(m['finish_reasons.length'])} cut at max_tokens"),
        ("errors", forms.count(m["rows_error"]), f"{_percent(share)} of the rows"),
        ("wall time", _time(m["wall_s"]), f"{_time(m['startup_s'])} of start-up"),
        ("rows/s", forms.rate(m["rows_per_s"]), "over the wall time"),
        (
            "tokens/s",
            forms.rate(m["tokens_per_s"]),
            f"{forms.count(m['input_tokens'])} in, {forms.count(m['output_tokens'])} out",
        ),
        ("cache hits", _percent(m["cache_hit_rate"]), f"at best {_percent(best)}"),
    ]


def _money_tiles(m: Values) -> list[tuple[str, str, str]]:
    """Return the tiles of cost, revenue and margins; none without prices."""
    if m["cost_usd"] is None and m["revenue_usd"] is None:
        return []
    tiles = {
        "cost_usd": ("cost", forms.usd, "of the ranks held"),
        "gpu_hours": ("GPU-hours", forms.hours, "ranks held × hours held"),
        "usd_per_million_output_tokens": ("cost per M", forms.usd, "output tokens"),
        "revenue_usd": ("revenue", forms.usd, "at list prices"),
        "cost_profit_margin": ("cost profit margin", _percent, "profit ÷ cost"),
        "gross_margin": ("gross margin", _percent, "profit ÷ revenue"),
    }
    return [(label, form(m[key]), note) for key, (label, form, note) in tiles.items() if m[key] is not None]


def _settings(data: PageData) -> Table:
    caption = "What ran; below that, the keys of the job that differ from their defaults"
    return Table(caption, [("setting", "name"), ("value", "text")], [list(pair) for pair in data.settings])


def _examples(data: PageData) -> list[Card]:
    """Return cards with the prompt of an answered row, as the model got it, and the answer."""
    cards = []
    for number, row in enumerate(data.examples, 1):
        lines = [("prompt", shown(row.prompt, SHOWN_CHARS)), ("answer", shown(row.text, SHOWN_CHARS, row.text_chars))]
        told = Markup("").join(Markup("<dt>{}</dt><dd>{}</dd>").format(name, text) for name, text in lines)
        tokens = f"{forms.count(row.prompt_tokens)} tokens in, {forms.count(row.completion_tokens)} out"
        note = Markup("{}, {}").format(_where(row), tokens)
        cards.append(Card(f"Example {number}", note, Markup('<dl class="example">{}</dl>').format(told)))
    return cards


def _answers(key: str, data: PageData) -> list[Card]:
    """Return cards with histograms of answer and thinking lengths, and a table of the figures of answers."""
    lengths, values = data.report.lengths, data.report.values
    cards = [_lengths(key, "rows", "Length of answers", "output tokens, thinking included", lengths)]
    if values["reasoning.rows"]:
        cards.append(_lengths(key, "reasoning_rows", "Length of thinking", "tokens of thinking", lengths))
    figures = [figure for _, found in groups_of([values], [ANSWERS]) for figure in found]
    rows = [[one.label.strip(), f"{one.form(values[one.key])} {one.unit}", one.note_of(values)] for one in figures]
    table = Table("What is known of answers", [("figure", "name"), ("value", "number"), ("of", "text")], rows)
    return [*(cards if len(lengths) > 1 else []), *([Card(tables=[table], is_wide=True)] if rows else [])]


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


def _paired(before: RunPart, after: RunPart) -> list[Section]:
    """Return the sections with a card of each run in turn; settings and figures are in tables of both runs."""
    by_title = [{section.title: section.cards for section in part.sections} for part in (before, after)]
    sections = []
    for title in (section.title for section in before.sections if section.title not in ("Settings", "All figures")):
        cards = [{card.title: card for card in found[title]} for found in by_title]
        pairs = [
            replace(found.get(name) or Card(name, "not in this run"), run=part.name, is_wide=False)
            for name in dict.fromkeys([*cards[0], *cards[1]])
            for part, found in zip((before, after), cards, strict=True)
        ]
        sections.append(Section(title, pairs))
    return sections


def _changes(before: Report, after: Report, names: Sequence[str]) -> Section:
    rows = [
        [_label(group, figure), *(figure.form(one.values[figure.key]) for one in (before, after)),
         figure.change(before.values[figure.key], after.values[figure.key])]
        for group, figures in groups_of([before.values, after.values], GROUPS)
        for figure in figures
    ]  # fmt: skip
    headers = [("figure", "name"), *((fit(name, 40), "number") for name in names), ("change", "number")]
    return _section(
        "Compared", Table("Figures of both runs, and the change from the first to the second", headers, rows)
    )


def _differences(before: PageData, after: PageData, names: Sequence[str]) -> Section:
    settings = [dict(before.settings), dict(after.settings)]
    pairs = [(name, *(one.get(name, "") for one in settings)) for name in {**settings[0], **settings[1]}]
    rows = [[name, *values] for name, *values in pairs if values[0] != values[1]]
    headers = [("setting", "name"), *((fit(name, 40), "text") for name in names)]
    return _section(
        "Settings", Table(f"Settings that differ; the other {len(pairs) - len(rows)} are the same", headers, rows)
    )


def _label(group: Group, figure: Figure) -> str:
    return f"{group.title}: {figure.label.strip()}{f', {figure.unit}' if figure.unit else ''}"


def _comparison(runs: Sequence[PageData], together: Report) -> Section:
    reports = [*(data.report for data in runs), together]
    names = [data.report.run + " (unfinished)" * (data.report.unfinished is not None) for data in runs] + ["together"]
    rows = [
        [_label(group, figure),
         *(figure.form(report.values[figure.key]) for report in reports)]
        for group, figures in groups_of([report.values for report in reports], GROUPS)
        for figure in figures
    ]  # fmt: skip
    headers = [("figure", "name"), *((fit(name, 40), "number") for name in names)]
    return _section("Compared", Table("Side by side and together", headers, rows))


def _in_json(value: Value) -> str:
    return f"{value:,.6g}" if isinstance(value, float) and abs(value) < 1e6 else forms.count(value)


def _time(num_seconds: Value) -> str:
    return forms.duration(num_seconds) or (f"{forms.seconds(num_seconds)} s" if num_seconds is not None else forms.DASH)


def _percent(value: Value) -> str:
    return forms.DASH if value is None else f"{forms.percent(value)} %"
