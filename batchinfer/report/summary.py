"""The end of a run in a few lines: rows, errors, speed, cache hits, and where outputs and figures are."""

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.text import Text

from batchinfer.report import forms
from batchinfer.report.figures import FIGURES
from batchinfer.report.read import Report
from batchinfer.report.terminal import HEADING, NOTE, WARNING, text
from batchinfer.sanitize import count_text, fit

MOST_LINES = 25
MOST_REASONS = 3  # listed reasons of error rows, and listed shards without outputs
LABEL = 10  # columns of a line's label


def summary(report: Report, shown: str, width: int, *, has_dataset: bool) -> Iterator[Text]:
    """Yield the lines of a finished run, at most MOST_LINES; paths and commands are never cut.

    Args:
        shown: the run folder as the user names it, or its URI.
        width: of the terminal, for reasons of errors.
        has_dataset: whether outputs are a Hugging Face dataset, too.
    """
    yield text(f"{fit(report.run, width // 2)}: finished", HEADING)
    for warning in report.warnings:
        yield text(f"warning: {warning}", WARNING)
    yield from _rows(report, width)
    yield from _figures(report)
    folder = _short(shown)
    yield _line("outputs", f"{folder}/outputs")
    if has_dataset:
        yield _line("dataset", f"{folder}/dataset; name the licence in its README.md")
    yield _line("report", f"batchinfer report {shlex.quote(folder)}")
    page = shlex.quote(f"{Path(folder).name}.html")
    yield _line("page", f"batchinfer report {shlex.quote(folder)} --html {page}")


def _rows(report: Report, width: int) -> Iterator[Text]:
    values = report.values
    num_errors = values["rows_error"] or 0
    rows = count_text(int(values["rows"] or 0), "output row")
    counts = f"{rows}: {forms.count(values['rows_ok'])} ok, {forms.count(num_errors)} error"
    yield _line("rows", counts, WARNING if num_errors else "")
    many_cut = FIGURES["finish_reasons.length"].note_of(values)
    if many_cut:
        yield _line("cut", f"{forms.count(values['finish_reasons.length'])} at max_tokens, {many_cut}", WARNING)
    digits = len(forms.count(max((num_rows for _, num_rows in report.errors), default=0)))
    reasons = [f"{forms.count(num_rows):>{digits}} x {error}" for error, num_rows in report.errors]
    yield from _first("errors", reasons, report.num_error_texts, "reason", width)
    shards = [f"{path}: {problem}" for path, problem in report.unreadable_shards]
    yield from _first("no output", shards, len(shards), "shard", width)


def _figures(report: Report) -> Iterator[Text]:
    """Yield time, speed, tokens, and money if the job has prices."""
    values = report.values
    in_words = forms.duration(values["wall_s"])
    yield _line("time", f"{forms.seconds(values['wall_s'])} s{f' ({in_words})' if in_words else ''}")
    rows_per_s, tokens_per_s = values["rows_per_s"], values["tokens_per_s"]
    if rows_per_s is not None and tokens_per_s is not None:
        yield _line("speed", f"{_speed(rows_per_s)} rows/s, {_speed(tokens_per_s)} tokens/s, end to end")
    hits = "" if not values["input_tokens"] else f" ({forms.share(values['cache_hit_rate'])} from a cache)"
    yield _line("tokens", f"{forms.count(values['input_tokens'])} in{hits}, {forms.count(values['output_tokens'])} out")
    money = {"cost": "cost_usd", "revenue": "revenue_usd"}
    known = [f"{name} {forms.usd(values[key])}" for name, key in money.items() if values[key] is not None]
    if values["gross_margin"] is not None:
        known.append(f"gross margin {forms.share(values['gross_margin'])}")
    if known:
        yield _line("money", ", ".join(known))


def _speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.2f}"


def _first(label: str, entries: Sequence[str], num_entries: int, kind: str, width: int) -> Iterator[Text]:
    """Yield the first MOST_REASONS entries, cut to the width, and the number of others."""
    for index, entry in enumerate(entries[:MOST_REASONS]):
        yield _line("" if index else label, fit(entry, max(width - LABEL - 2, 20)), WARNING)
    if num_entries > MOST_REASONS:
        others = num_entries - MOST_REASONS
        yield _line("", f"and {count_text(others, f'other {kind}')}", NOTE)


def _line(label: str, content: str, style: str = "") -> Text:
    return text(f"  {label:<{LABEL}}", NOTE).append_text(text(content, style))


def _short(shown: str) -> str:
    """Return a folder's path relative to the working folder if it is inside, else unchanged."""
    here = f"{os.getcwd()}{os.sep}"
    return shown.removeprefix(here) or shown
