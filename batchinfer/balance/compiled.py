"""Machine code for the balancers' inner loops (numba), kept on disk between runs if a folder for it is writable."""

import functools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache
from numba.core.dispatcher import Dispatcher

from batchinfer.ownership import check_folder
from batchinfer.progress import note
from batchinfer.records import ConfigError


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of numbers and arrays at its first call; other threads run meanwhile.

    A function kept on disk is compiled again when its own file changes, not when another file does: all functions that
    it calls must be in the same file.
    """
    code = njit(function, nogil=True)
    if not isinstance(code, Dispatcher):  # numba is switched off (NUMBA_DISABLE_JIT)
        return code
    with suppress(RuntimeError):  # neither __pycache__ nor the user's cache folder can be written
        kept = _KeptCode(function)
        if Path(kept.cache_path).parent == Path(function.__code__.co_filename).parent or _is_trusted(kept.cache_path):
            code._cache = kept  # type: ignore[attr-defined]  # which numba does not declare
    return code


class _KeptCode(FunctionCache):
    """Numba's cache of a function; if its files are damaged or cannot be written, the function is compiled again."""

    def load_overload(self, sig: object, target_context: object) -> object:
        """See FunctionCache."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # whatever the bytes of a damaged file lead to
            with suppress(OSError):
                self.flush()  # its index is read before something is saved
            return None

    def save_overload(self, sig: object, data: object) -> None:
        """See FunctionCache."""
        with suppress(OSError):
            super().save_overload(sig, data)


@functools.cache
def _is_trusted(folder: str) -> bool:
    """Return whether only this user and root can put code into the user's cache folder.

    The folder of the source needs no check: who can write there can change the source, too.
    """
    try:
        check_folder(Path(folder), None, setting="NUMBA_CACHE_DIR", also_root=True)
    except ConfigError as error:
        note(f"warning: functions are compiled again by each process: {error}")
        return False
    return True
