"""The page of finished runs: one HTML file without script and without anything from elsewhere. For `report --html`."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from pathlib import Path

from batchinfer.report import forms
from batchinfer.report.export import refuse_inside_runs
from batchinfer.report.metrics import METRICS, Figure, is_worth_showing
from batchinfer.report.page import loads, over_time
from batchinfer.report.page.data import PageData, ShownRow, read_page_data
from batchinfer.report.page.markup import Cell, name, number, shown, table
from batchinfer.report.side_by_side import LINES, Column, all_figures
from batchinfer.report.terminal import fit
from batchinfer.run.equal_rows import UNEQUAL
from batchinfer.rundir import publish_text


def write_page(run_folders: Sequence[Path], together: Column | None, file: Path) -> None:
    """Write the page, whole or not at all.

    Args:
        run_folders: finished runs; each has its part of the page.
        together: figures of several runs as one, for the table that compares them; None with one run.
        file: where to write.

    Raises:
        ConfigError: a run cannot be read, or the file cannot be written or would lie among a run's own files.
    """
    refuse_inside_runs(run_folders, file)
    publish_text(file, page([read_page_data(folder) for folder in run_folders], together))


def page(runs: Sequence[PageData], together: Column | None = None) -> str:
    """The HTML document."""
    style = (resources.files("batchinfer.report.page") / "page.css").read_text(encoding="utf-8")
    # Nothing may be loaded or run, whatever stands on the page; the style is allowed by its hash.
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    title = f"batchinfer report: {' + '.join(data.details.run for data in runs)}"
    parts = [_comparison(runs, together)] if together is not None else []
    parts += [_run(f"r{index}", data) for index, data in enumerate(runs)]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer"><link rel="icon" href="data:,">'
        f"<title>{_plain(title)}</title><style>{style}</style></head>\n"
        f"<body><main>{''.join(parts)}{_footer()}</main></body></html>\n"
    )


def _run(key: str, data: PageData) -> str:
    return "\n".join(
        [
            _head(data),
            _tiles(data),
            _section("Over time", over_time.over_time(key, data)),
            _section("Nodes and money", over_time.nodes_and_money(key, data)),
            _section("Time and cost", over_time.where_time_went(key, data)),
            _section("Load", loads.load(key, data)),
            _plan(data),
            _rows(data),
            _figures(data),
        ]
    )


def _head(data: PageData) -> str:
    details, when = data.details, ""
    if data.axis is not None:
        start = datetime.fromtimestamp(data.axis.start_s, UTC)
        when = f", from {start:%Y-%m-%d %H:%M} UTC"
    lasted = forms.duration(data.metrics["wall_s"]) or f"{forms.rate(data.metrics['wall_s'])} s"
    parts = Path(details.model).parts
    model = "/".join(("…", *parts[-2:])) if len(parts) > 3 else details.model
    about = f"{shown(model, 200)}, {shown(details.dtype)}{when}, {lasted}"
    unequal = ""
    if details.bit_equal is False:
        unequal = f'<p class="note">Warning: {UNEQUAL}: {shown(str(details.bit_equal_reason))}</p>'
    return f'<header><h1>{shown(details.run, 200)}</h1><p class="note">{about}</p>{unequal}</header>'


def _tiles(data: PageData) -> str:
    m, details = data.metrics, data.details
    hits = f"{_percent(m['cache_hit_rate'])} from a cache"
    best = None if not m["input_tokens"] else (m["optimal_cached_tokens"] or 0) / m["input_tokens"]
    error_note = f"{forms.count(m['rows_error'])} error rows" if m["rows_error"] else "no error row"
    tiles = [
        ("rows ok", forms.count(m["rows_ok"]), error_note),
        ("input tokens", forms.count(m["input_tokens"]), f"{hits}; at best {_percent(best)}"),
        (
            "output tokens",
            forms.count(m["output_tokens"]),
            f"{_or_dash(forms.rate(m['output_tokens_per_s_per_request']))}/s per request",
        ),
        ("prefill per node", _or_dash(forms.rate(m["prefill_tokens_per_s_per_node"])), "tokens/s, cached included"),
        ("decode per node", _or_dash(forms.rate(m["decode_tokens_per_s_per_node"])), "tokens/s"),
        ("nodes, mean", _or_dash(forms.rate(m["mean_nodes"])), f"{forms.count(m['peak_nodes'])} at most"),
        ("cost", _dollar(m["cost_usd"]), f"{_dollar(details.unit_costs.usd_per_million_output_tokens)} per M output"),
        ("GPU-hours", forms.hours(m["gpu_hours"]), "ranks held × hours held"),
        ("revenue at list prices", _dollar(m["revenue_usd"]), "of input and output tokens"),
        ("cost profit margin", _percent(m["cost_profit_margin"]), "profit ÷ cost"),
        ("gross margin", _percent(m["gross_margin"]), "profit ÷ revenue"),
    ]
    items = "".join(
        f'<div class="tile"><dt>{escape(label)}</dt><dd>{escape(value or "–")}</dd>'
        f'<dd class="note">{escape(note)}</dd></div>'
        for label, value, note in tiles
    )
    return f'<dl class="tiles">{items}</dl>'


def _section(title: str, cards: Sequence[str]) -> str:
    if not cards:
        return ""
    return f'<section><h2>{escape(title)}</h2><div class="cards">{"".join(cards)}</div></section>'


def _card_of(html: str) -> str:
    return f'<div class="card wide">{html}</div>'


def _plan(data: PageData) -> str:
    rows = [
        [
            name(label),
            number(form(found.planned)),
            number(form(found.happened)),
            number(form(found.at_best)),
        ]
        for found in data.details.predictions
        for label, form in [forms.PREDICTION_FORMS[found.name]]
        if is_worth_showing(found)
    ]
    headers = [("", "name"), ("planned", "number"), ("happened", "number"), ("at best", "number")]
    caption = "What the plan said, what happened, and what no plan could go below"
    return _section("Plan", [_card_of(table(caption, headers, rows))]) if rows else ""


def _rows(data: PageData) -> str:
    parts = []
    if data.slowest:
        headers = [
            ("row", "name"),
            ("seconds", "number"),
            ("prompt", "number"),
            ("output", "number"),
            ("answer begins", "text"),
        ]
        rows = [
            [
                _where(row),
                number(forms.rate(row.seconds)),
                number(forms.count(row.prompt_tokens)),
                number(forms.count(row.completion_tokens)),
                _text(row),
            ]
            for row in data.slowest
        ]
        caption = f"The {len(rows)} requests that took longest from prefill to their last token"
        parts.append(_section("Slowest rows", [_card_of(table(caption, headers, rows))]))
    if data.failed:
        num_failed = data.metrics["rows_error"]
        rows = [[_where(row), _text(row)] for row in data.failed]
        caption = f"{len(rows)} of {forms.count(num_failed)} error rows, in the order of the input"
        failed = table(caption, [("row", "name"), ("error", "text")], rows)
        parts.append(_section("Failed rows", [_card_of(failed)]))
    if data.details.unreadable_shards:
        rows = [
            [name(path, 300), Cell(shown(problem), "text")] for path, problem in data.details.unreadable_shards[:50]
        ]
        caption = f"{len(rows)} of {len(data.details.unreadable_shards):,} shards that could not be read"
        headers = [("shard", "name"), ("problem", "text")]
        parts.append(_section("Unreadable shards", [_card_of(table(caption, headers, rows))]))
    return "".join(parts)


def _where(row: ShownRow) -> Cell:
    sample = f", sample {row.sample}" if row.sample else ""
    place = f"{shown(row.shard, 60)} row {row.row:,}{sample}"
    return Cell(f"{shown(row.id, 60)}<br>{place}" if row.id else place)


def _text(row: ShownRow) -> Cell:
    return Cell(shown(row.text, num_chars=row.text_chars), "text")


def _figures(data: PageData) -> str:
    rows = [
        [name(key), number(_plain_figure(data.metrics[key])), Cell(escape(doc), "text")] for key, doc in METRICS.items()
    ]
    headers = [("key of --json", "name"), ("value", "number"), ("meaning", "text")]
    return _section("All figures", [_card_of(table("The report as --json has it", headers, rows))])


def _comparison(runs: Sequence[PageData], together: Column) -> str:
    columns = [Column(data.details.run, all_figures(data.metrics, data.details)) for data in runs] + [together]
    rows = []
    for section, lines in LINES:
        for label, key, form in lines:
            rows.append([name(f"{section}: {label.strip()}"), *(number(form(one.figures[key])) for one in columns)])
    headers = [("figure", "name"), *((_short(one.name), "number") for one in columns)]
    pieces = _card_of(table("Side by side and together", headers, rows))
    return f"<header><h1>{len(runs)} runs</h1></header>{_section('Compared', [pieces])}"


def _footer() -> str:
    return (
        "<footer><p>Cost profit margin is profit ÷ cost, gross margin is profit ÷ revenue. Revenue is what the tokens "
        "would earn at the list prices in the job. Made by <code>batchinfer report --html</code>.</p></footer>"
    )


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"


def _plain(text: str) -> str:
    """For <title>, which knows no elements."""
    return escape(fit(text, 120))


def _plain_figure(value: Figure) -> str | None:
    return f"{value:,.6g}" if isinstance(value, float) and abs(value) < 1e6 else forms.count(value)


def _percent(value: Figure) -> str:
    return "–" if value is None else f"{forms.percent(value)} %"


def _dollar(value: Figure) -> str:
    return "–" if value is None else over_time.usd(value)


def _or_dash(text: str | None) -> str:
    return text or "–"
