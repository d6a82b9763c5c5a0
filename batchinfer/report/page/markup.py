"""Pieces of an HTML page: text made harmless, tables, figures with a caption. Called by html and page_charts.

Everything that comes from a run (names, ids, answers, errors) passes `shown` or `table` here, or is escaped by charts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from batchinfer.report.page.charts import Series, inert
from batchinfer.sanitize import sanitize


@dataclass(frozen=True, slots=True)
class Cell:
    """HTML of a table cell and the class that says how it is set."""

    html: str
    kind: str = "name"  # 'name', 'number' or 'text'


def shown(text: str, limit: int = 300, num_chars: int | None = None) -> str:
    """Text as HTML that shows it and does nothing else: escaped, what does not print as its escape, cut visibly.

    Args:
        text: any text.
        limit: characters to show.
        num_chars: length of the whole text when `text` is only its start.
    """
    whole = len(text) if num_chars is None else num_chars
    kept = escape(sanitize(text[:limit]))
    html = f"<bdi>{kept.replace(chr(10), '<br>')}</bdi>"
    if whole > min(limit, len(text)):
        html += f' <span class="cut">… cut, {whole:,} characters in all</span>'
    return html


def number(text: str | None) -> Cell:
    """A number that is text already; '-' for what is not known."""
    return Cell("–" if text is None else escape(text), "number")


def name(text: str, limit: int = 120) -> Cell:
    """A short text."""
    return Cell(shown(text, limit))


def table(caption: str, headers: Sequence[tuple[str, str]], rows: Sequence[Sequence[Cell]]) -> str:
    """A table that scrolls by itself where it is wider than the page.

    Args:
        caption: what it holds.
        headers: (text, kind of its cells).
        rows: cells; the first of each names the row.
    """
    head = "".join(f'<th scope="col" class="{kind}">{inert(text)}</th>' for text, kind in headers)
    body = []
    for row in rows:
        first, rest = row[0], row[1:]
        cells = "".join(f'<td class="{cell.kind}">{cell.html}</td>' for cell in rest)
        body.append(f'<tr><th scope="row" class="{first.kind}">{first.html}</th>{cells}</tr>')
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{inert(caption)}"><table>'
        f"<caption>{inert(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def folded(summary: str, html: str) -> str:
    """HTML that opens on a click."""
    return f"<details><summary>{escape(summary)}</summary>{html}</details>"


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Names beside their colours.

    Args:
        entries: (name, class of the colour).
    """
    items = "".join(f'<li><span class="swatch {colour}"></span>{inert(text)}</li>' for text, colour in entries)
    return f'<ul class="legend">{items}</ul>'


def legend_of(series: Sequence[Series]) -> str:
    """The legend of a picture's series."""
    return legend([(one.name, one.colour) for one in series])


def card(title: str, note: str, *pieces: str, wide: bool = False) -> str:
    """A picture with its title, what one should know about it, and its parts."""
    kind = "card wide" if wide else "card"
    caption = f"<figcaption><h3>{escape(title)}</h3><p>{escape(note)}</p></figcaption>"
    return f'<figure class="{kind}">{caption}{"".join(pieces)}</figure>'
