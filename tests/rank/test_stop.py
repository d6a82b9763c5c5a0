"""Signals: one wish to stop, however many signals a cluster sends for it."""

from __future__ import annotations

import signal
import weakref

import pytest

from batchinfer.records import InterruptedRunError
from batchinfer.stop_signals import StopSignal

# These tests send signals to their own process, which must not end pytest.
pytestmark = pytest.mark.usefixtures("own_interrupts")

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@pytest.fixture
def stop():
    # nohup, which may have started the tests, has SIGHUP ignored
    before = {number: signal.signal(number, signal.SIG_DFL) for number in NUMBERS}
    yield StopSignal()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_raises_at_once_unless_somebody_looks_for_it(stop, number):
    stop.graceful = True
    signal.raise_signal(number)
    assert stop.requested
    another = StopSignal()
    with pytest.raises(InterruptedRunError, match=number.name):
        signal.raise_signal(number)
    assert another.requested


@pytest.mark.parametrize("graceful", [False, True])
def test_further_signals_of_a_cluster_change_nothing(stop, graceful):
    stop.graceful = True
    signal.raise_signal(signal.SIGUSR1)
    stop.graceful = graceful
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
        signal.raise_signal(number)
    assert stop.requested


def test_a_second_ctrl_c_raises_at_once(stop):
    stop.graceful = True
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(InterruptedRunError):
        signal.raise_signal(signal.SIGINT)


def test_the_end_of_a_terminal_stops_nothing_under_nohup():
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in NUMBERS}
    StopSignal()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_an_error_that_c_code_discarded_is_raised_again_by_the_check(stop, recwarn):
    """An error in a weak reference's callback is discarded, as Cython discards those of its callbacks."""

    class Thing:
        pass

    stop.check()
    thing = Thing()
    watched = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
    del thing
    assert watched() is None
    with pytest.raises(InterruptedRunError, match="SIGINT"):
        stop.check()
