"""Other people's text made harmless for a terminal: used for messages, the report and the page."""

from __future__ import annotations

import unicodedata


def printable(char: str) -> str:
    """A character as it is, or as its escape when it does not print.

    Control characters, escapes, line breaks and marks that reverse the direction become escapes, so that no text can
    move the cursor or pass for something else.
    """
    if char.isprintable() or unicodedata.category(char) == "Zs":
        return char
    return char.encode("unicode_escape").decode("ascii")


def sanitize(text: str) -> str:
    """A text of one or several lines as a terminal should get it."""
    return text if text.isprintable() else "".join(char if char == "\n" else printable(char) for char in text)
