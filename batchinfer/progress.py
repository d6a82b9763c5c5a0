"""Progress on stderr: a bar on a terminal, plain lines elsewhere; and for whoever listens in this process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

from tqdm import tqdm

from batchinfer.sanitize import sanitize

LINE_SECONDS = 10.0  # between plain lines
TOLD_SECONDS = 0.1  # between two calls of a listener

Listener = Callable[[str, int, int], None]  # told the title, how many are done, and of how many
_listeners: list[Listener] = []  # of this process


def listen(listener: Listener) -> None:
    """Tell somebody of all progress that this process makes from now on."""
    _listeners.append(listener)


class Progress:
    """One bar, or one plain line every few seconds; `advance` is cheap enough to call per step."""

    def __init__(self, title: str, total: int, unit: str, *, done: int = 0) -> None:
        self._title, self.total, self._unit = title, total, unit
        self.count = self._first = done
        self._detail = ""
        self._start = self._last_line = time.monotonic()
        self._bar = (
            tqdm(total=total, initial=done, desc=title, unit=f" {unit}", file=sys.stderr, dynamic_ncols=True)
            if sys.stderr.isatty()
            else None
        )
        self._told = -TOLD_SECONDS
        self._tell()

    def advance(self, count: int, detail: str = "") -> None:
        """Count finished things; `detail` (for example tokens/s) is shown with them."""
        self.count += count
        self._detail = detail or self._detail
        if time.monotonic() - self._told >= TOLD_SECONDS:
            self._tell()
        if self._bar is not None:
            if detail:
                self._bar.set_postfix_str(detail, refresh=False)
            self._bar.update(count)
        elif time.monotonic() - self._last_line >= LINE_SECONDS:
            self._print_line()

    def extend(self, count: int) -> None:
        """There is more to do than was thought."""
        self.total += count
        if self._bar is not None:
            self._bar.total = self.total

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell()
        if self._bar is not None:
            self._bar.close()
        else:
            self._print_line()

    def _tell(self) -> None:
        self._told = time.monotonic()
        for listener in _listeners:
            listener(self._title, self.count, self.total)

    def _print_line(self) -> None:
        self._last_line = time.monotonic()
        seconds = max(self._last_line - self._start, 1e-9)
        rate = (self.count - self._first) / seconds
        left = f", {(self.total - self.count) / rate:,.0f} s left" if rate and self.count < self.total else ""
        detail = f", {self._detail}" if self._detail else ""
        print(
            f"{self._title}: {self.count:,} of {self.total:,} {self._unit} ({rate:,.1f}/s{left}){detail}",
            file=sys.stderr,
            flush=True,
        )


def note(text: str) -> None:
    """A line of information or a warning on stderr, without tearing a running bar."""
    tqdm.write(sanitize(text), file=sys.stderr)
