"""Spans of a rank: the part of its communication that was hidden behind computing."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.parallel import spans as spans_module
from batchinfer.parallel.spans import MicroBatchSpans, SpanLog
from batchinfer.records import COMPUTE, FLIGHT, RECEIVE, SEND, WAIT, Span

repeatable = settings(derandomize=True, deadline=None, max_examples=300)


def log_of(*spans: tuple[str, float, float]) -> SpanLog:
    return SpanLog([Span(kind, "", 0, start_s, end_s) for kind, start_s, end_s in spans])


# --- how much is hidden -----------------------------------------------------------------------------------------------


def test_worked_example():
    #            0    1    2    3    4    5    6    7    8    9
    # computing  |ATTN(1)  |send|ATTN(0)  |send|rec.|MLP(1)  |
    # flights                   |DISPATCH(1)····|            |
    #                                          |DISPATCH(0)··|     (the second cannot begin before the first has ended)
    log = log_of(
        (COMPUTE, 0, 2),
        (SEND, 2, 3),
        (COMPUTE, 3, 5),
        (SEND, 5, 6),
        (RECEIVE, 6, 7),
        (FLIGHT, 3, 6.5),
        (FLIGHT, 6.5, 9),
        (COMPUTE, 7, 9),
    )
    assert log.communication_s() == 9 - 2  # from the first send to the end
    assert log.hidden_communication_s() == (5 - 3) + (9 - 7)


def test_nothing_to_hide_and_nothing_to_hide_behind():
    assert (SpanLog().communication_s(), SpanLog().hidden_communication_s()) == (0, 0)
    computing = log_of((COMPUTE, 0, 5))
    assert (computing.communication_s(), computing.hidden_communication_s()) == (0, 0)
    waiting = log_of((SEND, 0, 1), (FLIGHT, 1, 3), (RECEIVE, 1, 4))
    assert (waiting.communication_s(), waiting.hidden_communication_s()) == (4, 0)


def test_flights_beside_one_another_count_once():
    log = log_of((FLIGHT, 0, 4), (FLIGHT, 1, 3), (FLIGHT, 3, 6), (COMPUTE, 2, 5), (COMPUTE, 4, 7))
    assert log.communication_s() == 6
    assert log.hidden_communication_s() == 4


def test_one_flight_over_many_computations_and_many_flights_under_one():
    across = log_of((FLIGHT, 0, 10), (COMPUTE, 1, 2), (COMPUTE, 4, 6), (COMPUTE, 9, 12))
    assert across.hidden_communication_s() == 1 + 2 + 1
    under = log_of((COMPUTE, 0, 10), (FLIGHT, 1, 2), (FLIGHT, 4, 6), (FLIGHT, 9, 12))
    assert under.hidden_communication_s() == 1 + 2 + 1


def test_what_could_be_hidden_is_waited_for_and_no_longer_than_computing():
    # 3 s moving after 1 s of waiting for the other rank; computing for 1 s of these and for 6 s before
    step = log_of((COMPUTE, 0, 6), (SEND, 6, 7), (WAIT, 7, 8), (FLIGHT, 8, 11), (COMPUTE, 8, 9), (RECEIVE, 10, 11))
    assert step.hideable_s() == 1 + 2
    short = log_of((COMPUTE, 0, 0.5), (FLIGHT, 1, 3))
    assert short.hideable_s() == 0.5


def test_what_does_not_move_by_itself_cannot_be_hidden():
    assert log_of((COMPUTE, 0, 6), (WAIT, 7, 8), (FLIGHT, 8, 8), (RECEIVE, 7, 9)).hideable_s() == 0
    unknown = log_of((COMPUTE, 0, 6), (FLIGHT, 8, 9))
    unknown.knows_waiting = False
    assert unknown.hideable_s() is None


def test_sending_and_receiving_are_never_hidden():
    # as if a computation of the other micro-batch were measured at the same time
    log = log_of((SEND, 0, 2), (RECEIVE, 3, 4), (COMPUTE, 0, 4))
    assert log.communication_s() == 3
    assert log.hidden_communication_s() == 0


def test_waiting_for_a_late_rank_is_not_hidden_and_not_exposed_while_the_rank_computes():
    # sent at 1, the other rank sends at 6, the rows are here at 8; computing until 5 and from 7 to 9
    log = log_of((SEND, 0, 1), (WAIT, 1, 6), (FLIGHT, 6, 8), (COMPUTE, 1, 5), (COMPUTE, 7, 9), (RECEIVE, 9, 10))
    assert log.communication_s() == 8 + 1
    assert log.waiting_s() == 5
    assert log.hidden_communication_s() == 1
    assert log.exposed_communication_s() == 1 + (7 - 5) + 1


def test_while_rows_of_the_other_micro_batch_move_a_rank_does_not_wait():
    log = log_of((WAIT, 0, 10), (SEND, 2, 3), (FLIGHT, 5, 7))
    log.unpacking.append(Span(RECEIVE, "", 0, 7, 8))
    assert log.waiting_s() == 10 - 1 - 2 - 1


def covered_ticks(log: SpanLog, wanted) -> set[int]:
    return {tick for span in log.spans if wanted(span.kind) for tick in range(int(span.start_s), int(span.end_s))}


spans_of_any_kind = st.builds(
    lambda kind, start, ticks: (kind, float(start), float(start + ticks)),
    st.sampled_from([COMPUTE, SEND, RECEIVE, FLIGHT, WAIT]),
    st.integers(0, 60),
    st.integers(0, 15),
)


@repeatable
@given(st.lists(spans_of_any_kind, max_size=25))
def test_both_figures_equal_a_count_of_ticks_and_the_hidden_part_is_the_smaller(spans):
    log = log_of(*spans)
    communication = covered_ticks(log, lambda kind: kind != COMPUTE)
    flights = covered_ticks(log, lambda kind: kind == FLIGHT)
    computing = covered_ticks(log, lambda kind: kind == COMPUTE)
    assert log.communication_s() == len(communication)
    assert log.hidden_communication_s() == len(flights & computing)
    waiting = covered_ticks(log, lambda kind: kind == WAIT) - covered_ticks(log, lambda kind: kind in (SEND, FLIGHT))
    assert log.waiting_s() == len(waiting)
    assert log.hidden_communication_s() + log.waiting_s() <= log.communication_s()
    under_way = covered_ticks(log, lambda kind: kind in (FLIGHT, WAIT))
    assert log.exposed_communication_s() == len(communication) - len(under_way & computing)
    random.Random(0).shuffle(log.spans)
    assert log.communication_s() == len(communication)
    assert log.hidden_communication_s() == len(flights & computing)


# --- how spans are written --------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self):
        self.now_s = 100.0

    def unix_s(self):
        return self.now_s


class Rows:
    """Rows under way that arrive at `arrived_s`, at which the clock stands after `wait`.

    known: whether the rows report their times.
    ready_s: time at which the other ranks had sent them; 0.0: long ago.
    """

    def __init__(self, clock, arrived_s, known=True, ready_s=0.0):
        self.arrived_s, self.ready_s = (arrived_s, ready_s) if known else (None, None)
        self._clock, self._here_s = clock, arrived_s

    def wait(self):
        self._clock.now_s = max(self._clock.now_s, self._here_s)
        return "rows"


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(spans_module, "unix_s", clock.unix_s)
    return clock


def spend(clock, seconds, context):
    with context:
        clock.now_s += seconds


def flights_of(log):
    return [(span.name, span.micro_batch, span.start_s, span.end_s) for span in log.spans if span.kind == FLIGHT]


def test_a_flight_that_ended_before_anybody_looked_ends_when_the_rows_were_here(clock):
    # send 100-101, the rows are here at 103, computing until 109, then the rank looks
    spans = MicroBatchSpans(SpanLog(), 1)
    spend(clock, 1, spans.send("DISPATCH"))
    spend(clock, 8, spans.compute("ATTN"))
    assert spans.receive("DISPATCH", Rows(clock, 103.0)) == "rows"
    assert flights_of(spans.log) == [("DISPATCH", 1, 101, 103)]
    assert spans.log.spans[-1] == Span(RECEIVE, "DISPATCH", 1, 109, 109)
    assert spans.log.communication_s() == 1 + 2
    assert spans.log.hidden_communication_s() == 2


def test_a_flight_that_is_waited_for_is_hidden_only_as_far_as_the_rank_computed(clock):
    # send 100-101, computing until 104, the rows are here at 109
    spans = MicroBatchSpans(SpanLog())
    spend(clock, 1, spans.send("DISPATCH"))
    spend(clock, 3, spans.compute("ATTN"))
    spans.receive("DISPATCH", Rows(clock, 109.0))
    assert flights_of(spans.log) == [("DISPATCH", 0, 101, 109)]
    assert spans.log.spans[-1] == Span(RECEIVE, "DISPATCH", 0, 104, 109)
    assert spans.log.communication_s() == 9
    assert spans.log.hidden_communication_s() == 3


def test_until_the_other_rank_has_sent_nothing_moves(clock):
    # send 100-101, the other rank sends at 105, computing until 107, the rows are here at 109, unpacking takes no time
    spans = MicroBatchSpans(SpanLog())
    spend(clock, 1, spans.send("DISPATCH"))
    spend(clock, 6, spans.compute("ATTN"))
    spans.receive("DISPATCH", Rows(clock, 109.0, ready_s=105.0))
    assert Span(WAIT, "DISPATCH", 0, 101, 105) in spans.log.spans
    assert flights_of(spans.log) == [("DISPATCH", 0, 105, 109)]
    log = spans.log
    assert (log.communication_s(), log.waiting_s(), log.hidden_communication_s()) == (9, 4, 2)


@pytest.mark.parametrize("late_s", [0.0, 3.0, 30.0])
def test_a_late_rank_makes_waiting_longer_and_hidden_communication_not(clock, late_s):
    # rows take 2 s from when the other rank has sent; this rank computes until they are long here
    spans = MicroBatchSpans(SpanLog())
    spend(clock, 1, spans.send("DISPATCH"))
    spend(clock, 60, spans.compute("ATTN"))
    spans.receive("DISPATCH", Rows(clock, 103.0 + late_s, ready_s=101.0 + late_s))
    log = spans.log
    assert (log.waiting_s(), log.hidden_communication_s()) == (late_s, 2)
    assert log.communication_s() - log.waiting_s() == 3


def test_unpacking_is_no_waiting_even_while_the_other_micro_batch_waits(clock):
    log = SpanLog()
    first, second = MicroBatchSpans(log, 0), MicroBatchSpans(log, 1)
    spend(clock, 1, first.send("DISPATCH"))
    spend(clock, 1, second.send("DISPATCH"))
    rows = Rows(clock, 104.0, ready_s=104.0)
    plain = rows.wait
    rows.wait = lambda: (plain(), spend(clock, 5, nullcontext()))[0]  # then 5 s of unpacking
    first.receive("DISPATCH", rows)
    second.receive("DISPATCH", Rows(clock, 110.0, ready_s=110.0))
    # 101-102 it packs, 104-109 it unpacks
    assert log.waiting_s() == (104 - 102) + (110 - 109)


def test_flights_of_two_micro_batches_lie_behind_one_another(clock):
    # 0 sends at 100-101, 1 at 101-102; rows are here at 105 and 107: the second flight begins where the first ended
    log = SpanLog()
    first, second = MicroBatchSpans(log, 0), MicroBatchSpans(log, 1)
    spend(clock, 1, first.send("DISPATCH"))
    spend(clock, 1, second.send("DISPATCH"))
    spend(clock, 1, first.compute("MLP"))
    first.receive("DISPATCH", Rows(clock, 105.0))
    spend(clock, 4, first.compute("MLP"))
    second.receive("DISPATCH", Rows(clock, 107.0))
    assert flights_of(log) == [("DISPATCH", 0, 101, 105), ("DISPATCH", 1, 105, 107)]
    assert log.communication_s() == 7
    assert log.hidden_communication_s() == (103 - 102) + (107 - 105)


def test_a_flight_that_was_over_before_the_one_ahead_of_it_has_no_length(clock):
    log = SpanLog()
    first, second = MicroBatchSpans(log, 0), MicroBatchSpans(log, 1)
    spend(clock, 1, first.send("DISPATCH"))
    spend(clock, 1, second.send("COMBINE"))
    first.receive("DISPATCH", Rows(clock, 106.0))
    second.receive("COMBINE", Rows(clock, 104.0))
    assert flights_of(log) == [("DISPATCH", 0, 101, 106), ("COMBINE", 1, 106, 106)]


def test_where_arrival_is_unknown_a_flight_ends_with_the_waiting(clock):
    spans = MicroBatchSpans(SpanLog())
    spend(clock, 1, spans.send("COMBINE"))
    spend(clock, 2, spans.compute("SHARED"))
    spans.receive("COMBINE", Rows(clock, 104.0, known=False))
    assert flights_of(spans.log) == [("COMBINE", 0, 101, 104)]
    assert (spans.log.waiting_s(), spans.log.hidden_communication_s()) == (None, None), "not told apart"
    assert (spans.log.communication_s(), spans.log.exposed_communication_s()) == (4, 2)


def test_another_host_s_clock_moves_no_flight_out_of_its_place(clock):
    # the sender's clock is wrong: arrival before this rank sent, and after it had the rows
    for claimed_s in (1.0, 1000.0):
        spans = MicroBatchSpans(SpanLog())
        spend(clock, 1, spans.send("COMBINE"))
        sent_s = clock.now_s
        rows = Rows(clock, sent_s + 2)
        rows.arrived_s = rows.ready_s = claimed_s
        spans.receive("COMBINE", rows)
        ((_, _, start_s, end_s),) = flights_of(spans.log)
        assert sent_s <= start_s <= end_s <= clock.now_s


def test_a_flight_begins_with_the_latest_send_of_its_own_name_and_micro_batch(clock):
    log = SpanLog()
    first, second = MicroBatchSpans(log, 0), MicroBatchSpans(log, 1)
    for micro_batch, name in ((first, "DISPATCH"), (first, "DISPATCH"), (second, "DISPATCH"), (first, "COMBINE")):
        spend(clock, 1, micro_batch.send(name))
    first.receive("DISPATCH", Rows(clock, 110.0))
    assert flights_of(log) == [("DISPATCH", 0, 102, 110)]
