"""The template of the page and what it is filled with: sections of cards with pictures and tables."""

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
    """Numbers and texts; the first cell of a row names it."""

    caption: str
    headers: Sequence[tuple[str, str]]  # text, and 'name', 'number' or 'text' for the cells below it
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Card:
    """A picture with its title, what one should know about it, and its numbers; or tables alone."""

    title: str = ""
    note: str = ""
    picture: Markup | str = ""
    legend: Sequence[tuple[str, str]] = ()  # names and classes of their colours
    numbers: Table | None = None  # opens on a click
    tables: Sequence[Table] = ()
    is_wide: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """Cards under a heading; without cards it is left out."""

    title: str
    cards: Sequence[Card]


def shown(text: str, limit: int = SHOWN_CHARS, num_chars: int | None = None) -> Markup:
    """Text as HTML that shows it and does nothing else: what does not print as its escape, cut visibly.

    Args:
        text: any text; what is HTML already stays as it is.
        limit: characters to show.
        num_chars: length of the whole text when `text` is only its start.
    """
    if isinstance(text, Markup):
        return text
    whole = len(text) if num_chars is None else num_chars
    kept = escape(sanitize(text[:limit])).replace("\n", "<br>")
    is_cut = whole > min(limit, len(text))
    cut = f' <span class="cut">… cut, {whole:,} characters in all</span>' if is_cut else ""
    return Markup(f"<bdi>{kept}</bdi>{cut}")


def render(**values: Any) -> str:
    """The HTML document of page.html.j2; every text in it is sanitized and escaped."""
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
    # nothing may be loaded or run, whatever is on the page; the style is allowed by its hash
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.get_template("page.html.j2").render(style=Markup(style), style_digest=digest, **values)
