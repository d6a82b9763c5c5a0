"""When deaths of ranks end a run: before they had anything to do, and in silence. No ranks, no waiting."""

from __future__ import annotations

import pytest

from batchinfer.config import SamplingConfig
from batchinfer.controller import rank_failures
from batchinfer.controller.dealer import Dealer
from batchinfer.controller.rank_failures import EXPLAINED_STARTS, GRACE_S, KILLED_STARTS, RankFailures, RanksFailError
from batchinfer.launch.dead_ranks import RanksDiedError
from batchinfer.records import Request, RequestKey


class Clock:
    now_s = 0.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(rank_failures, "time", Clock())
    return rank_failures.time


def dealer():
    made = Dealer([0])
    made.add_unit(0, [Request(RequestKey(0, 0, 0), 0, [1, 2], SamplingConfig(max_tokens=4).to_sampling(), 0)])
    return made


@pytest.mark.parametrize(("has_reason", "limit"), [(True, EXPLAINED_STARTS), (False, KILLED_STARTS)])
def test_ranks_that_never_begin_end_the_run(clock, has_reason, limit):
    counting, death = RankFailures(dealer(), 10.0), RanksDiedError("rank 0 ended", has_reason=has_reason)
    for _ in range(limit - 1):
        assert counting.ranks_died(death) is None
    with pytest.raises(RanksFailError, match=f"ended {limit} times in a row .* rank 0 ended"):
        counting.ranks_died(death)


def test_a_step_that_went_well_makes_the_count_begin_anew(clock):
    counting, death = RankFailures(dealer(), 10.0), RanksDiedError("rank 0 ended", has_reason=True)
    for _ in range(5):
        for _ in range(EXPLAINED_STARTS - 1):
            assert counting.ranks_died(death) is None
        counting.step_ended()


def test_only_silence_while_something_runs_counts(clock):
    dealing = dealer()
    counting = RankFailures(dealing, 10.0)
    clock.now_s = 100.0
    assert counting.silence(has_heard=False) is None  # nothing runs
    dealing.take(0, 1)
    clock.now_s += 10.0 + GRACE_S
    assert counting.silence(has_heard=False) is None  # not too long yet
    clock.now_s += 1.0
    assert counting.silence(has_heard=False) == "no rank has ended a step for 13 s"
    assert counting.silence(has_heard=True) is None
    assert counting.silence(has_heard=False) is None
