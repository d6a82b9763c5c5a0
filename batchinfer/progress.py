"""Progress on stderr: at most two bars on a terminal, plain lines elsewhere; and calls of listeners in this process.

The current activities of a process are a list of meters: planning and loading at once, then the work, then finish. One
line shows them all; it comes after FIRST_S and then every LINE_S, even if nothing can be counted. A meter that has
counted something ends with one more line. With --quiet only warnings are written, with --verbose there are more lines.
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
from typing import Any, Self, TextIO

from tqdm import tqdm
from tqdm.std import Bar as Blocks

from batchinfer.sanitize import fit, sanitize
from batchinfer.verbosity import is_quiet, is_verbose

FIRST_S = 1.0  # until the first plain line
LINE_S = 30.0  # between plain lines
VERBOSE_LINE_S = 5.0  # the same with --verbose
BAR_S = 0.2  # between two updates of a terminal
TOLD_S = 0.1  # between two calls of a listener
MOST_BARS = 2
BLOCKS = (30, 20, 10)  # columns of a bar's blocks; few widths, so that the bar stays still while numbers grow
# starts of a job's progress lines, for programs that look for them in stderr
LINE_STARTS = ("planning: ", "loading: ", "to come: ", "waiting: ", "computing: ", "finish: ")
BOLD, RED, GREEN, YELLOW = "1", "1;31", "32", "33"  # of escape codes
COLOURED_STARTS = {"warning:": YELLOW, "error:": RED}

Listener = Callable[[str, int, int], None]  # called with the title, the number done, and the total
_listeners: list[Listener] = []  # of this process


def add_listener(listener: Listener) -> None:
    """Call the listener with all further progress of this process."""
    _listeners.append(listener)


@dataclass(frozen=True, slots=True)
class Bar:
    """A terminal's line of a meter; total 0: nothing can be counted. unit: "B" is written as kB, MB, GB.

    A narrow terminal shows the first of title, share, time left, count, details and blocks.
    """

    title: str
    done: int = 0
    total: int = 0
    unit: str = ""
    left: str = ""
    details: tuple[str, ...] = ()

    def text(self, columns: int, *, blocks: str = Blocks.UTF, in_colour: bool = False) -> str:
        """Return the line, at most `columns` wide.

        Args:
            blocks: the characters of the bar, from empty to full.
            in_colour: whether to add escape codes, which take no columns.
        """
        if columns <= 0:
            return ""
        if not self.total:
            return fit(self.title, columns)
        share = min(max(self.done / self.total, 0.0), 1.0)
        head = f"{self.title}: {share:4.0%}"
        room = columns - len(head) - len(" ")
        end = [self.left] if self.left else []
        long, short = (_of(self.done, self.total, self.unit, short=is_short) for is_short in (False, True))
        lists = ([long, *self.details[:number]] for number in range(len(self.details), -1, -1))
        forms = [", ".join([*parts, *end]) for parts in (*lists, [short], [])]
        after = next((form for form in forms if len(form) <= room), None)
        if after is None:
            return fit(head, columns)
        num_blocks = next((number for number in BLOCKS if number <= room - len(after) - len("||")), None)
        if num_blocks is None:
            return f"{_styled(head, BOLD) if in_colour else head} {after}".rstrip()
        bar = f"{Blocks(share, num_blocks, charset=blocks)}"
        if in_colour:
            head, bar = _styled(head, BOLD), _styled(bar, GREEN)
        return f"{head}|{bar}| {after}".rstrip()


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
    """A count of finished items out of a total, reported to listeners. `advance` is cheap enough to call per step.

    Args:
        done: items that this command finished before the count began.
        earlier: items that earlier commands finished.
    """

    def __init__(self, title: str, total: int, *, done: int = 0, earlier: int = 0) -> None:
        self.title, self.total, self.count, self.earlier = title, total, done + earlier, earlier
        self._told = -TOLD_S
        self.tell()

    def advance(self, count: int) -> None:
        """Add finished items."""
        self.set(self.count + count, self.total)

    def set(self, count: int, total: int) -> None:
        """Set the number of finished items and the total."""
        self.count, self.total = count, total
        if self.is_due:
            self.tell()

    @property
    def is_due(self) -> bool:
        """Whether the next `set` calls the listeners."""
        return time.monotonic() - self._told >= TOLD_S

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
        is_terminal = terminal_columns() > 0
        line_s = VERBOSE_LINE_S if is_verbose() else LINE_S
        wait_s = BAR_S if is_terminal else line_s if self._has_spoken else FIRST_S
        while not self._wait(ended, wait_s):
            with self._lock:
                if is_terminal:
                    self._draw_bars()
                    continue
                line = "; ".join(meter.line() for meter in self.meters)
            wait_s, self._has_spoken = line_s, True
            if line:
                note(line)

    def _draw_bars(self) -> None:
        """Show the current meters on the terminal; called with the lock held."""
        columns = terminal_columns()
        if columns <= 0 or is_quiet():
            return
        wanted = [bar for meter in self.meters for bar in meter.bars()][:MOST_BARS]
        while len(self._bars) > len(wanted):
            self._bars.pop().close()
        for place, bar in enumerate(wanted):
            if place == len(self._bars):
                self._bars.append(_new_bar(place))
            # the last column stays free: some terminals begin a new line when a character is in it
            _draw_bar(self._bars[place], bar, columns - 1)


class _OwnBar(tqdm):
    """A bar with a lock of this process.

    tqdm's own lock is a semaphore for several processes, of which Python 3.14 warns at exit.
    """

    _lock = threading.RLock()


def _new_bar(place: int) -> tqdm[Any]:
    return _OwnBar(file=sys.stderr, position=place, leave=False, bar_format="{desc}")


def _draw_bar(shown: tqdm[Any], bar: Bar, columns: int) -> None:
    is_unicode = "utf" in (getattr(sys.stderr, "encoding", None) or "").lower()
    blocks = Blocks.UTF if is_unicode else Blocks.ASCII
    shown.set_description_str(bar.text(columns, blocks=blocks, in_colour=has_colour(sys.stderr)))


_board = Board()


def current_figures() -> list[dict[str, Any]]:
    """Return the figures of all meters of this process."""
    return [meter.figures() for meter in list(_board.meters)]


def terminal_columns() -> int:
    """Return the width of stderr if it is a terminal, else 0; some terminals in containers report no columns."""
    with suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno()).columns if sys.stderr.isatty() else 0
    return 0


def has_colour(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that shows colours to a user who wants them (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _styled(text: str, style: str) -> str:
    return f"\033[{style}m{text}\033[0m"


def coloured(text: str) -> str:
    """Return a warning or an error for stderr, with a coloured first word if stderr shows colours."""
    for start, style in COLOURED_STARTS.items():
        if text.startswith(start) and has_colour(sys.stderr):
            return f"{_styled(start, style)}{text.removeprefix(start)}"
    return text


def _of(done: int, total: int, unit: str, *, short: bool = False) -> str:
    """Return a count as text: `1,200 of 3,000 rows`, `5.62GB of 14.2GB`; short: `1,200/3,000`."""
    if unit == "B":
        texts = (tqdm.format_sizeof(done, "B"), tqdm.format_sizeof(total, "B"))
        return "/".join(texts) if short else " of ".join(texts)
    return f"{done:,}/{total:,}" if short else f"{done:,} of {total:,} {unit}"


def duration(seconds: float) -> str:
    """Return seconds as text in the unit that a person would use."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f", {duration(seconds)} left"


def note(text: str) -> None:
    """Print a line of information or a warning to stderr without breaking a running bar; with --quiet warnings only."""
    if not is_quiet() or text.startswith(tuple(COLOURED_STARTS)):
        _OwnBar.write(coloured(sanitize(text)), file=sys.stderr)
