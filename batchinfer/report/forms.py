"""Figures as text: one form per kind of figure. Called by table, side_by_side and html."""

from __future__ import annotations

from collections.abc import Callable

Form = Callable[[float | int | None], str | None]


def _known(form: Callable[[float], str]) -> Form:
    return lambda value: None if value is None else form(value)


count = _known(lambda value: f"{value:,.0f}" if isinstance(value, float) else f"{value:,}")
rate = _known(lambda value: f"{value:,.0f}" if value >= 10_000 else f"{value:,.2f}")
percent = _known(lambda value: f"{100 * value:,.1f}")
hours = _known(lambda value: f"{value:,.2f}" if value >= 1 else f"{value:.6f}")
dollars = _known(lambda value: f"{value:,.2f}" if value >= 1 or value == 0 else f"{value:.6f}")
unit_dollars = _known(lambda value: f"{value:,.2f}" if value >= 10 else f"{value:.4f}")
seconds = _known(lambda value: f"{value:,.1f}" if value >= 0.1 else f"{value:.2g}")
megabytes = _known(lambda value: f"{value / 1e6:,.1f}")
ratio = _known(lambda value: f"{value:,.3f}")


def duration(num_seconds: float | int | None) -> str | None:
    """'2 h 05 min' for what is longer than two minutes."""
    if num_seconds is None or num_seconds < 120:
        return None
    hours, minutes = divmod(round(num_seconds / 60), 60)
    return f"{hours:,} h {minutes:02d} min" if hours else f"{minutes} min"


def share(value: float) -> str:
    """A share in percent."""
    return f"{value:.1%}" if value not in (0, 1) else f"{value:.0%}"


PREDICTION_FORMS: dict[str, tuple[str, Form]] = {
    "computed_tokens": ("prompt tokens computed", count),
    "output_tokens": ("output tokens", count),
    "prefill_balance": ("prefill, busiest / mean", ratio),
    "decode_balance": ("decode KV, busiest / mean", ratio),
    "expert_balance": ("experts, busiest / mean", ratio),
    "work_s": ("seconds on ranks", rate),
    "gpu_hours": ("GPU-hours", hours),
    "cost_usd": ("cost, $", dollars),
}
SECONDS_LABELS = {
    "startup": "start-up",
    "prefill": "prefill",
    "decode": "decode",
    "exchange": "waiting for expert rows",
    "waste": "wasted work",
    "tail": "tail",
    "idle": "idle otherwise",
}
# what is divided by which tokens
UNIT_COST_LABELS = {
    "usd_per_million_output_tokens": ("all cost on output", "output"),
    "usd_per_million_tokens": ("all cost on all tokens", "input + output"),
    "prefill_usd_per_million_input_tokens": ("by pool: prefill", "input"),
    "decode_usd_per_million_output_tokens": ("by pool: decode", "output"),
}
