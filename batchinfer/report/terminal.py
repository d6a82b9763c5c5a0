"""Lines and tables for a terminal, drawn by rich; other people's text is sanitized and never read as markup.

Importing rich takes 80 ms: import this where something is drawn, and while nothing else waits.
"""

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.console import Group as Together
from rich.table import Table
from rich.text import Text

from batchinfer.report.figure import Group, Values, groups_of
from batchinfer.sanitize import sanitize

WIDTH = 80  # of what is not drawn on a terminal
UNCUT = 1_000_000  # a width for what is never cut

LINED_UP = (27, 12)  # label and first number, so that tables below each other are in line
HEADING, NOTE, WARNING = "bold", "dim", "yellow"


def text(content: str, style: str = "") -> Text:
    """Any text, shown as it is."""
    return Text(sanitize(content), style=style)


def table(
    rows: Iterable[Sequence[str | Text]], columns: str, header: Sequence[str] = (), min_widths: Sequence[int] = ()
) -> Table:
    """A table without lines; with a header there is one below that.

    Args:
        rows: cells; a row may have fewer than there are columns.
        columns: a letter for each: 'l' and 'r' are set to that side, 'w' holds words that may wrap.
        header: names of the columns.
        min_widths: of the first columns.
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
    """The cells of one number: what it is, itself, its unit and a note."""
    after = text(f"{unit:<6} " if unit and note else unit)
    return [f"  {label}", number, after.append_text(text(note, NOTE))]


def figure_lines(values: Values, groups: Sequence[Group]) -> Iterator[list[str | Text]]:
    """Cells of the figures under their headings; of what is not known the reason."""
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
    """The figures as a table, then `more` lines of it; then what is said of groups of which nothing is known."""
    yield table([*figure_lines(values, groups), *more], "lrw", min_widths=LINED_UP)
    for group, figures in groups_of([values], groups):
        if not figures:
            yield text(group.title, HEADING)
            yield text(group.why_empty or "", NOTE)


def drawn(*parts: RenderableType, width: int = WIDTH, on_terminal: bool = False) -> str:
    """The parts below each other, at most `width` columns wide; without escape codes unless on a terminal."""
    console = Console(force_terminal=on_terminal, width=width, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        console.print(Together(*parts))
    return "".join(f"{line.rstrip()}\n" for line in captured.get().split("\n")[:-1])


def show(*parts: RenderableType, uncut: bool = False) -> None:
    """Print on stdout: in colour and as wide as the terminal when it is one; `uncut`: as wide as it takes."""
    on_terminal = sys.stdout.isatty()
    width = UNCUT if uncut else shutil.get_terminal_size().columns if on_terminal else WIDTH
    print(drawn(*parts, width=width, on_terminal=on_terminal), end="", flush=True)


def _cell(content: str | Text) -> Text:
    return text(content) if isinstance(content, str) else content
