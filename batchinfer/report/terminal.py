"""Other people's text on a terminal: made harmless and cut to fit. Called by table and rows."""

from __future__ import annotations

import unicodedata

from batchinfer.sanitize import printable


def fit(text: str, width: int, keep_end: bool = False) -> str:
    """One line of text that a terminal shows as it is, cut to a display width.

    Everything that is not printable (control characters, escapes, line breaks, marks that reverse the direction) is
    written as its escape, so that no text can move the cursor or pass for something else.

    Args:
        text: any text.
        width: columns of the terminal.
        keep_end: cut at the start instead of the end (paths).
    """
    # what is far beyond the cut need not be escaped
    near = text[-width - 1 :] if keep_end else text[: width + 1]
    pieces = [printable(char) for char in near]
    if len(near) == len(text) and sum(map(display_width, pieces)) <= width:
        return "".join(pieces)
    kept: list[str] = []
    room = width - 1
    for piece in reversed(pieces) if keep_end else pieces:
        room -= display_width(piece)
        if room < 0:
            break
        kept.append(piece)
    return "…" + "".join(reversed(kept)) if keep_end else "".join(kept) + "…"


def display_width(text: str) -> int:
    """Columns that a terminal needs: two for wide characters (East Asian), none for combining ones."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF") for char in text)
