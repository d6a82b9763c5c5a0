"""Progress on stderr: at most two bars on a terminal, plain lines elsewhere; and calls of listeners in this process.

The current activities of a process are a list of meters: planning and loading at once, then the work, then finish. One
line shows them all; it comes after FIRST_S and then every LINE_S, even if nothing can be counted. A meter that has
counted something ends with one more line.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from batchinfer.sanitize import sanitize

FIRST_S = 1.0  # until the first plain line
LINE_S = 30.0  # between plain lines
BAR_S = 0.2  # between two updates of a terminal
TOLD_S = 0.1  # between two calls of a listener
MOST_BARS = 2
# starts of a job's progress lines, for programs that look for them in stderr
LINE_STARTS = ("planning: ", "loading: ", "to come: ", "waiting: ", "prefill: ", "decode: ", "finish: ")
BAR_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit}{postfix}"

Listener = Callable[[str, int, int], None]  # called with the title, the number done, and the total
_listeners: list[Listener] = []  # of this process


def add_listener(listener: Listener) -> None:
    """Call the listener with all further progress of this process."""
    _listeners.append(listener)


@dataclass(frozen=True, slots=True)
class Bar:
    """A terminal's bar of a meter; total 0: nothing can be counted. unit: "B" is written as kB, MB, GB."""

    title: str
    done: int = 0
    total: int = 0
    unit: str = ""
    detail: str = ""


