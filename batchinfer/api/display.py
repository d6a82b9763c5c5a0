"""Displays of a call's progress: the command's bars, tqdm's bars, a line about every 30 s, or a caller's function."""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, Literal

from batchinfer.progress import LINE_S, LINE_STARTS
from batchinfer.records import ConfigError

Progress = bool | Literal["tqdm"] | Callable[[str, int, int], object]  # a function gets title, number done, total
_UNITS = {"tokenise": "rows", "load": "B", "work": "requests", "finish": "rows"}  # of titles that get a bar
_DELAY_S = 1.0  # until a bar of another activity than "work" appears
_log = logging.getLogger("batchinfer")


class Display:
    """The display of one call, which shows nothing."""

    uses_terminal = False  # whether the command itself draws on the terminal

    def count(self, title: str, done: int, total: int) -> None:
        """Show the number of finished items of an activity."""

    def line(self, text: str) -> None:
        """Show a line of the command's stderr, which was logged before."""

    def close(self) -> None:
        """Remove the bars from the screen."""


class _OnTerminal(Display):
    uses_terminal = True


class _Function(Display):
    def __init__(self, function: Callable[[str, int, int], object]) -> None:
        self._function = function

    def count(self, title: str, done: int, total: int) -> None:
        self._function(title, done, total)


class _Lines(Display):
    """A line of progress on stderr now and then, unless the caller's logging shows all lines."""

    def __init__(self) -> None:
        self._shown_s = time.monotonic()

    def line(self, text: str) -> None:
        is_logged = _log.isEnabledFor(logging.INFO) and _log.hasHandlers()
        if text.startswith(LINE_STARTS) and time.monotonic() - self._shown_s >= LINE_S and not is_logged:
            print(text, file=sys.stderr, flush=True)
            self._shown_s = time.monotonic()


class _Bars(Display):
    """Bars of tqdm, one for each activity; the bar of requests stays."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a notebook without widgets gets bars of text
            from tqdm.auto import tqdm

        class Bar(tqdm):
            _lock = threading.RLock()  # tqdm's own is a semaphore, of which Python 3.14 warns at exit

        self._new, self._bars = Bar, dict[str, Any]()

    def count(self, title: str, done: int, total: int) -> None:
        if title == "tokens" and "work" in self._bars:
            self._bars["work"].set_postfix_str(f"{done:,} tokens", refresh=False)
        if title not in _UNITS or not total:
            return
        bar = self._bars.get(title)
        if bar is None or bar.total != total:
            self._drop(title)
            bar = self._bars[title] = self._new(
                desc=title,
                total=total,
                initial=done,
                unit=_UNITS[title] if title == "load" else f" {_UNITS[title]}",
                unit_scale=title == "load",
                leave=title == "work",
                delay=0 if title == "work" else _DELAY_S,
                file=sys.stderr,
            )
        bar.update(done - bar.n)
        if done == total and title == "work":
            bar.refresh()
        elif done == total:
            self._drop(title)

    def _drop(self, title: str) -> None:
        bar = self._bars.pop(title, None)
        if bar is not None:
            bar.leave = False
            bar.close()

    def close(self) -> None:
        for bar in self._bars.values():
            bar.close()


def check_progress(progress: Progress) -> None:
    """Check the argument `progress`.

    Raises:
        ConfigError: the value is none of those that are allowed.
    """
    is_right = isinstance(progress, bool) or callable(progress) or (isinstance(progress, str) and progress == "tqdm")
    if not is_right:
        raise ConfigError(
            f'progress is {progress!r}; give True, False, "tqdm", or a function of a title, the number done and the '
            "total"
        )


def display_of(progress: Progress) -> Display:
    """Return the display of a call, for a checked value."""
    if callable(progress):
        return _Function(progress)
    if progress == "tqdm" or (progress and _is_notebook()):
        return _Bars()
    if not progress:
        return Display()
    return _OnTerminal() if is_terminal() else _Lines()


def is_terminal() -> bool:
    """Return whether this process's stderr is a terminal, to which a child process would write, too."""
    own = sys.__stderr__
    return own is not None and sys.stderr is own and own.isatty()


def _is_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config
