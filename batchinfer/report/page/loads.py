"""The page's section on load balance: heat maps of ranks and experts."""

import math
from typing import Any

from batchinfer.report import forms
from batchinfer.report.page import charts
from batchinfer.report.page.charts import Axis, Series
from batchinfer.report.page.data import PageData
from batchinfer.report.page.markup import Card, Table
from batchinfer.report.page.time_marks import stretch, time_marks

MAX_LINES = 48  # of a picture; rank_times.sql has the same number
MAX_TABLE_ROWS = 400
LEFT = 104  # width of the labels of lines
MAX_EXPERT_RATIO = 4.0  # value by mean that has the strongest colour, at most
RANK_KINDS = {
    "prefill_tokens": "prefill tokens",
    "decode_tokens": "decode tokens",
    "kv_tokens": "KV attended",
    "expert_rows": "expert rows",
}


def load(key: str, data: PageData) -> list[Card]:
    """Return cards with the load of ranks over time, in all, in decode, and of experts."""
    return [*_rank_times(key, data), *_rank_loads(key, data), *_decode_loads(key, data), *_expert_loads(key, data)]


def _rank_times(key: str, data: PageData) -> list[Card]:
    if data.axis is None or not data.rank_work:
        return []
    labels, which = _lines(data.rank_work)
    values = _cells(data.rank_times, "share", len(labels), data.axis.num_bins)
    title, axis = "Busy share of each rank over time", time_marks(data.axis)
    return [
        Card(
            "When each rank worked",
            f"Share of the time in steps that ran tokens, {which}, {stretch(data.axis)}",
            charts.heat_map(f"{key}-ranks", title, labels, axis, values, 1.0, forms.share, left=LEFT)
            + charts.heat_scale(1.0, forms.share),
        )
    ]


def _lines(ranks: list[dict[str, Any]]) -> tuple[list[str], str]:
    """Return the labels of a picture's lines, and in words how many ranks a line stands for."""
    per_line = math.ceil(len(ranks) / MAX_LINES)
    names = _short_labels(ranks)
    lines = [names[first : first + per_line] for first in range(0, len(names), per_line)]
    labels = [" to ".join(dict.fromkeys([line[0], line[-1]])) for line in lines]
    return labels, f"the mean of {per_line} ranks per line" if per_line > 1 else "rank by rank"


def _cells(rows: list[dict[str, Any]], field: str, num_lines: int, num_bins: int) -> list[list[float]]:
    values = [[0.0] * num_bins for _ in range(num_lines)]
    for row in rows:
        values[row["line"]][row["bin"]] = row[field]
    return values


def _decode_loads(key: str, data: PageData) -> list[Card]:
    """Return cards with KV tokens and requests per decode rank over time, and with max / mean and its bound."""
    if data.axis is None or not data.decode_over_time:
        return []
    labels, which = _lines([rank for rank in data.rank_work if "decode" in rank["role"]])
    axis, each = time_marks(data.axis), stretch(data.axis)
    cards = []
    for field, name, unit in (("kv_tokens", "KV tokens", "tokens"), ("num_requests", "Requests", "requests")):
        values = _cells(data.decode_times, field, len(labels), data.axis.num_bins)
        largest = max(map(max, values)) or 1.0

        def form(value: float, unit: str = unit) -> str:
            return f"{forms.number(value)} {unit}"

        picture = charts.heat_map(
            f"{key}-{field}", f"{name} of each decode rank over time", labels, axis, values, largest, form, left=LEFT
        )
        note = f"In a decode step, mean over its steps, {which}, {each}"
        cards.append(Card(f"{name} of each decode rank", note, picture + charts.heat_scale(largest, form)))
    by_bin = {row["bin"]: row for row in data.decode_over_time}

    def series(name: str, colour: str, field: str) -> Series:
        return Series(name, colour, [by_bin[bin_][field] if bin_ in by_bin else None for bin_ in range(data_bins)])

    data_bins = data.axis.num_bins
    shown = [series("busiest ÷ mean", "s4", "kv_max_over_mean"), series("at best", "s1", "kv_bound")]
    headers = {"kv_mean": "KV, mean", "kv_busiest": "busiest", "kv_max_over_mean": "÷ mean", "kv_bound": "at best",
               "requests_mean": "requests, mean", "requests_busiest": "most", "requests_max_over_mean": "÷ mean",
               "requests_bound": "at best"}  # fmt: skip
    numbers = Table(
        f"KV tokens and requests of a decode rank in a step, {each}",
        [("time (UTC)", "name"), *((header, "number") for header in headers.values())],
        [[axis.names[bin_], *(forms.number(row[field]) for field in headers)] for bin_, row in by_bin.items()],
    )
    title = "KV tokens of the busiest decode rank divided by the mean, with its lower bound"
    picture = charts.columns(f"{key}-balance", title, axis, shown, lambda value: f"{value:.3f}", stacked=False)
    legend = [(one.name, one.colour) for one in shown]
    note = f"KV tokens of the busiest decode rank by the mean, {each}; 1 is even"
    return [*cards, Card("Decode balance", note, picture, legend=legend, numbers=numbers)]


