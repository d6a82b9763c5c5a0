"""The signals that stop a command: SIGINT, SIGTERM, SIGUSR1, and SIGHUP, sent when its terminal closes.

Ranks ignore them; their controller handles them.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from batchinfer.records import ExitCode, InterruptedRunError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class StopSignal:
    """A request to stop, by any of the signals.

    While `graceful` is off (planning, loading, finishing: every file is published whole, so stopping anywhere is safe)
    a signal raises InterruptedRunError at once. While it is on (the step loop) the first signal only sets `requested`.
    Further signals change nothing, since a cluster sends several to stop a job once. A second Ctrl-C comes from a
    person and raises at once.

    Attributes:
        raised: the raised error, if any; libraries that call back may turn it into errors of their own.
    """

    def __init__(self) -> None:
        self.requested = False
        self.raised: InterruptedRunError | None = None
        self.graceful = False
        self._held: list[int] | None = None
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._handle)

    def check(self) -> None:
        """Raise the error again if the command goes on after it: C code that calls Python back may discard errors."""
        if self.raised is not None:
            raise self.raised

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay signals until the end of the block: an error raised from Python into C++ would end the process."""
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
            for number in held:
                self._handle(number, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._held is not None:
            self._held.append(number)
            return
        again = self.requested
        self.requested = True
        if again and number != signal.SIGINT:
            return
        if not self.graceful or again:
            name = signal.Signals(number).name
            self.raised = InterruptedRunError(f"stopped by {name}; run the same command to go on")
            raise self.raised


def exit_when_interrupted() -> None:
    """End the process at the next SIGINT with a sentence on stderr: for imports before there is a StopSignal."""

    def handle(number: int, frame: FrameType | None) -> None:
        os.write(2, b"stopped by SIGINT; run the same command to go on\n")
        os._exit(ExitCode.INTERRUPTED)

    signal.signal(signal.SIGINT, handle)


@contextmanager
def signals_held() -> Iterator[None]:
    """Delay signals until the end of the block; a process started inside gets them once it is ready."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """Ignore stop signals: in a rank, whose controller gets them, too, and at the end of a command."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # blocked if started inside signals_held
