"""The signals that stop a command: SIGINT, SIGTERM, SIGUSR1, and SIGHUP, which the end of its terminal sends.

Ranks leave them to their controller.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from batchinfer.records import InterruptedRunError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class StopSignal:
    """One wish to stop, whichever signal brings it.

    While `graceful` is off (planning, loading, finishing: every file is published whole, so stopping anywhere is safe)
    a signal raises InterruptedRunError at once. While it is on (the step loop) the first signal only sets `requested`.
    Further signals change nothing, since a cluster sends several for one wish to stop; but a second Ctrl-C is that of a
    person and raises at once.

    Attributes:
        raised: what was, if anything; libraries that call back while they work make errors of their own of it.
    """

    def __init__(self) -> None:
        self.requested = False
        self.raised: InterruptedRunError | None = None
        self.graceful = False
        self._held: list[int] | None = None
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._handle)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Signals that come meanwhile come at the end: C++ that an error reaches from Python would end the process."""
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


@contextmanager
def signals_wait() -> Iterator[None]:
    """Signals that come meanwhile come at the end; to a process started meanwhile, when it is ready for them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """Ignore what stops a job: in a rank, whose controller gets it, too, and where nothing is left to be stopped."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # see signals_wait
