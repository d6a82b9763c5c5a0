"""The page's section on answers: lengths of answers and of their thinking, and figures of their quality."""

import math
from typing import Any

from batchinfer.report import forms
from batchinfer.report.figure import groups_of
from batchinfer.report.figures import ANSWERS
from batchinfer.report.page import charts
from batchinfer.report.page.charts import Axis, Series
from batchinfer.report.page.data import PageData
from batchinfer.report.page.markup import Card, Table

MAX_MARKS = 6


def answers(key: str, data: PageData) -> list[Card]:
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
    every = max(1, math.ceil(len(names) / MAX_MARKS))
    marks = [(place, charts.short(lengths[place]["from_tokens"])) for place in range(0, len(names), every)]
    axis = Axis([f"{name} tokens" for name in names], marks)
    rows = [length[field] for length in lengths]
    picture = charts.columns(
        f"{key}-{field}", f"Rows by their {unit}", axis, [Series("rows", "s0", rows)], lambda value: f"{value:,.0f}"
    )
    counts = list(zip(names, map(forms.count, rows), strict=True))
    numbers = Table(f"Rows by their {unit}", [("tokens", "name"), ("rows", "number")], counts)
    return Card(title, f"Rows by their {unit}; two columns for each doubling", picture, numbers=numbers)
