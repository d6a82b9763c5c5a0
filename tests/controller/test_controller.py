"""The loop of a controller, with parts that only say what they were asked."""

from __future__ import annotations

from types import SimpleNamespace

from batchinfer.controller.controller import Controller
from batchinfer.launch.dead_ranks import RanksDiedError
from batchinfer.protocol.messages import Steps
from batchinfer.stop_signals import StopSignal


def test_a_unit_that_is_complete_when_the_ranks_die_is_done_without_new_ranks():
    """Its requests are finished, so that no later report would have it committed."""
    state = SimpleNamespace(is_complete=False, is_done=False, starts=0)

    def start_ranks():
        state.starts += 1
        assert state.starts == 1, "there is nothing for new ranks to do"

    def take_step(rank, report):
        state.is_complete = True

    def commit(**_):
        state.is_done = state.is_complete

    def deal():
        raise RanksDiedError("rank 0 was killed")

    def nothing(*_, **__):
        return None

    deaths = SimpleNamespace(step_ended=nothing, ranks_started=nothing, silence=nothing, ranks_died=nothing)
    sender = SimpleNamespace(deal=deal, place_experts=nothing, ranks_started=nothing, ranks_died=nothing)
    controller = Controller(
        stop=StopSignal(),
        commit_s=30.0,
        group=SimpleNamespace(receive=lambda: [(0, Steps([None]))], leave=list, end=nothing, is_resting=False),
        start_ranks=start_ranks,
        units=SimpleNamespace(is_done=lambda: state.is_done, num_unfinished=1, can_claim=False),
        sender=sender,
        reports=SimpleNamespace(take_step=take_step, commit=commit, ranks_died=nothing),
        deaths=deaths,
    )
    controller.run()
    assert state.is_done
