"""The page's sections on throughput, nodes, money and time, each picture with its numbers."""

from typing import Any

from batchinfer.report import forms
from batchinfer.report.figures import PARTS, UNIT_COSTS
from batchinfer.report.page import charts
from batchinfer.report.page.charts import Axis, Series
from batchinfer.report.page.data import PageData
from batchinfer.report.page.markup import Card, Table
from batchinfer.report.page.time_marks import stretch, time_marks

PART_COLOURS = {
    "startup": "s6",
    "prefill": "s1",
    "decode": "s0",
    "exchange": "s2",
    "waste": "s3",
    "tail": "s4",
    "idle": "s5",
}
REVENUE_LABELS = {"cached_input": "cached input", "computed_input": "computed input", "output": "output"}


def over_time(key: str, data: PageData) -> list[Card]:
    """Return cards with throughput, cache hit share and, if several were held, nodes over time.

    A single stretch of time has no picture.
    """
    if data.axis is None or data.axis.num_bins < 2:
        return []
    axis, each, rows = time_marks(data.axis), stretch(data.axis), data.throughput

    def speed(kind: str, tokens: str, colour: str) -> Card:
        series = Series(kind, colour, [row[f"{kind}_per_s"] for row in rows])
        return Card(
            f"{kind.capitalize()} throughput",
            f"{tokens}, {each}",
            charts.columns(f"{key}-{kind}", f"{kind.capitalize()} tokens per second over time", axis, [series], _per_s),
            numbers=_numbers(f"Tokens/s of {kind}, {each}", axis, rows, [("tokens/s", f"{kind}_per_s", forms.rate)]),
        )

    sources = {"memory": "s1", "disk": "s2", "computed": "s6"}
    sums = [sum(row[source] for source in sources) for row in rows]
    hits = [
        Series(source, colour, [row[source] / total if total else None for row, total in zip(rows, sums, strict=True)])
        for source, colour in sources.items()
    ]
    title = "Share of prompt tokens from memory, disk and computed"
    return [
        speed("prefill", "Prompt tokens per second, cached ones included", "s1"),
        speed("decode", "Output tokens per second", "s0"),
        Card(
            "Where the prompts' KV came from",
            f"Share of the prompt tokens in prefill, {each}; duplicates are answered without",
            charts.columns(f"{key}-hits", title, axis, hits, forms.share, as_share=True),
            legend=_legend(hits),
            numbers=_numbers(
                f"Prompt tokens in prefill, {each}",
                axis,
                rows,
                [(f"{'on ' if name == 'disk' else ''}{name}", name, forms.count) for name in sources],
            ),
        ),
        *_nodes(key, data, axis),
    ]


def _nodes(key: str, data: PageData, axis: Axis) -> list[Card]:
    if data.axis is None or (data.report.values["peak_nodes"] or 0) < 2:
        return []
    each, rows = stretch(data.axis), data.occupancy
    nodes = Series("nodes", "s0", [row["nodes"] for row in rows])
    picture = charts.columns(f"{key}-nodes", "Nodes held over time", axis, [nodes], lambda value: f"{value:,.2f}")
    numbers = _numbers(f"Nodes held, {each}", axis, rows, [("nodes, mean", "nodes", forms.rate)])
    return [Card("Nodes held", f"Mean number, {each}", picture, numbers=numbers)]


def money(key: str, data: PageData) -> list[Card]:
    """Return a card with cost and theoretical income over time; none without prices."""
    if data.axis is None or data.axis.num_bins < 2:
        return []
    axis, each, rows = time_marks(data.axis), stretch(data.axis), data.occupancy
    series = [
        Series("cost", "s4", [row["cost_usd"] for row in rows]),
        Series("theoretical income", "s1", [row["income_usd"] for row in rows]),
    ]
    known = [one for one in series if any(value is not None for value in one.values)]
    if not known:
        return []
    title = "Cost and theoretical income over time"
    picture = charts.columns(f"{key}-money", title, axis, known, forms.usd, stacked=False)
    columns = [("cost, $", "cost_usd", forms.dollars), ("income, $", "income_usd", forms.dollars)]
    numbers = _numbers(f"Cost and theoretical income, {each}", axis, rows, columns)
    note = f"$ at the job's prices, {each}"
    return [Card("Cost and theoretical income", note, picture, legend=_legend(known), numbers=numbers)]


def where_time_went(key: str, data: PageData) -> list[Card]:
    """Return cards with the ranks' time by part, its cost, and the revenue."""
    report, values = data.report, data.report.values
    total = sum(report.seconds.values())
    if not total:
        return []
    parts = [(PARTS[part], PART_COLOURS[part], part_s) for part, part_s in report.seconds.items()]
    costs = {part: values[f"{part}_cost_usd"] for part in report.seconds}
    cards = [
        Card(
            "Where each second went",
            "Seconds of all ranks held, added up",
            charts.bars(f"{key}-seconds", "Rank-seconds by part", [(part[0], [part]) for part in parts], _seconds),
            tables=[
                Table(
                    "Rank-seconds and their cost",
                    [("part", "name"), ("rank-seconds", "number"), ("share", "number"), ("cost, $", "number")],
                    [
                        [PARTS[part], forms.rate(part_s), f"{part_s / total:.1%}", forms.dollars(costs[part])]
                        for part, part_s in report.seconds.items()
                    ],
                )
            ],
        )
    ]
    if values["cost_usd"] is not None:
        bars = [("cost", [(PARTS[part], PART_COLOURS[part], cost or 0.0) for part, cost in costs.items()])]
        tables: list[Table] = []
        if values["revenue_usd"] is not None:
            (revenue,) = data.revenue
            kinds = [(REVENUE_LABELS[kind], usd) for kind, usd in revenue.items()]
            bars.append(("revenue at list prices", [(f"revenue of {label}", "s1", usd) for label, usd in kinds]))
            caption, headers = "Revenue at list prices, by kind of tokens", [("tokens", "name"), ("$", "number")]
            tables.append(Table(caption, headers, [[label, forms.dollars(usd)] for label, usd in kinds]))
        tables.append(
            Table(
                "$ per million tokens, three conventions",
                [("convention", "name"), ("per M", "name"), ("$", "number")],
                [[unit.label, unit.note_of(values), unit.form(values[unit.key])] for unit in UNIT_COSTS.figures],
            )
        )
        if len(bars) > 1:
            picture = charts.bars(f"{key}-cost", "Cost by part, and revenue", bars, forms.usd)
            note = "Cost by part and the revenue, on one scale"
            legend = [(label, colour) for label, colour, _ in parts]
            cards.append(Card("What it cost", note, picture, legend=legend, tables=tables))
        else:
            cards.append(Card("What it cost", f"{forms.usd(values['cost_usd'])} in all", tables=tables))
    return cards


def _numbers(caption: str, axis: Axis, rows: list[dict[str, Any]], columns: list[tuple[str, str, forms.Form]]) -> Table:
    """Return a table of rows over time; `columns` are (header, field, form)."""
    return Table(
        caption,
        [("time (UTC)", "name"), *((header, "number") for header, _, _ in columns)],
        [[name, *(form(row[field]) for _, field, form in columns)] for name, row in zip(axis.names, rows, strict=True)],
    )


def _legend(series: list[Series]) -> list[tuple[str, str]]:
    return [(one.name, one.colour) for one in series]


def _per_s(value: float) -> str:
    return f"{forms.rate(value)} tokens/s"


def _seconds(value: float) -> str:
    return f"{forms.rate(value)} s"
