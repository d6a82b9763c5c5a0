"""The loop of a controller, with parts that only say what they were asked."""

from __future__ import annotations

from types import SimpleNamespace

from batchinfer.balance.decode_loads import DecodeLoads
from batchinfer.balance.output_lengths import OutputLengths
from batchinfer.balance.request_load import RequestLoad
from batchinfer.controller.controller import Controller
from batchinfer.controller.reports import Reports
from batchinfer.launch.dead_ranks import RanksDiedError
from batchinfer.protocol.messages import Steps
from batchinfer.records import Completion, RequestKey
from batchinfer.run.trace import Tracer
from batchinfer.stop_signals import StopSignal


def test_a_unit_that_is_complete_when_the_ranks_die_is_done_without_new_ranks():
    """Its requests are finished, so that no later report would have it committed."""
    state = SimpleNamespace(is_complete=False, is_done=False, starts=0)

    def start_ranks():
        state.starts += 1
        assert state.starts == 1, "there is nothing for new ranks to do"

    def take_steps(rank, reports):
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
        reports=SimpleNamespace(take_steps=take_steps, commit=commit, ranks_died=nothing),
        deaths=deaths,
    )
    controller.run()
    assert state.is_done


def test_complete_units_are_committed_now_and_then_and_the_last_one_at_once(monkeypatch):
    clock, committed_s = SimpleNamespace(now_s=100.0), []
    monkeypatch.setattr("batchinfer.controller.reports.time", SimpleNamespace(monotonic=lambda: clock.now_s))
    results = SimpleNamespace(last_commit_s=clock.now_s, add=lambda completions: True)

    def commit():
        committed_s.append(clock.now_s)
        results.last_commit_s = clock.now_s

    results.commit = commit
    nothing = SimpleNamespace(write=lambda: None, committed=lambda: None, finished=lambda completions: None)
    dealer = SimpleNamespace(
        num_unfinished=1, finish=lambda *_: None, running_request=lambda key: SimpleNamespace(prompt_group=0)
    )
    loads = DecodeLoads([0], OutputLengths(), max_requests=1, request_load=RequestLoad(), move_steps=1.0)
    tracer = Tracer(enabled=False)
    reports = Reports(nothing, tracer, nothing, results, dealer, loads, OutputLengths(), nothing, nothing)
    completion = Completion(RequestKey(0, 0, 0), 0, "", [], "stop", None, 1, 0, 0, 0)
    for clock.now_s, dealer.num_unfinished in ((100.5, 9), (100.9, 5), (101.1, 4), (101.2, 0)):
        reports.give_up(completion)
        reports.commit(after_s=30.0)
    assert committed_s == [101.1, 101.2]
    clock.now_s = 130.0
    reports.commit(after_s=30.0)  # no unit is complete
    assert len(committed_s) == 2
