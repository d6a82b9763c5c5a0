"""Machine code for the balancers' inner loops (numba), kept on disk between runs where there is a place for it."""

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of numbers and arrays at its first call; it lets other threads run meanwhile.

    A function kept on disk is compiled again when its own file changes and not when another does: what it calls must
    are in the same file.
    """
    try:
        return njit(function, cache=True, nogil=True)
    except RuntimeError:  # neither __pycache__ nor the user's cache folder can be written
        return njit(function, nogil=True)
