"""Pictures of a run's page over time, of seconds and of money, each with the numbers behind it. Called by html."""

from __future__ import annotations

from dataclasses import asdict

from batchinfer.report import forms
from batchinfer.report.page import charts
from batchinfer.report.page.charts import Series
from batchinfer.report.page.data import PageData
from batchinfer.report.page.markup import card, folded, legend, legend_of, name, number, table
from batchinfer.report.page.time_marks import stretch, time_marks

SECONDS_COLOURS = {
    "startup": "s6",
    "prefill": "s1",
    "decode": "s0",
    "exchange": "s2",
    "waste": "s3",
    "tail": "s4",
    "idle": "s5",
}
REVENUE_LABELS = {"cached_input": "cached input", "computed_input": "computed input", "output": "output"}


def over_time(key: str, data: PageData) -> list[str]:
    """Throughput and hit share, stretch by stretch."""
    if data.axis is None:
        return []
    axis, each = time_marks(data.axis), stretch(data.axis)
    rows = data.throughput
    prefill = Series("prefill", "s1", [row["prefill_per_s"] for row in rows])
    decode = Series("decode", "s0", [row["decode_per_s"] for row in rows])
    sums = [row["memory"] + row["disk"] + row["computed"] for row in rows]
    hits = [
        Series(text, colour, [row[source] / total if total else None for row, total in zip(rows, sums, strict=True)])
        for text, source, colour in (("memory", "memory", "s1"), ("disk", "disk", "s2"), ("computed", "computed", "s6"))
    ]

    def speed_table(kind: str, field: str) -> str:
        lines = [[name(text), number(forms.rate(row[field]))] for text, row in zip(axis.names, rows, strict=True)]
        return table(f"Tokens/s of {kind}, {each}", [("time (UTC)", "name"), ("tokens/s", "number")], lines)

    hit_table = table(
        f"Prompt tokens in prefill, {each}",
        [("time (UTC)", "name"), ("in memory", "number"), ("on disk", "number"), ("computed", "number")],
        [
            [name(text), *(number(forms.count(row[source])) for source in ("memory", "disk", "computed"))]
            for text, row in zip(axis.names, rows, strict=True)
        ],
    )
    return [
        card(
            "Prefill throughput",
            f"Prompt tokens per second, cached ones included, {each}",
            charts.columns(f"{key}-prefill", "Prefill tokens per second over time", axis, [prefill], _per_s),
            folded("Numbers", speed_table("prefill", "prefill_per_s")),
        ),
        card(
            "Decode throughput",
            f"Output tokens per second, {each}",
            charts.columns(f"{key}-decode", "Decode tokens per second over time", axis, [decode], _per_s),
            folded("Numbers", speed_table("decode", "decode_per_s")),
        ),
        card(
            "Where the prompts' KV came from",
            f"Share of the prompt tokens in prefill, {each}; duplicates are answered without",
            charts.columns(
                f"{key}-hits",
                "Share of prompt tokens from memory, disk and computed",
                axis,
                hits,
                forms.share,
                as_share=True,
            ),
            legend_of(hits),
            folded("Numbers", hit_table),
        ),
    ]


def nodes_and_money(key: str, data: PageData) -> list[str]:
    """Node occupancy over the day, and its cost beside the theoretical income."""
    if data.axis is None:
        return []
    axis, each = time_marks(data.axis), stretch(data.axis)
    rows = data.occupancy
    nodes = Series("nodes", "s0", [row["nodes"] for row in rows])
    cost = Series("cost", "s4", [row["cost_usd"] for row in rows])
    income = Series("theoretical income", "s1", [row["income_usd"] for row in rows])
    known = [series for series in (cost, income) if any(value is not None for value in series.values)]
    numbers = table(
        f"Nodes, cost and theoretical income, {each}",
        [("time (UTC)", "name"), ("nodes, mean", "number"), ("cost, $", "number"), ("income, $", "number")],
        [
            [
                name(text),
                number(forms.rate(row["nodes"])),
                number(forms.dollars(row["cost_usd"])),
                number(forms.dollars(row["income_usd"])),
            ]
            for text, row in zip(axis.names, rows, strict=True)
        ],
    )
    money = (
        [
            charts.columns(f"{key}-money", "Cost and theoretical income over time", axis, known, usd, stacked=False),
            legend_of(known),
        ]
        if known
        else ["<p>The job has no prices.</p>"]
    )
    return [
        card(
            "Nodes held",
            f"Mean number, {each}",
            charts.columns(f"{key}-nodes", "Nodes held over time", axis, [nodes], lambda value: f"{value:,.2f}"),
            folded("Numbers", numbers),
        ),
        card("Cost and theoretical income", f"$ at the job's prices, {each}", *money),
    ]


def where_time_went(key: str, data: PageData) -> list[str]:
    """Each second of each rank by what it was for, and the cost beside the income."""
    seconds, total = asdict(data.details.seconds), data.details.seconds.total
    if not total:
        return []
    cost, revenue = data.metrics["cost_usd"], data.metrics["revenue_usd"]
    parts = [(forms.SECONDS_LABELS[part], SECONDS_COLOURS[part], value) for part, value in seconds.items()]
    numbers = table(
        "Rank-seconds and their cost",
        [("part", "name"), ("rank-seconds", "number"), ("share", "number"), ("cost, $", "number")],
        [
            [
                name(label),
                number(forms.rate(value)),
                number(f"{value / total:.1%}"),
                number(None if cost is None else forms.dollars(cost * value / total)),
            ]
            for label, _, value in parts
        ],
    )
    pictures = [
        card(
            "Where each second went",
            "Seconds of all ranks held, added up",
            charts.bars(f"{key}-seconds", "Rank-seconds by part", [("rank-seconds", parts)], _seconds),
            legend([(label, colour) for label, colour, _ in parts]),
            numbers,
        )
    ]
    if cost is not None:
        rows = [("cost", [(label, colour, cost * value / total) for label, colour, value in parts])]
        if revenue is not None:
            rows.append(
                (
                    "revenue at list prices",
                    [(f"revenue of {label}", "s1", value) for label, value in _revenue_parts(data)],
                )
            )
        unit_costs = asdict(data.details.unit_costs)
        units = table(
            "$ per million tokens, three conventions",
            [("convention", "name"), ("per M", "name"), ("$", "number")],
            [
                [name(label), name(f"{tokens} tokens"), number(forms.unit_dollars(unit_costs[field]))]
                for field, (label, tokens) in forms.UNIT_COST_LABELS.items()
            ],
        )
        pictures.append(
            card(
                "What it cost",
                "Cost by part beside the revenue, on one scale",
                charts.bars(f"{key}-cost", "Cost by part, and revenue", rows, usd),
                *([_revenue_table(data)] if revenue is not None else []),
                units,
            )
        )
    return pictures


def _revenue_parts(data: PageData) -> list[tuple[str, float]]:
    (parts,) = data.revenue
    return [(REVENUE_LABELS[kind], value) for kind, value in parts.items()]


def _revenue_table(data: PageData) -> str:
    rows = [[name(label), number(forms.dollars(value))] for label, value in _revenue_parts(data)]
    return table("Revenue at list prices, by kind of tokens", [("tokens", "name"), ("$", "number")], rows)


def usd(value: float) -> str:
    """Dollars with their sign in front."""
    return f"${forms.dollars(value)}"


def _per_s(value: float) -> str:
    return f"{forms.rate(value)} tokens/s"


def _seconds(value: float) -> str:
    return f"{forms.rate(value)} s"
