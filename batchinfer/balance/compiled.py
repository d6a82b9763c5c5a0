"""Machine code for the balancers' inner loops (numba), kept on disk between runs where there is a place for it."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

from batchinfer.ownership import check_folder
from batchinfer.progress import note
from batchinfer.records import ConfigError


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of numbers and arrays at its first call; it lets other threads run meanwhile.

    A function kept on disk is compiled again when its own file changes and not when another does: what it calls must
    are in the same file.
    """
    try:
        kept = njit(function, cache=True, nogil=True)
    except RuntimeError:  # neither __pycache__ nor the user's cache folder can be written
        return njit(function, nogil=True)
    # nothing is kept when numba is switched off (NUMBA_DISABLE_JIT)
    folder = kept.stats.cache_path if hasattr(kept, "stats") else None
    source = Path(function.__code__.co_filename).parent
    return (
        kept if folder is None or Path(folder).parent == source or _is_trusted(folder) else njit(function, nogil=True)
    )


@functools.cache
def _is_trusted(folder: str) -> bool:
    """Whether nobody else can have put code into the user's cache folder; beside the source they could change that."""
    try:
        check_folder(Path(folder), None, setting="NUMBA_CACHE_DIR", also_root=True)
    except ConfigError as error:
        note(f"warning: functions are compiled anew each time: {error}")
        return False
    return True
