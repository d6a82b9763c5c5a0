"""Suggestions for misspelt words."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the known word closest to `word` as a question; `otherwise` if no known word is close."""
    by_fold = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), by_fold, n=1)
    return f"did you mean {by_fold[found[0]]}?" if found else otherwise