def _rank_loads(key: str, data: PageData) -> list[Card]:
    ranks = data.rank_work
    if len(ranks) < 2:
        return []
    shown = {field: label for field, label in RANK_KINDS.items() if any(row[field] for row in ranks)}
    values = []
    for field in shown:
        # the mean is over the ranks that do this kind of work
        at_work = [row for row in ranks if row[field] or _does(row["role"], field)]
        mean = sum(row[field] for row in at_work) / len(at_work)
        values.append([row[field] / mean for row in ranks])
    names = [f"rank {_rank_label(row)} ({row['role']})" for row in ranks]
    marks = _short_labels(ranks)
    every = math.ceil(len(ranks) / charts.num_marks(marks, LEFT))
    axis = Axis(names, [(index, marks[index]) for index in range(0, len(ranks), every)])
    labels, title = list(shown.values()), "Load of each rank divided by the mean"
    numbers = Table(
        "Work of each rank" + (f", the first {MAX_TABLE_ROWS}" if len(ranks) > MAX_TABLE_ROWS else ""),
        [("rank", "name"), ("role", "name"), *((label, "number") for label in RANK_KINDS.values()),
         ("working, s", "number")],
        [
            [_rank_label(row), row["role"], *(forms.count(row[field]) for field in RANK_KINDS),
             forms.rate(row["working_s"])]
            for row in ranks[:MAX_TABLE_ROWS]
        ],
    )  # fmt: skip
    return [
        Card(
            "Load of each rank",
            "Divided by the mean of the ranks that do such work; 1 is even",
            charts.heat_map(f"{key}-load", title, labels, axis, values, 2.0, _times_mean, left=LEFT)
            + charts.heat_scale(2.0, _times),
            numbers=numbers,
        )
    ]


def _does(role: str, field: str) -> bool:
    if field == "expert_rows":
        return True
    return ("prefill" if field == "prefill_tokens" else "decode") in role


def _expert_loads(key: str, data: PageData) -> list[Card]:
    if not data.expert_tokens:
        return []
    num_experts = 1 + max(row["expert"] for row in data.expert_tokens)
    tokens = {layer: [0] * num_experts for layer in sorted({row["layer"] for row in data.expert_tokens})}
    for row in data.expert_tokens:
        tokens[row["layer"]][row["expert"]] = row["tokens"]
    ratios = {layer: _by_mean(tokens[layer]) for layer in tokens}
    largest = min(MAX_EXPERT_RATIO, max(2.0, *(max(values) for values in ratios.values())))
    every = max(1, 2 ** max(0, math.ceil(math.log2(num_experts / 8))))
    axis = Axis(
        [f"expert {expert}" for expert in range(num_experts)],
        [(expert, str(expert)) for expert in range(0, num_experts, every)],
    )
    labels, title = (
        [f"layer {layer}" for layer in ratios],
        "Tokens of each expert by layer, divided by the layer's mean",
    )
    numbers = Table(
        "Busiest and least busy expert of each layer",
        [("layer", "name"), ("busiest", "number"), ("÷ mean", "number"), ("least", "number"), ("÷ mean", "number")],
        [
            [str(layer), str(values.index(max(values))), f"{max(values):.2f}", str(values.index(min(values))),
             f"{min(values):.2f}"]
            for layer, values in ratios.items()
        ],
    )  # fmt: skip
    return [
        Card(
            "Load of each expert",
            "Tokens sent to it, divided by the mean of its layer, in prefill and decode",
            charts.heat_map(f"{key}-experts", title, labels, axis, list(ratios.values()), largest, _times_mean, left=62)
            + charts.heat_scale(largest, _times),
            numbers=numbers,
            is_wide=num_experts > 64,
        )
    ]


def _by_mean(tokens: list[int]) -> list[float]:
    mean = sum(tokens) / len(tokens)
    return [value / mean if mean else 0.0 for value in tokens]


def _rank_label(row: dict[str, Any]) -> str:
    return f"{row['node']} · {row['rank']}"


def _short_labels(ranks: list[dict[str, Any]]) -> list[str]:
    """Return short labels of ranks: node names lose their domains if they stay distinct."""
    hosts = {row["node"]: row["node"].partition(".")[0] for row in ranks}
    are_apart = len(set(hosts.values())) == len(hosts) and not any(host.isdigit() for host in hosts.values())
    return [_rank_label(row | {"node": hosts[row["node"]]} if are_apart else row) for row in ranks]


def _times(value: float) -> str:
    return f"{value:.3g} ×"


def _times_mean(value: float) -> str:
    return f"{value:.2f} × mean"
