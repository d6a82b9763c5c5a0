"""Lines and tables for a terminal, drawn by rich; all text is sanitized and never parsed as markup.

Importing rich takes 80 ms: import this module inside the function that prints.
"""

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.console import Group as Together
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from batchinfer.report.figure import Group, Values, groups_of
from batchinfer.sanitize import sanitize

WIDTH = 80  # if stdout is no terminal
UNCUT = 1_000_000  # a width at which nothing is cut

LINED_UP = (27, 12)  # widths of label and first number, so that consecutive tables are aligned
HEADING, NOTE, WARNING = "bold", "dim", "yellow"


def text(content: str, style: str = "") -> Text:
    """Return text without markup, with control characters escaped."""
    return Text(sanitize(content), style=style)


def table(
    rows: Iterable[Sequence[str | Text]], columns: str, header: Sequence[str] = (), min_widths: Sequence[int] = ()
) -> Table:
    """Return a table without lines, but for one below the header if there is a header.

    Args:
        rows: cells; a row may have fewer than there are columns.
        columns: a letter per column: 'l' and 'r' align to that side, 'w' holds words that may wrap.
        header: names of the columns.
        min_widths: least widths of the first columns.
    """
    found = Table(
        box=SIMPLE_HEAD if header else None, show_header=bool(header), show_edge=False, pad_edge=False, padding=(0, 1)
    )
    for name, kind, width in zip_longest(header, columns, min_widths):
        side: Literal["left", "right"] = "right" if kind == "r" else "left"
        found.add_column(text(name or ""), justify=side, no_wrap=kind != "w", min_width=width)
    for row in rows:
        found.add_row(*map(_cell, row))
    return found


def line(label: str, number: str, unit: str = "", note: str = "") -> list[str | Text]:
    """Return the cells of one number: label, number, unit and note."""
    after = text(f"{unit:<6} " if unit and note else unit)
    return [f"  {label}", number, after.append_text(text(note, NOTE))]


def figure_lines(values: Values, groups: Sequence[Group]) -> Iterator[list[str | Text]]:
    """Yield the cells of figures under their headings; an unknown value has its reason as the note."""
    for group, figures in groups_of([values], groups):
        if figures and group.title:
            yield [text(group.title, HEADING)]
        for figure in figures:
            value = values[figure.key]
            number = figure.form(value)
            if value is None:
                yield line(figure.label, number, note=figure.why_empty)
            else:
                yield line(figure.label, number, figure.unit, figure.note_of(values))


def figure_table(
    values: Values, groups: Sequence[Group], more: Sequence[list[str | Text]] = ()
) -> Iterator[RenderableType]:
    """Yield the figures and `more` lines as one table, then the reason of each group of which nothing is known."""
    yield table([*figure_lines(values, groups), *more], "lrw", min_widths=LINED_UP)
    for group, figures in groups_of([values], groups):
        if not figures:
            yield text(group.title, HEADING)
            yield text(group.why_empty or "", NOTE)


def drawn(*parts: RenderableType, width: int = WIDTH, on_terminal: bool = False) -> str:
    """Return the parts one below the other, at most `width` columns wide; with escape codes only for a terminal.

    Tables that need more columns get them: rich would cut digits off numbers.
    """
    console = Console(force_terminal=on_terminal, width=width, markup=False, emoji=False, highlight=False)
    needed = (_needed(console, part) for part in parts if isinstance(part, Table))
    console.width = max(width, *needed, 0)
    with console.capture() as captured:
        console.print(Together(*parts))
    return "".join(f"{line.rstrip()}\n" for line in captured.get().split("\n")[:-1])


def stdout_width() -> int:
    """Return the columns of stdout: of a terminal its own."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH


def show(*parts: RenderableType, uncut: bool = False) -> None:
    """Print on stdout, in colour and full width if stdout is a terminal; with `uncut` no line is cut."""
    on_terminal = sys.stdout.isatty()
    width = UNCUT if uncut else stdout_width()
    print(drawn(*parts, width=width, on_terminal=on_terminal), end="", flush=True)


def _needed(console: Console, table: Table) -> int:
    """Return the least width of a table in which words may wrap, but nothing else is cut."""
    return Measurement.get(console, console.options.update(max_width=UNCUT), table).minimum


def _cell(content: str | Text) -> Text:
    return text(content) if isinstance(content, str) else content
