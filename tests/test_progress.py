"""Progress for users: at most two bars on a terminal, else a line with the same figures every 30 s."""

import fcntl
import os
import queue
import re
import struct
import subprocess
import sys
import termios
import threading

import pytest

from batchinfer.config import ClusterConfig
from batchinfer.controller.work_progress import WorkProgress
from batchinfer.progress import (
    FIRST_S,
    LINE_S,
    VERBOSE_LINE_S,
    Bar,
    Board,
    ChildProgress,
    Progress,
    Stage,
    note,
)
from batchinfer.protocol.messages import StepRecord
from batchinfer.verbosity import Verbosity, set_verbosity

ROWS = [{"unit": 0, "num_requests": 4, "new_tokens": 1200, "max_output_tokens": 300}]
COUNTS = {"rows": 4, "expected_output_tokens": None, "max_output_tokens": 300, "work_s": None}


class Turns:
    """A wait that ends when the test says so; the board's thread is at its next wait when `next` comes back."""

    def __init__(self):
        self._asked, self._turns = queue.Queue(), queue.Queue()

    def __call__(self, ended: threading.Event, seconds: float) -> bool:
        self._asked.put(seconds)
        while not ended.is_set():
            try:
                self._turns.get(timeout=0.01)
                return False
            except queue.Empty:
                continue
        return True

    def asked(self):
        """Return the seconds that the board waits now."""
        return self._asked.get(timeout=60)

    def next(self):
        """End the board's wait; return the seconds of its next wait."""
        self._turns.put(None)
        return self.asked()


class Terminal:
    """A real terminal as stderr, with `columns` columns."""

    def __init__(self, monkeypatch, columns):
        self._controller, self._terminal = os.openpty()
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
        os.set_blocking(self._controller, False)
        self._stderr = os.fdopen(self._terminal, "w", buffering=1)
        monkeypatch.setattr(sys, "stderr", self._stderr)

    def shown(self):
        """Return the text written since the last call."""
        text = b""
        while True:
            try:
                text += os.read(self._controller, 65536)
            except BlockingIOError:
                return text.decode()

    def close(self):
        self._stderr.close()
        os.close(self._controller)


@pytest.fixture
def terminal(monkeypatch):
    made = []

    def make(columns):
        made.append(Terminal(monkeypatch, columns))
        return made[-1]

    yield make
    for one in made:
        one.close()


def working():
    """The work on a job of which one of four rows is done; began when nobody counts, so its speed is 0."""
    meter = WorkProgress(ROWS, [0], COUNTS, ClusterConfig(), started_s=-1e15)
    numbers = dict.fromkeys(StepRecord.__struct_fields__, 0) | {"duration_s": 1.0}
    meter.step(StepRecord(**numbers | {"kind": "prefill", "new_tokens": 300, "output_tokens": 2}))
    meter.step(StepRecord(**numbers | {"kind": "decode", "new_tokens": 10, "output_tokens": 10}))
    meter.requests.advance(1)
    return meter


def loading(num_bytes=0, total=0, clock=lambda: 0.0):
    meter = Progress("load", 0, "B", phase="loading", clock=clock)
    if total:
        meter.set(num_bytes, total)
    return meter


def test_a_terminal_shows_two_bars_at_most(terminal):
    screen, turns = terminal(100), Turns()
    board = Board(turns)
    meters = [loading(3_000_000, 12_000_000), working(), Stage("planning", "ordering the requests")]
    for meter in meters:
        board.add(meter)
    turns.asked()
    turns.next()
    shown = screen.shown()
    assert "loading:  25%" in shown
    assert "1 of 4 rows" in shown
    assert "ordering" not in shown, "it would be the third"
    assert "\n\n" not in shown.replace("\r", ""), "the second bar is in the line below the first"
    board.remove(meters[0])
    turns.next()
    shown = screen.shown()
    assert re.search(r"computing:  25%.*1 of 4 rows", shown)
    assert "planning: ordering the requests" in shown
    for meter in meters[1:]:
        board.remove(meter)


def test_a_log_gets_a_line_after_a_second_and_then_every_30_s(capsys):
    turns = Turns()
    board = Board(turns)
    load, work = loading(3_000_000, 12_000_000), working()
    board.add(load)
    board.add(work)
    assert turns.asked() == FIRST_S == 1.0
    assert capsys.readouterr().err == ""
    assert turns.next() == LINE_S == 30.0
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"{load.line()}; {work.line()}", "all that goes on, in one line"
    load.set(6_000_000, 12_000_000)
    assert turns.next() == LINE_S
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("loading: 50%, 6.00MB of 12.0MB")
    board.remove(load)
    board.remove(work)
    ended = capsys.readouterr().err.splitlines()
    assert len(ended) == 2, "each ends with a line of its own"
    stage = Stage("finish", "publishing")
    board.add(stage)
    assert turns.asked() == LINE_S, "the first line comes early once only"
    board.remove(stage)


