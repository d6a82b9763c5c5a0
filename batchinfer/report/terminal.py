"""Lines and tables for a terminal, drawn by rich; other people's text is sanitized and never read as markup.

Importing rich takes 80 ms: import this where something is drawn, and while nothing else waits.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from batchinfer.sanitize import harmless

WIDTH = 80  # of what is not drawn on a terminal
UNCUT = 1_000_000  # a width for what is never cut

HEADING, NOTE, WARNING = "bold", "dim", "yellow"


def text(content: str, style: str = "") -> Text:
    """Any text, shown as it is."""
    return Text(harmless(content), style=style)


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


def drawn(*parts: RenderableType, width: int = WIDTH, on_terminal: bool = False) -> str:
    """The parts below each other, at most `width` columns wide; without escape codes unless on a terminal."""
    console = Console(force_terminal=on_terminal, width=width, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        console.print(Group(*parts))
    return "".join(f"{line.rstrip()}\n" for line in captured.get().split("\n")[:-1])


def show(*parts: RenderableType, uncut: bool = False) -> None:
    """Print on stdout: in colour and as wide as the terminal when it is one; `uncut`: as wide as it takes."""
    on_terminal = sys.stdout.isatty()
    width = UNCUT if uncut else shutil.get_terminal_size().columns if on_terminal else WIDTH
    print(drawn(*parts, width=width, on_terminal=on_terminal), end="", flush=True)


def _cell(content: str | Text) -> Text:
    return text(content) if isinstance(content, str) else content
