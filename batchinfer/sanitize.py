"""Other people's text for terminals and pages: what does not print is escaped, what is too long is cut."""

import unicodedata

MAX_CHARS = 500  # of an error in a row or on a terminal


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


def fit(content: str, width: int, keep_end: bool = False) -> str:
    """One line of any text, sanitized, cut to a width.

    Args:
        content: line breaks in it become escapes.
        width: columns of the terminal.
        keep_end: cut at the start instead of the end (paths).
    """
    # what is far beyond the cut need not be escaped
    near = content[-width - 1 :] if keep_end else content[: width + 1]
    pieces = [printable(char) for char in near]
    if len(near) == len(content) and sum(map(display_width, pieces)) <= width:
        return "".join(pieces)
    kept: list[str] = []
    room = width - 1
    for piece in reversed(pieces) if keep_end else pieces:
        room -= display_width(piece)
        if room < 0:
            break
        kept.append(piece)
    return "…" + "".join(reversed(kept)) if keep_end else "".join(kept) + "…"


def display_width(content: str) -> int:
    """Columns that a terminal needs: two for wide characters (East Asian), none for combining ones."""
    if content.isascii():
        return len(content)
    return sum(
        0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF") for char in content
    )


def words_of(error: BaseException) -> str:
    """An error of somebody's text; what Python says of one that is nested too deeply differs between its versions."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def clip(text: str) -> str:
    """A sentence for a row or a person; of one that is too long the middle is left out."""
    if len(text) <= MAX_CHARS:
        return text
    end = MAX_CHARS // 4
    return f"{text[: MAX_CHARS - end]} … ({len(text)} characters) … {text[-end:]}"


def first_line(error: BaseException) -> str:
    """What an error says, for a sentence: its first line without a closing full stop; if it says nothing, its class."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else words_of(error)
    return clip((text.strip().splitlines() or [type(error).__name__])[0].rstrip("."))
