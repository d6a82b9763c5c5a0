"""The page's template, and the sections, cards and tables that fill it."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from batchinfer.sanitize import sanitize

SHOWN_CHARS = 300


@dataclass(frozen=True, slots=True)
class Table:
    """A table; the first cell of a row is the row's name."""

    caption: str
    headers: Sequence[tuple[str, str]]  # text, and 'name', 'number' or 'text' for the cells below it
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Card:
    """A picture with title, note and numbers, or tables alone."""

    title: str = ""
    note: str = ""
    picture: Markup | str = ""
    legend: Sequence[tuple[str, str]] = ()  # names and classes of their colours
    numbers: Table | None = None  # shown after a click
    tables: Sequence[Table] = ()
    is_wide: bool = False
    run: str = ""  # of two runs side by side, the one that the card shows


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with cards; a section without cards is left out."""

    title: str
    cards: Sequence[Card]


def shown(text: str, limit: int = SHOWN_CHARS, num_chars: int | None = None) -> Markup:
    """Convert text to inert HTML: unprintable characters as escapes, and a note if the text is cut.

    Args:
        text: any text; Markup is returned unchanged.
        limit: characters to show.
        num_chars: length of the whole text if `text` is only its start.
    """
    if isinstance(text, Markup):
        return text
    whole = len(text) if num_chars is None else num_chars
    kept = escape(sanitize(text[:limit])).replace("\n", "<br>")
    is_cut = whole > min(limit, len(text))
    cut = f' <span class="cut">… cut, {whole:,} characters in all</span>' if is_cut else ""
    return Markup(f"<bdi>{kept}</bdi>{cut}")


def render(**values: Any) -> str:
    """Render the HTML document of page.html.j2; every text is sanitized and escaped."""
    environment = Environment(
        loader=PackageLoader("batchinfer.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else sanitize(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = shown
    style = (resources.files("batchinfer.report.page") / "page.css").read_text(encoding="utf-8")
    # the page's policy allows no load and no script; the style is allowed by its hash
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.get_template("page.html.j2").render(style=Markup(style), style_digest=digest, **values)