class Meter:
    """An activity that is shown for as long as its `with` statement lasts."""

    has_counted = False  # whether a last line is worthwhile

    def line(self) -> str:
        """Return the activity as text; that of a job begins with one of LINE_STARTS."""
        raise NotImplementedError

    def bars(self) -> list[Bar]:
        """Return the bars for a terminal."""
        raise NotImplementedError

    def figures(self) -> dict[str, Any]:
        """Return the JSON-ready figures for `status`; `phase` is one of them."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        _board.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _board.remove(self)


class Count:
    """A count of finished items out of a total, reported to listeners. `advance` is cheap enough to call per step."""

    def __init__(self, title: str, total: int, *, done: int = 0) -> None:
        self.title, self.total, self.count = title, total, done
        self._told = -TOLD_S
        self.tell()

    def advance(self, count: int) -> None:
        """Add finished items."""
        self.set(self.count + count, self.total)

    def extend(self, count: int) -> None:
        """Increase the total."""
        self.total += count

    def set(self, count: int, total: int) -> None:
        """Set the number of finished items and the total."""
        self.count, self.total = count, total
        if time.monotonic() - self._told >= TOLD_S:
            self.tell()

    def tell(self) -> None:
        """Call the listeners now."""
        self._told = time.monotonic()
        for listener in _listeners:
            listener(self.title, self.count, self.total)


class Progress(Count, Meter):
    """Items counted one after the other: rows, files, bytes.

    Args:
        title: for listeners.
        phase: for people; None: the title.
        clock: seconds from some moment.
    """

    def __init__(
        self,
        title: str,
        total: int,
        unit: str,
        *,
        phase: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(title, total)
        self._phase, self._unit = phase or title, unit
        self._clock, self._start_s = clock, clock()

    @property
    def has_counted(self) -> bool:  # type: ignore[override]
        return self.count > 0

    def line(self) -> str:
        took = duration(self._clock() - self._start_s)
        if not self.total:  # not known yet
            return f"{self._phase}: for {took}"
        when = f" in {took}" if self.count >= self.total else _left(self.left_s())
        return f"{self._phase}: {self.count / self.total:.0%}, {_of(self.count, self.total, self._unit)}{when}"

    def left_s(self) -> float | None:
        """Return the seconds until all items are done, at the speed so far."""
        seconds = self._clock() - self._start_s
        return seconds * (self.total - self.count) / self.count if self.count else None

    def bars(self) -> list[Bar]:
        title = self._phase if self.total else self.line()
        return [Bar(title, self.count, self.total, self._unit, _left(self.left_s()).removeprefix(", "))]

    def figures(self) -> dict[str, Any]:
        counts = {"done": self.count, "total": self.total, "unit": self._unit}
        return {"phase": self._phase, **counts, "left_s": self.left_s()}

    def __exit__(self, *error: Any) -> None:
        self.tell()
        super().__exit__(*error)


class Stage(Meter):
    """An activity in which nothing is counted: `planning: ordering the requests`."""

    def __init__(self, phase: str, doing: str) -> None:
        self._phase, self._doing, self._start_s = phase, doing, time.monotonic()

    def line(self) -> str:
        return f"{self._phase}: {self._doing}, for {duration(time.monotonic() - self._start_s)}"

    def bars(self) -> list[Bar]:
        return [Bar(self.line())]

    def figures(self) -> dict[str, Any]:
        return {"phase": self._phase, "doing": self._doing}


class ChildProgress(Meter):
    """The progress of a child process, taken from its lines; shown on a terminal only."""

    def __init__(self) -> None:
        self._said, self._start_s = "starting", time.monotonic()

    def read_line(self, line: str) -> str:
        """Take the progress from a line of the child; return the line."""
        if line.startswith(LINE_STARTS):
            self._said = line.rstrip()
        return line

    def line(self) -> str:
        return ""

    def bars(self) -> list[Bar]:
        return [Bar(f"for {duration(time.monotonic() - self._start_s)}; {self._said}")]


class Board:
    """The meters of a process, drawn by a thread that runs while there are any.

    Args:
        wait: until an event, as Event.wait.
    """

    def __init__(self, wait: Callable[[threading.Event, float], bool] = threading.Event.wait) -> None:
        self.meters: list[Meter] = []
        self._wait = wait
        self._lock = threading.Lock()
        self._bars: list[tqdm[Any]] = []
        self._changed = threading.Event()  # set when the last meter ends
        self._has_spoken = False

    def add(self, meter: Meter) -> None:
        with self._lock:
            self.meters.append(meter)
            if len(self.meters) == 1:
                self._changed = threading.Event()
                threading.Thread(target=self._draw, args=(self._changed,), name="progress", daemon=True).start()

    def remove(self, meter: Meter) -> None:
        with self._lock:
            self._draw_bars()  # the meter's final state
            self.meters.remove(meter)
            if not self.meters:
                self._changed.set()
            self._draw_bars()
        if meter.has_counted:
            note(meter.line())

    def _draw(self, ended: threading.Event) -> None:
        is_terminal = _is_terminal()
        wait_s = BAR_S if is_terminal else LINE_S if self._has_spoken else FIRST_S
        while not self._wait(ended, wait_s):
            with self._lock:
                if is_terminal:
                    self._draw_bars()
                    continue
                line = "; ".join(meter.line() for meter in self.meters)
            wait_s, self._has_spoken = LINE_S, True
            if line:
                note(line)

    def _draw_bars(self) -> None:
        """Show the current meters on the terminal; called with the lock held."""
        if not _is_terminal():
            return
        wanted = [bar for meter in self.meters for bar in meter.bars()][:MOST_BARS]
        while len(self._bars) > len(wanted):
            self._bars.pop().close()
        for place, bar in enumerate(wanted):
            if place == len(self._bars):
                self._bars.append(_new_bar(place, bar.title))
            _draw_bar(self._bars[place], bar)


class _OwnBar(tqdm):
    """A bar with a lock of this process.

    tqdm's own lock is a semaphore for several processes, of which Python 3.14 warns at exit.
    """

    _lock = threading.RLock()


def _new_bar(place: int, title: str) -> tqdm[Any]:
    return _OwnBar(file=sys.stderr, position=place, leave=False, dynamic_ncols=True, bar_format="{desc}", desc=title)


def _draw_bar(shown: tqdm[Any], bar: Bar) -> None:
    shown.bar_format = BAR_FORMAT if bar.total else "{desc}"  # the description alone
    shown.unit, shown.unit_scale = bar.unit, bar.unit == "B"
    shown.n, shown.total = bar.done, bar.total or None
    shown.set_description_str(bar.title, refresh=False)
    shown.set_postfix_str(bar.detail, refresh=False)
    shown.refresh()


_board = Board()


def current_figures() -> list[dict[str, Any]]:
    """Return the figures of all meters of this process."""
    return [meter.figures() for meter in list(_board.meters)]


def _is_terminal() -> bool:
    """Return whether stderr is a terminal with room for a bar; some terminals in containers report no columns."""
    with suppress(OSError, ValueError):
        return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    return False


def _of(done: int, total: int, unit: str) -> str:
    """Return a count as text: `1,200 of 3,000 rows`, `5.62GB of 14.2GB`."""
    if unit == "B":
        return f"{tqdm.format_sizeof(done, 'B')} of {tqdm.format_sizeof(total, 'B')}"
    return f"{done:,} of {total:,} {unit}"


def duration(seconds: float) -> str:
    """Return seconds as text in the unit that a person would use."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f", {duration(seconds)} left"


def note(text: str) -> None:
    """Print a line of information or a warning to stderr without breaking a running bar."""
    _OwnBar.write(sanitize(text), file=sys.stderr)
