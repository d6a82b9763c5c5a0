"""Text forms of numbers, one per kind of figure; an unknown value becomes a dash."""

from collections.abc import Callable

Value = float | int | None
Form = Callable[[Value], str]
DASH = "–"


def _known(form: Callable[[float], str]) -> Form:
    return lambda value: DASH if value is None else form(value)


count = _known(lambda value: f"{value:,.0f}" if isinstance(value, float) else f"{value:,}")
rate = _known(lambda value: f"{value:,.0f}" if value >= 10_000 else f"{value:,.2f}")
percent = _known(lambda value: f"{100 * value:,.1f}")
hours = _known(lambda value: f"{value:,.2f}" if value >= 1 else f"{value:.6f}")
dollars = _known(lambda value: f"{value:,.2f}" if value >= 1 or value == 0 else f"{value:.6f}")
unit_dollars = _known(lambda value: f"{value:,.2f}" if value >= 10 else f"{value:.4f}")
seconds = _known(lambda value: f"{value:,.1f}" if value >= 0.1 else f"{value:.2g}")
megabytes = _known(lambda value: f"{value / 1e6:,.1f}")
ratio = _known(lambda value: f"{value:,.3f}")
share = _known(lambda value: f"{value:.1%}" if value not in (0, 1) else f"{value:.0%}")
signed_percent = _known(lambda value: f"{value:+.1%}")
usd = _known(lambda value: f"${dollars(value)}")


def _number(value: float) -> str:
    if value == int(value) or abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:,.2f}" if abs(value) >= 1 else f"{value:.4g}"


number = _known(_number)


def span(first: int, last: int) -> str:
    """Format a range of whole numbers: '8 to 11', or '8' if both ends are the same."""
    return count(first) if first == last else f"{count(first)} to {count(last)}"


def duration(num_seconds: Value) -> str:
    """Format seconds as '2 h 05 min'; return "" below two minutes or if unknown."""
    if num_seconds is None or num_seconds < 120:
        return ""
    whole_hours, minutes = divmod(round(num_seconds / 60), 60)
    return f"{whole_hours:,} h {minutes:02d} min" if whole_hours else f"{minutes} min"
