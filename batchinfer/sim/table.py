"""The simulator's figures as tables for a terminal."""

import itertools
from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType

from batchinfer.report import forms
from batchinfer.report.figure import Figure, Group
from batchinfer.report.figures import FIGURES, known
from batchinfer.report.terminal import HEADING, LINED_UP, figure_table, line, table, text

BAR_WIDTH = 40
MAX_LINES = 24  # of hours

TOKENS = Group("Tokens", known("input_tokens", "cached_tokens", "output_tokens", "mean_kv_tokens_per_output_token"))
TIME = Group(
    "Time and nodes",
    (
        Figure("hours", "until the last request ends", forms.number, "h"),
        Figure("prefill_nodes", "nodes for prefill", forms.number),
        Figure("decode_nodes", "nodes for decode", forms.number),
        *known("peak_nodes", "mean_nodes"),
        Figure("busy_share", "of the held time busy", forms.percent, "%"),
    ),
)
DAY = Group(
    "Nodes that follow the load",
    (
        Figure("nodes_per_group", "come and go together", forms.count),
        Figure("longest_wait_s", "longest wait for them", forms.number, "s"),
    ),
)
SPEED = Group(
    "Speed, while busy",
    (
        *known(
            "prefill_tokens_per_s_per_node",
            "decode_tokens_per_s_per_node",
            "prefill_tokens_max_over_mean",
            "prefill_attention_max_over_mean",
            "decode_kv_max_over_mean",
        ),
        FIGURES["output_tokens_per_s_per_request"].called("output per request", "median"),
    ),
)
MONEY = Group(
    "Money",
    (
        *known("gpu_hours", "cost_usd", "revenue_usd", "cost_profit_margin", "gross_margin"),
        FIGURES["usd_per_million_output_tokens"].called("cost per M output tokens"),
    ),
)
CHEAPEST = Group(
    "Cheapest, when latency does not matter and all units are full",
    (
        Figure("prefill_ep_size", "prefill EP size", forms.count, "GPUs"),
        Figure("prefill_tokens_per_gpu", "prefill step", forms.number, "new tokens per GPU"),
        Figure("decode_ep_size", "decode EP size", forms.count, "GPUs"),
        Figure("decode_requests_per_gpu", "decode batch", forms.number, "requests per GPU"),
        FIGURES["gpu_hours"].called("GPU-hours", "in steps of full units"),
        Figure("gpu_hours_as_specified", "with the spec's sizes", forms.hours, "h", note="in steps of full units, too"),
        FIGURES["usd_per_million_output_tokens"].called("cost per M output tokens"),
    ),
)


STREAMED = Group(
    "Sweeps",
    (
        Figure("sweep_bytes", "read per sweep", forms.megabytes, "MB"),
        Figure("slot_bytes", "layers in memory", forms.megabytes, "MB"),
        Figure("resident_layers", "layers that stay", forms.count),
        Figure("kv_bytes", "KV", forms.megabytes, "MB"),
        Figure("ranks", "ranks", forms.count),
        Figure("requests_at_once", "requests at once", forms.count),
        Figure("sweeps", "sweeps, at most", forms.count),
        Figure("read_s", "reads of a sweep", forms.number, "s"),
        Figure("prompts_s", "products where prompts run", forms.number, "s"),
        Figure("answers_s", "products of other sweeps", forms.number, "s"),
        Figure("hours", "until the last request ends", forms.number, "h"),
        Figure("longest_answer_hours", "the longest answer alone", forms.number, "h"),
        Figure("input_tokens_per_s", "prompts", forms.number, "tokens/s"),
        Figure("output_tokens_per_s", "answers", forms.number, "tokens/s"),
    ),
)