def test_a_line_says_what_the_bars_say():
    work = working()
    (bar,) = work.bars()
    assert f"{bar.done:,} of {bar.total:,} rows" in work.line()
    assert bar.details[1] in work.line()
    load = loading(3_000_000, 12_000_000)
    (bar,) = load.bars()
    assert (bar.title, bar.done, bar.total) == ("loading", 3_000_000, 12_000_000)
    assert load.line() == "loading: 25%, 3.00MB of 12.0MB, 0 s left"


LONG = Bar(
    "computing", 5_551, 15_004, "rows", "12 min left", ("4,952 tokens/s", "66,655 prompt and 30,549 output tokens")
)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (119, "5,551 of 15,004 rows, 4,952 tokens/s, 66,655 prompt and 30,549 output tokens, 12 min left"),
        (79, "5,551 of 15,004 rows, 4,952 tokens/s, 12 min left"),
        (41, "5,551/15,004, 12 min left"),
        (39, "12 min left"),
    ],
)
def test_a_narrow_terminal_keeps_the_time_left(columns, text):
    shown = LONG.text(columns)
    assert re.fullmatch(rf"computing:  37%(\|[█▏▎▍▌▋▊▉ ]+\|)? {text}", shown)
    assert len(shown) <= columns
    assert LONG.text(20) == "computing:  37%"
    assert LONG.text(9) == "computin…"


def test_colours_take_no_columns():
    text = LONG.text(79, in_colour=True)
    assert re.sub(r"\033\[[\d;]*m", "", text) == LONG.text(79) != text


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb"), (None, None)])
def test_who_wants_no_colours_gets_none(terminal, monkeypatch, variable, value):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if variable:
        monkeypatch.setenv(variable, value)
    screen = terminal(80)
    note("warning: rank 0 was killed")
    assert screen.shown().strip() == (
        "warning: rank 0 was killed" if variable else "\033[33mwarning:\033[0m rank 0 was killed"
    )


@pytest.fixture
def any_verbosity():
    """Set the verbosity back at the end."""
    yield
    set_verbosity(Verbosity.NORMAL)


def test_quiet_writes_warnings_alone(capsys, any_verbosity):
    set_verbosity(Verbosity.QUIET)
    turns = Turns()
    board = Board(turns)
    work = working()
    board.add(work)
    turns.asked()
    turns.next()
    note("experts placed")
    note("warning: rank 0 was killed")
    board.remove(work)
    assert capsys.readouterr().err == "warning: rank 0 was killed\n"


def test_verbose_writes_a_line_every_5_s(capsys, any_verbosity):
    set_verbosity(Verbosity.VERBOSE)
    turns = Turns()
    board = Board(turns)
    work = working()
    board.add(work)
    assert turns.asked() == FIRST_S
    assert turns.next() == VERBOSE_LINE_S == 5.0
    board.remove(work)


def test_another_process_hears_what_the_work_waits_for():
    """`ask` shows the latest line of the job that it started: also while its ranks start, and start again."""
    words, work = ChildProgress(), WorkProgress(ROWS, [0], COUNTS, ClusterConfig())
    words.read_line(work.line())
    assert words.bars()[0].title.endswith(work.line())
    work = working()
    words.read_line(work.line())
    work.ranks_ended()
    words.read_line(work.line())
    assert words.bars()[0].title.endswith(work.line())
    words.read_line("warning: rank 0 was killed\n")
    assert words.bars()[0].title.endswith(work.line())


def test_loading_says_how_long_it_took_and_what_is_left_by_its_clock():
    now_s = 100.0
    load = loading(clock=lambda: now_s)
    assert (load.line(), load.bars()[0].total) == ("loading: for 0 s", 0), "no rank has said yet how much there is"
    now_s = 130.0
    load.set(3_000_000, 12_000_000)
    assert load.left_s() == pytest.approx(90.0)
    assert load.line() == "loading: 25%, 3.00MB of 12.0MB, 90 s left"
    now_s = 220.0
    load.set(12_000_000, 12_000_000)
    assert load.line() == "loading: 100%, 12.0MB of 12.0MB in 2 min"


@pytest.mark.parametrize("columns", [0, 1, 2, 7, 30])
def test_a_terminal_may_have_no_columns_or_a_few(terminal, columns):
    screen, turns = terminal(columns), Turns()
    board = Board(turns)
    meters = [loading(3_000_000, 12_000_000), working()]
    for meter in meters:
        board.add(meter)
    turns.asked()
    turns.next()  # the thread that draws lives
    shown = screen.shown()
    assert ("loading: 25%, 3.00MB of 12.0MB" in shown) == (columns == 0), "plain lines where there is no room for a bar"
    for meter in meters:
        board.remove(meter)


DRAW = """
import sys
from batchinfer.progress import Bar, _draw_bar, _new_bar, note
bar = _new_bar(0)
_draw_bar(bar, Bar("planning", 1, 2), 79)
note("a line")
bar.close()
print([name for name in sys.modules if name.startswith("multiprocessing.synchronize")])
"""


def test_progress_makes_no_semaphore_that_python_would_have_to_clean_up():
    done = subprocess.run([sys.executable, "-c", DRAW], capture_output=True, text=True, check=True)
    assert "a line" in done.stderr
    assert done.stdout == "[]\n"
