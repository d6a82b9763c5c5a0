"""Text for terminals and pages: unprintable characters are escaped, long texts are cut, sizes get a fitting unit."""

import unicodedata

MAX_CHARS = 500  # of an error in a row or on a terminal


def printable(char: str) -> str:
    """Return a printable character unchanged, and any other as its escape.

    Control characters, escapes, line breaks and marks that reverse the direction become escapes, so that no text can
    move the cursor or disguise itself.
    """
    if char.isprintable() or unicodedata.category(char) == "Zs":
        return char
    return char.encode("unicode_escape").decode("ascii")


def sanitize(text: str) -> str:
    """Return a text of one or several lines with unprintable characters escaped, for a terminal."""
    return text if text.isprintable() else "".join(char if char == "\n" else printable(char) for char in text)


def fit(content: str, width: int, keep_end: bool = False) -> str:
    """Return one line of any text, sanitized and cut to a width.

    Args:
        content: line breaks in it become escapes.
        width: columns of the terminal.
        keep_end: cut at the start instead of the end (paths).
    """
    # only the part near the cut is escaped
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
    """Return the columns that a terminal needs: two for wide characters (East Asian), none for combining ones."""
    if content.isascii():
        return len(content)
    return sum(
        0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF") for char in content
    )


def error_text(error: BaseException) -> str:
    """Return the text of a parser's error; one sentence for too deep nesting, whose text differs between Pythons."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def clip(text: str) -> str:
    """Shorten a text for a row or a person by leaving out its middle."""
    if len(text) <= MAX_CHARS:
        return text
    end = MAX_CHARS // 4
    return f"{text[: MAX_CHARS - end]} … ({len(text)} characters) … {text[-end:]}"


def count_text(count: int, noun: str) -> str:
    """Return a count with its noun: `1 row`, `2,000 rows`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size_text(num_bytes: int) -> str:
    """Return a number of bytes in the decimal unit that fits: `512 bytes`, `3.4 MB`."""
    value, unit = float(num_bytes), "bytes"
    for larger in ("KB", "MB", "GB", "TB", "PB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:,.1f} {unit}"


def first_line(error: BaseException) -> str:
    """Return an error's first line without a closing full stop, for a sentence; its class if it has no text."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else error_text(error)
    return clip((text.strip().splitlines() or [type(error).__name__])[0].rstrip("."))
