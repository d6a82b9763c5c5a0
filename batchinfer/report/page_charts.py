"""The pictures of one run's page, each with the numbers behind it. Called by html."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from batchinfer.report import charts, forms
from batchinfer.report.charts import Axis, Series
from batchinfer.report.markup import Cell, card, folded, legend, legend_of, name, number, table
from batchinfer.report.page_data import PageData, TimeAxis

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
MAX_TABLE_ROWS = 400
MAX_MARKS = 6  # of the time axis
MARKS_S = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1200, 3600, 7200, 14400, 21600, 43200),
    *(86400 * 2**power for power in range(12)),
)
MAX_EXPERT_RATIO = 4.0  # of the mean; the strongest colour at most
RANK_KINDS = (
    ("prefill tokens", "prefill_tokens"),
    ("decode tokens", "decode_tokens"),
    ("KV attended", "kv_tokens"),
    ("expert rows", "expert_rows"),
)


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
                _share,
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


def load(key: str, data: PageData) -> list[str]:
    """How evenly ranks and experts were loaded."""
    return [*_rank_times(key, data), *_rank_loads(key, data), *_expert_loads(key, data)]


def _rank_times(key: str, data: PageData) -> list[str]:
    if data.axis is None or not data.rank_work:
        return []
    axis, each = time_marks(data.axis), stretch(data.axis)
    per_line = math.ceil(len(data.rank_work) / 48)
    num_lines = math.ceil(len(data.rank_work) / per_line)
    labels = []
    for line in range(num_lines):
        members = data.rank_work[line * per_line : (line + 1) * per_line]
        labels.append(_rank_label(members[0]) + (f" to {_rank_label(members[-1])}" if len(members) > 1 else ""))
    values = [[0.0] * data.axis.num_bins for _ in range(num_lines)]
    for row in data.rank_times:
        values[row["line"]][row["bin"]] = row["share"]
    note = "Share of the time in steps that ran tokens, rank by rank"
    if per_line > 1:
        note = f"Share of the time in steps that ran tokens, the mean of {per_line} ranks per line"
    return [
        card(
            "When each rank worked",
            f"{note}, {each}",
            charts.heat_map(
                f"{key}-ranks", "Busy share of each rank over time", labels, axis, values, 1.0, _share, left=96
            ),
            charts.heat_scale(1.0, _share),
        )
    ]


def _rank_loads(key: str, data: PageData) -> list[str]:
    ranks = data.rank_work
    if len(ranks) < 2:
        return []
    shown = [(label, field) for label, field in RANK_KINDS if any(row[field] for row in ranks)]
    values = []
    for _, field in shown:
        # against the mean of the ranks that do such work at all
        at_work = [row for row in ranks if row[field] or _does(row["role"], field)]
        mean = sum(row[field] for row in at_work) / len(at_work)
        values.append([row[field] / mean for row in ranks])
    names = [f"rank {_rank_label(row)} ({row['role']})" for row in ranks]
    every = max(1, math.ceil(len(ranks) / 4))
    axis = Axis(names, [(place, _rank_label(ranks[place])) for place in range(0, len(ranks), every)])
    numbers = table(
        "Work of each rank" + (f", the first {MAX_TABLE_ROWS}" if len(ranks) > MAX_TABLE_ROWS else ""),
        [("rank", "name"), ("role", "name"), *((label, "number") for label, _ in RANK_KINDS), ("working, s", "number")],
        [
            [
                name(_rank_label(row)),
                name(row["role"]),
                *(number(forms.count(row[field])) for _, field in RANK_KINDS),
                number(forms.rate(row["working_s"])),
            ]
            for row in ranks[:MAX_TABLE_ROWS]
        ],
    )
    return [
        card(
            "Load of each rank",
            "Divided by the mean of the ranks that do such work; 1 is even",
            charts.heat_map(
                f"{key}-load",
                "Load of each rank divided by the mean",
                [label for label, _ in shown],
                axis,
                values,
                2.0,
                _times_mean,
                left=96,
            ),
            charts.heat_scale(2.0, _times),
            folded("Numbers", numbers),
        )
    ]


def _does(role: str, field: str) -> bool:
    if field == "expert_rows":
        return True
    return ("prefill" if field == "prefill_tokens" else "decode") in role


def _expert_loads(key: str, data: PageData) -> list[str]:
    if not data.expert_tokens:
        return []
    layers = sorted({row["layer"] for row in data.expert_tokens})
    num_experts = 1 + max(row["expert"] for row in data.expert_tokens)
    tokens = {layer: [0] * num_experts for layer in layers}
    for row in data.expert_tokens:
        tokens[row["layer"]][row["expert"]] = row["tokens"]
    ratios = {layer: _by_mean(tokens[layer]) for layer in layers}
    largest = min(MAX_EXPERT_RATIO, max(2.0, *(max(values) for values in ratios.values())))
    every = max(1, 2 ** max(0, math.ceil(math.log2(num_experts / 8))))
    axis = Axis(
        [f"expert {expert}" for expert in range(num_experts)],
        [(expert, str(expert)) for expert in range(0, num_experts, every)],
    )
    numbers = table(
        "Busiest and least busy expert of each layer",
        [("layer", "name"), ("busiest", "number"), ("÷ mean", "number"), ("least", "number"), ("÷ mean", "number")],
        [
            [name(str(layer)), *(_extreme(values, pick) for pick in (max, min) for _extreme in (_expert_at, _ratio_at))]
            for layer, values in ratios.items()
        ],
    )
    return [
        card(
            "Load of each expert",
            "Tokens sent to it, divided by the mean of its layer, in prefill and decode",
            charts.heat_map(
                f"{key}-experts",
                "Tokens of each expert by layer, divided by the layer's mean",
                [f"layer {layer}" for layer in layers],
                axis,
                list(ratios.values()),
                largest,
                _times_mean,
                left=62,
            ),
            charts.heat_scale(largest, _times),
            folded("Numbers", numbers),
            wide=num_experts > 64,
        )
    ]


def _by_mean(tokens: list[int]) -> list[float]:
    mean = sum(tokens) / len(tokens)
    return [value / mean if mean else 0.0 for value in tokens]


def _expert_at(values: list[float], pick: Callable[[list[float]], float]) -> Cell:
    return number(str(values.index(pick(values))))


def _ratio_at(values: list[float], pick: Callable[[list[float]], float]) -> Cell:
    return number(f"{pick(values):.2f}")


def _rank_label(row: dict[str, Any]) -> str:
    return f"{row['node']} · {row['rank']}"


# ---- time


def time_marks(axis: TimeAxis) -> Axis:
    """Names and marks of the stretches: times of day (UTC) for minutes and more, seconds from the start below."""
    starts = [axis.start_s + place * axis.width_s for place in range(axis.num_bins)]
    span_s = axis.width_s * axis.num_bins
    apart_s = next((step for step in MARKS_S if step >= span_s / MAX_MARKS and step >= axis.width_s), span_s)
    if axis.width_s < 60:
        marks = [index * apart_s for index in range(int(span_s / apart_s) + 1) if index * apart_s < span_s]
        names = [f"second {place * axis.width_s:g}" for place in range(axis.num_bins)]
        return Axis(names, [(mark / axis.width_s, f"{mark:g} s") for mark in marks])
    form = "%H:%M" if apart_s < 86400 else "%d %b"
    first = math.ceil(axis.start_s / apart_s)
    marks = [index * apart_s for index in range(first, int((axis.start_s + span_s) / apart_s) + 1)]
    return Axis(
        [f"{datetime.fromtimestamp(start, UTC):%Y-%m-%d %H:%M}" for start in starts],
        [
            ((mark - axis.start_s) / axis.width_s, datetime.fromtimestamp(mark, UTC).strftime(form))
            for mark in marks
            if mark < axis.start_s + span_s
        ],
    )


def stretch(axis: TimeAxis) -> str:
    """How long each column is, in words."""
    for length_s, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if axis.width_s >= length_s:
            num = round(axis.width_s / length_s)
            return f"each {unit}" if num == 1 else f"each {num} {unit}s"
    return f"each {axis.width_s:g} s"


def usd(value: float) -> str:
    """Dollars with their sign in front."""
    return f"${forms.dollars(value)}"


def _per_s(value: float) -> str:
    return f"{forms.rate(value)} tokens/s"


def _share(value: float) -> str:
    return f"{value:.1%}" if value not in (0, 1) else f"{value:.0%}"


def _seconds(value: float) -> str:
    return f"{forms.rate(value)} s"


def _times(value: float) -> str:
    return f"{value:.3g} ×"


def _times_mean(value: float) -> str:
    return f"{value:.2f} × mean"