def streamed_table(figures: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield the figures of a job whose weights are streamed."""
    yield text(f"{figures['requests']:,} requests, weights streamed; the {figures['decides']} decides")
    yield from figure_table(figures, [STREAMED])


def answer_table(figures: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield the figures under headings, with units."""
    yield text(f"{figures['requests']:,} requests on {figures['gpu']}, simulated in {figures['simulated_in_s']:.1f} s")
    yield text(f"Rates of operations: {figures['rates']}")
    needed = figures["nodes_to_finish"]
    finish = [] if needed is None else [line(f"nodes to finish in {figures['finish_hours']:g} h", forms.count(needed))]
    day = [] if figures["nodes_per_group"] is None else [DAY]
    yield from figure_table(figures, [TOKENS, TIME, *day], finish)
    yield from _by_hour(figures["nodes_by_hour"])
    yield from figure_table(figures, [SPEED])
    yield from _stage("Prefill", figures["prefill"], "tokens_per_gpu", "new tokens per GPU")
    yield from _stage("Decode", figures["decode"], "requests_per_gpu", "requests per GPU")
    yield from figure_table(figures, [MONEY])
    yield text(CHEAPEST.title, HEADING)
    yield from figure_table(figures["cheapest"], [Group("", CHEAPEST.figures)])


def suggestion_table(figures: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield the changes from the spec's layout to the cheapest one, each with its share."""
    yield text(f"GPU-hours of a million requests on {figures['gpu']}, by {figures['rates']}")
    yield table(figures["lines"], "lwrr", ("change", "", "GPU-hours", "better"))


def against_table(figures: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield the errors of predictions by model, GPU and engine, with the rows that were left out."""
    yield text(f"{len(figures['predicted'])} predicted rows ({figures['rows']}) of {figures['file']}")
    yield text(
        "Errors in %: median, median size, rows within 25 %; of seconds per token (TPOT) and of tokens/s per GPU"
    )
    header = ("", "rows", "TPOT", "size", "in 25", "tokens/s", "size", "in 25")
    cells = []
    for name, group in figures["groups"].items():
        for whose, errors in group.items():
            if errors is not None:
                parts = [_three(errors[kind]) for kind in ("tpot", "throughput")]
                label = name if whose == "own" else "  aiconfigurator"
                cells.append([label, f"{errors['rows']}", *parts[0], *parts[1]])
    yield table(cells, "lrrrrrrr", header)
    yield text("Left out", HEADING)
    yield table([[f"    {reason}", f"{num:,}"] for reason, num in figures["left_out"].items()], "lr")


def _three(errors: dict[str, float] | None) -> list[str]:
    if errors is None:
        return ["-"] * 3
    return [f"{100 * errors[name]:.0f}" for name in ("median", "median_absolute", "within_25_percent")]


def _by_hour(nodes: list[float]) -> Iterator[RenderableType]:
    """Yield a bar for the hours that have the same number of nodes, if there are several to compare."""
    most = max(nodes, default=0)
    if len(nodes) > 1 and most:
        cells, first = [], 0
        for shown, same in itertools.groupby(nodes, key=lambda num: f"{num:.1f}"):
            last = first + len(list(same)) - 1
            hours = f"hour {first}" if first == last else f"hours {first} to {last}"
            cells.append([f"    {hours}", shown, "#" * round(BAR_WIDTH * nodes[first] / most)])
            first = last + 1
        yield table(cells[:MAX_LINES], "lrl")
        if len(cells) > MAX_LINES:
            yield text(f"    and {len(cells) - MAX_LINES} more changes")


def _stage(name: str, stage: dict[str, Any], batch: str, unit: str) -> Iterator[RenderableType]:
    sizes = f"EP{stage['ep_size']} + {stage['redundant_experts']} redundant"
    yield text(f"{name} ({sizes}, {stage[batch]:,} {unit})", HEADING)

    def falling(by_name: dict[str, float]) -> list[tuple[str, float]]:
        return sorted(by_name.items(), key=lambda item: -item[1])

    lines = [
        ("step of a full unit", forms.number(1000 * stage["step_s"]), "ms"),
        *((f"  {part}", forms.number(1000 * part_s), "ms") for part, part_s in falling(stage["step_s_by_stage"])),
        ("waiting for the exchange", forms.number(1000 * stage["waiting_for_exchange_s"]), "ms"),
        *(
            (f"limited by {part}", forms.percent(share), "%", "of busy time")
            for part, share in falling(stage["share_of_time_by_bottleneck"])
        ),
    ]
    yield table([line(*cells) for cells in lines], "lrw", min_widths=LINED_UP)
