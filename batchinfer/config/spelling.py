"""Words with a slip of the pen, and the words that were meant."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the known word that is most like another one, as a question; `otherwise` if none is like it."""
    by_fold = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), by_fold, n=1)
    return f"did you mean {by_fold[found[0]]}?" if found else otherwise
