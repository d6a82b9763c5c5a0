"""The simulator's figures for a terminal. Called by `batchinfer simulate`."""

from __future__ import annotations

from typing import Any

LABEL_WIDTH = 34
VALUE_WIDTH = 16
BAR_WIDTH = 40


def format_answer(figures: dict[str, Any]) -> str:
    """Grouped lines with units; '-' for what is not known."""
    lines = [f"{figures['requests']:,} requests on {figures['gpu']}, simulated in {figures['simulated_in_s']:.1f} s"]
    lines += ["Tokens", *_lines(figures, _TOKENS), "Time and nodes", *_lines(figures, _TIME)]
    if figures["nodes_to_finish"] is not None:
        lines.append(_line(f"nodes to finish in {figures['finish_hours']:g} h", figures["nodes_to_finish"], "nodes"))
    lines += _by_hour(figures["nodes_by_hour"])
    lines += ["Speed, while busy", *_lines(figures, _SPEED)]
    for stage, batch, unit in (
        ("prefill", "tokens_per_gpu", "new tokens per GPU"),
        ("decode", "requests_per_gpu", "requests per GPU"),
    ):
        lines += _stage(stage, figures[stage], batch, unit)
    lines += ["Money", *_lines(figures, _MONEY)]
    lines += ["Cheapest, when latency does not matter and all units are full", *_lines(figures["cheapest"], _CHEAPEST)]
    return "\n".join(lines)


_TOKENS = (
    ("input_tokens", "input", "tokens", 1),
    ("cached_tokens", "from a cache", "tokens", 1),
    ("output_tokens", "output", "tokens", 1),
    ("mean_kv_tokens_per_output_token", "mean KV per output token", "tokens", 1),
)
_TIME = (
    ("hours", "until the last request ends", "h", 1),
    ("prefill_nodes", "nodes for prefill", "nodes", 1),
    ("decode_nodes", "nodes for decode", "nodes", 1),
    ("peak_nodes", "held, peak", "nodes", 1),
    ("mean_nodes", "held, mean", "nodes", 1),
    ("busy_share", "of the held time busy", "%", 100),
)
_SPEED = (
    ("prefill_tokens_per_s_per_node", "prefill per node, hits included", "tok/s", 1),
    ("decode_tokens_per_s_per_node", "decode per node", "tok/s", 1),
    ("output_tokens_per_s_per_request", "output per request, median", "tok/s", 1),
)
_MONEY = (
    ("gpu_hours", "GPU-hours", "h", 1),
    ("cost_usd", "cost", "$", 1),
    ("revenue_usd", "revenue at list prices", "$", 1),
    ("cost_profit_margin", "cost profit margin", "% of cost", 100),
    ("gross_margin", "gross margin", "% of revenue", 100),
    ("usd_per_million_output_tokens", "cost per M output tokens", "$", 1),
)
_CHEAPEST = (
    ("prefill_ep_size", "prefill EP size", "GPUs", 1),
    ("prefill_tokens_per_gpu", "prefill step", "new tokens per GPU", 1),
    ("decode_ep_size", "decode EP size", "GPUs", 1),
    ("decode_requests_per_gpu", "decode batch", "requests per GPU", 1),
    ("gpu_hours", "GPU-hours", "h", 1),
    ("gpu_hours_as_specified", "GPU-hours with the spec's sizes", "h", 1),
    ("usd_per_million_output_tokens", "cost per M output tokens", "$", 1),
)


def _lines(figures: dict[str, Any], rows: tuple[tuple[str, str, str, float], ...]) -> list[str]:
    return [_line(label, figures[key], unit, factor) for key, label, unit, factor in rows]


def _line(label: str, value: float | None, unit: str, factor: float = 1) -> str:
    return f"  {label:{LABEL_WIDTH}}{_text(value, factor):>{VALUE_WIDTH}} {unit}"


def _text(value: float | None, factor: float) -> str:
    if value is None:
        return "-"
    value *= factor
    if value == int(value) or abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:,.2f}" if abs(value) >= 1 else f"{value:.4g}"


def _by_hour(nodes: list[float]) -> list[str]:
    """A bar for each of the first 24 hours with anything to compare."""
    most = max(nodes, default=0)
    if len(nodes) < 2 or most == 0:
        return []
    shown = [
        f"    hour {hour:2d}  {num:8.1f} {'#' * round(BAR_WIDTH * num / most)}" for hour, num in enumerate(nodes[:24])
    ]
    return shown + ([f"    and {len(nodes) - 24} more hours"] if len(nodes) > 24 else [])


def _stage(name: str, stage: dict[str, Any], batch: str, unit: str) -> list[str]:
    head = (
        f"{name.capitalize()} (EP{stage['ep_size']} + {stage['redundant_experts']} redundant, {stage[batch]:,} {unit})"
    )
    lines = [head, _line("step of a full unit", stage["step_s"], "ms", 1000)]
    stages = sorted(stage["step_s_by_stage"].items(), key=lambda item: -item[1])
    lines += [_line(f"  {part}", seconds, "ms", 1000) for part, seconds in stages]
    lines.append(_line("computing waits for the exchange", stage["waiting_for_exchange_s"], "ms", 1000))
    limits = sorted(stage["share_of_time_by_bottleneck"].items(), key=lambda item: -item[1])
    lines += [_line(f"limited by {part}", share, "% of busy time", 100) for part, share in limits]
    return lines
