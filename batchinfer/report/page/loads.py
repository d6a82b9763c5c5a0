"""Pictures of a run's page: how evenly ranks and experts were loaded, as heat maps. Called by html."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from batchinfer.report import forms
from batchinfer.report.page import charts
from batchinfer.report.page.charts import Axis
from batchinfer.report.page.data import PageData
from batchinfer.report.page.markup import Cell, card, folded, name, number, table
from batchinfer.report.page.time_marks import stretch, time_marks

MAX_TABLE_ROWS = 400
MAX_EXPERT_RATIO = 4.0  # of the mean; the strongest colour at most
RANK_KINDS = (
    ("prefill tokens", "prefill_tokens"),
    ("decode tokens", "decode_tokens"),
    ("KV attended", "kv_tokens"),
    ("expert rows", "expert_rows"),
)


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
                f"{key}-ranks", "Busy share of each rank over time", labels, axis, values, 1.0, forms.share, left=96
            ),
            charts.heat_scale(1.0, forms.share),
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


def _times(value: float) -> str:
    return f"{value:.3g} ×"


def _times_mean(value: float) -> str:
    return f"{value:.2f} × mean"
