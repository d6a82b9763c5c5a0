"""Pictures as inline SVG: columns over time, stacked bars, heat maps.

Every picture is drawn on a canvas of WIDTH units and shown in that width of pixels (page.css), so that all have letters
of one size, which can be read on a telephone. Colours are CSS classes (page.css): s0, s1, … for series, h0 … h8 for the
steps of a heat map. Text is escaped here; tooltips are <title> elements, no script is needed.

No library does this: pygal has no heat map and puts a script and a style into each picture; matplotlib and Vega have no
tooltips, write colours into each shape (no dark mode; the page's policy refuses it) and weigh tens of MB.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from batchinfer.sanitize import sanitize

WIDTH = 340  # as the width of a chart in page.css
LEFT = 46  # width of the numbers of the vertical axis
TOP, PLOT_HEIGHT, BOTTOM = 12, 130, 22
BAR_HEIGHT, BAR_GAP = 12, 20
LETTER = 7  # upper bound of the mean letter width in a text
HEAT_STEPS = 8
MAX_CELL_TITLES = 2048  # more cells than these have one tooltip per line


@dataclass(frozen=True, slots=True)
class Series:
    """One series of a picture: its name, the CSS class of its colour, and a value per column (None: not drawn)."""

    name: str
    colour: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Axis:
    """The horizontal axis: the full name of each column for tooltips, and marks as (column, text)."""

    names: Sequence[str]
    marks: Sequence[tuple[float, str]]


def inert(text: str) -> str:
    """Escape text for elements and attributes of HTML and SVG, so that it is shown and does nothing else."""
    return escape(sanitize(text))


def short(value: float) -> str:
    """Format a number for an axis: 950, 12k, 3.5M, 0.02."""
    for factor, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{suffix}"
    return f"{value:.3g}" if abs(value) >= 1e-4 or value == 0 else f"{value:.0e}"


def nice_steps(largest: float) -> list[float]:
    """Return numbers from 0 to at least `largest` in at most four steps of 1, 2 or 5 times a power of ten."""
    if largest <= 0:
        return [0.0, 1.0]
    power = 10 ** math.floor(math.log10(largest / 4))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * 4 >= largest * (1 - 1e-9))
    return [index * step for index in range(math.ceil(largest / step - 1e-9) + 1)]


def columns(
    key: str,
    title: str,
    axis: Axis,
    series: Sequence[Series],
    form: Callable[[float], str],
    *,
    stacked: bool = True,
    as_share: bool = False,
) -> Markup:
    """Draw a column per name of the axis, with its series stacked or (stacked=False) next to each other.

    Args:
        key: start of the ids in it, unique on the page.
        title: what it shows, for people who cannot see it.
        form: a value with its unit, for tooltips.
        as_share: the values are shares; the vertical axis goes to 100 %.
    """
    num = len(axis.names)
    heights = [[max(0.0, value or 0.0) for value in one.values] for one in series]
    if stacked:
        tops = [sum(values) for values in zip(*heights, strict=True)]
    else:
        tops = [max(values) for values in zip(*heights, strict=True)]
    steps = [0.0, 0.25, 0.5, 0.75, 1.0] if as_share else nice_steps(max(tops, default=0.0))
    scale = PLOT_HEIGHT / steps[-1]
    base = TOP + PLOT_HEIGHT
    pitch = (WIDTH - LEFT - 4) / max(1, num)
    parts = [_y_axis(steps, scale, base, as_share)]
    gap = min(2.0, pitch * 0.2)
    for column in range(num):
        left, bottom = LEFT + column * pitch + gap / 2, float(base)
        for index, one in enumerate(series):
            height = heights[index][column] * scale
            wide = (pitch - gap) / (1 if stacked else len(series))
            x = left if stacked else left + index * wide
            if height > 0:
                parts.append(_rect(x, bottom - height, wide, height, one.colour))
            bottom -= height if stacked else 0
        told = ", ".join(
            f"{one.name} {form(one.values[column] or 0.0)}" for one in series if one.values[column] is not None
        )
        full = _rect(
            LEFT + column * pitch, TOP, pitch, PLOT_HEIGHT, "spot", f"{axis.names[column]}: {told or 'nothing'}"
        )
        parts.append(full)
    parts.append(f'<line class="base" x1="{LEFT}" x2="{WIDTH - 4}" y1="{base}" y2="{base}"/>')
    parts += _x_marks([(LEFT + column * pitch, text) for column, text in axis.marks], base)
    return _svg(key, title, base + BOTTOM, parts)


def bars(
    key: str, title: str, rows: Sequence[tuple[str, Sequence[tuple[str, str, float]]]], form: Callable[[float], str]
) -> Markup:
    """Draw a horizontal bar of coloured parts per row, all on one scale.

    Args:
        key: start of the ids in it, unique on the page.
        title: what it shows, for people who cannot see it.
        rows: (label, [(name, colour, value), …]).
        form: a value with its unit, for tooltips.
    """
    longest = max((sum(value for _, _, value in row) for _, row in rows), default=0.0) or 1.0
    parts = []
    for index, (label, row) in enumerate(rows):
        top = TOP + 4 + index * (BAR_HEIGHT + BAR_GAP)
        total = sum(value for _, _, value in row)
        parts.append(f'<text class="label" x="0" y="{top}">{inert(label)}</text>')
        parts.append(f'<text class="label strong" x="{WIDTH}" y="{top}" text-anchor="end">{inert(form(total))}</text>')
        left = 0.0
        for name, colour, value in row:
            wide = value / longest * WIDTH
            if wide > 0:
                share = f" ({value / total:.1%})" if len(row) > 1 else ""
                told = f"{name}: {form(value)}{share}"
                parts.append(_rect(left, top + 6, wide, BAR_HEIGHT, f"{colour} part", told))
            left += wide
    return _svg(key, title, TOP + len(rows) * (BAR_HEIGHT + BAR_GAP), parts)


def num_marks(texts: Sequence[str], left: int) -> int:
    """Return how many of these texts fit next to each other below a picture, at most four."""
    room = (WIDTH - left) / (LETTER * max(map(len, texts)) + 10)
    return max(1, min(4, int(room)))


def heat_map(
    key: str,
    title: str,
    rows: Sequence[str],
    axis: Axis,
    values: Sequence[Sequence[float]],
    largest: float,
    form: Callable[[float], str],
    *,
    left: int = LEFT,
) -> Markup:
    """Draw a heat map in eight steps of one colour, from 0 to `largest` and above.

    Args:
        key: start of the ids in it, unique on the page.
        title: what it shows, for people who cannot see it.
        rows: a label per line; labels are left out if lines are too low.
        axis: the columns.
        values: [rows][columns].
        largest: value of the strongest colour.
        form: a value with its unit, for tooltips.
        left: width of the labels of lines.
    """
    num_rows, num_columns = len(rows), len(axis.names)
    high = max(3.0, min(22.0, 230 / max(1, num_rows)))
    wide = (WIDTH - left - 2) / max(1, num_columns)
    with_titles = num_rows * num_columns <= MAX_CELL_TITLES
    every = max(1, math.ceil(13 / high))
    most_letters = int((left - 5) / LETTER)
    parts: list[str] = []
    outlines: dict[int, list[str]] = {}
    for line, label in enumerate(rows):
        y = TOP + line * high
        if line % every == 0:
            text_y = y + min(high, 13) / 2 + 4
            text = label if len(label) <= most_letters else f"{label[: most_letters - 1]}…"
            parts.append(f'<text class="tick" x="{left - 5}" y="{text_y:.1f}" text-anchor="end">{inert(text)}</text>')
        for column, value in enumerate(values[line]):
            step = min(HEAT_STEPS, max(0, math.ceil(value / largest * HEAT_STEPS - 1e-9))) if largest > 0 else 0
            x = left + column * wide
            if with_titles:
                told = f"{label}, {axis.names[column]}: {form(value)}"
                parts.append(
                    _rect(x, y, max(0.4, wide - min(1, wide * 0.12)), high - min(1, high * 0.12), f"h{step}", told)
                )
            else:
                outlines.setdefault(step, []).append(f"M{x:.2f} {y:.2f}h{wide:.2f}v{high:.2f}h-{wide:.2f}z")
        if not with_titles and values[line]:
            top = max(range(num_columns), key=values[line].__getitem__)
            told = f"{label}: most at {axis.names[top]}, {form(values[line][top])}"
            parts.append(_rect(left, y, WIDTH - left - 2, high, "spot", told))
    drawn = [f'<path class="h{step}" d="{"".join(path)}"/>' for step, path in sorted(outlines.items())]
    base = TOP + num_rows * high
    marks = _x_marks([(left + column * wide, text) for column, text in axis.marks], base)
    return _svg(key, title, base + BOTTOM, [*drawn, *parts, *marks])


def heat_scale(largest: float, form: Callable[[float], str]) -> Markup:
    """Return the colour scale of a heat map from 0 to `largest` as one line of HTML."""
    cells = "".join(
        f'<rect class="h{step}" x="{step * 14}" y="0" width="14" height="10"/>' for step in range(HEAT_STEPS + 1)
    )
    wide = 14 * (HEAT_STEPS + 1)
    return Markup(
        f'<p class="scale">{inert(form(0.0))} '
        f'<svg aria-hidden="true" viewBox="0 0 {wide} 10" width="{wide}" height="10">'
        f"{cells}</svg> {inert(form(largest))}</p>"
    )


def _svg(key: str, title: str, height: float, parts: Sequence[str]) -> Markup:
    return Markup(
        f'<svg class="chart" role="img" aria-labelledby="{key}-title" viewBox="0 0 {WIDTH} {height:.0f}">'
        f'<title id="{key}-title">{inert(title)}</title>{"".join(parts)}</svg>'
    )


def _rect(x: float, y: float, wide: float, high: float, colour: str, told: str | None = None) -> str:
    shape = f'<rect class="{colour}" x="{x:.2f}" y="{y:.2f}" width="{wide:.2f}" height="{high:.2f}"'
    return f"{shape}/>" if told is None else f"{shape}><title>{inert(told)}</title></rect>"


def _y_axis(steps: Sequence[float], scale: float, base: float, as_share: bool) -> str:
    parts = []
    for value in steps:
        y = base - value * scale
        text = f"{value:.0%}" if as_share else short(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 4}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{inert(text)}</text>')
    return "".join(parts)


def _x_marks(marks: Sequence[tuple[float, str]], base: float) -> list[str]:
    parts: list[str] = []
    free_from = 0.0
    for x, text in marks:
        wide = LETTER * len(text)
        anchor, left = ("end", x - wide) if x + wide > WIDTH else ("start", x)
        if left < free_from:
            continue
        free_from = left + wide
        parts.append(f'<line class="base" x1="{x:.1f}" x2="{x:.1f}" y1="{base:.1f}" y2="{base + 4:.1f}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{base + 16:.1f}" text-anchor="{anchor}">{inert(text)}</text>')
    return parts
