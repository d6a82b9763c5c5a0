"""The trace of a run shows what ran when: the published order of micro-batches, and how much communication hides."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

from batchinfer.rank.telemetry import TRACED_STEPS
from batchinfer.run.store.folder import FolderStorage
from batchinfer.run.trace import Tracer
from batchinfer.rundir import RunDir
from support.jobs import batchinfer, write_job, write_questions

MOE_LAYERS = 3  # of the sample model, after one dense layer
# Times are microseconds since 1970, of which a float64 holds quarters: two roundings each for start and end.
ROUNDING_US = 1.0
EXCHANGES = ("DISPATCH", "COMBINE")
WAITS = tuple(f"{name} wait" for name in EXCHANGES)
NUM_ROWS = 20


@dataclass(frozen=True)
class Event:
    """One span; times in microseconds."""

    lane: str
    name: str
    micro_batch: int | None
    start: float
    end: float

    @property
    def what(self) -> tuple[str, int | None]:
        return self.name, self.micro_batch


@dataclass(frozen=True)
class Step:
    """One step of one rank, its events in the order of their start."""

    rank: int
    kind: str
    computing: list[Event]  # sending and receiving too
    flights: list[Event]
    waits: list[Event]  # until the other rank has sent

    @property
    def in_pairs(self) -> bool:
        return any(event.micro_batch == 1 for event in self.computing)

    def order(self, *names: str) -> list[tuple[str, int | None]]:
        return [event.what for event in self.computing if event.name in names]


@dataclass(frozen=True)
class Trace:
    """A run's trace.json."""

    lanes: dict[str, list[Event]]

    @classmethod
    def read(cls, run: Path) -> Trace:
        document = json.loads((run / "trace.json").read_text())
        assert document["otherData"]["dropped_events"] == 0
        events = document["traceEvents"]
        names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
        assert len(set(names.values())) == len(names)
        lanes = defaultdict(list)
        for event in events:
            if event["ph"] == "X":
                lane, start = names[event["tid"]], event["ts"]
                micro_batch = event["args"].get("micro_batch")
                lanes[lane].append(Event(lane, event["name"], micro_batch, start, start + event["dur"]))
        # events that start together stay in the order in which they were written
        return cls({lane: sorted(found, key=lambda event: event.start) for lane, found in lanes.items()})

    @property
    def ranks(self) -> list[int]:
        return sorted(int(lane.split()[1]) for lane in self.lanes if lane.endswith(" steps"))

    def steps(self, kind: str) -> list[Step]:
        """The steps of one kind, of all ranks, that were traced in detail."""
        return [step for rank in self.ranks for step in self.steps_of(rank) if step.kind == kind and step.computing]

    def steps_of(self, rank: int) -> list[Step]:
        def within(lane: str, step: Event) -> list[Event]:
            found = self.lanes.get(f"rank {rank} {lane}", [])
            return [event for event in found if step.start - ROUNDING_US <= event.start < step.end]

        return [
            Step(rank, step.name, within("computing", step), flights, waits)
            for step in self.lanes[f"rank {rank} steps"]
            for under_way in [within("communication", step)]
            for waits in [[event for event in under_way if event.name in WAITS]]
            for flights in [[event for event in under_way if event.name not in WAITS]]
        ]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """cluster settings -> run folder of a small job with a trace: some steps of each kind, all of them traced."""
    folder = tmp_path_factory.mktemp("trace")
    write_questions(folder / "prompts", (9, 4, NUM_ROWS - 13))
    made: dict[str, Path] = {}

    def run(name: str, *options: str, max_tokens: int = 8, **cluster: object) -> Path:
        if name not in made:
            parts = {
                "output": {"dir": name},
                "sampling": {"max_tokens": max_tokens},
                "cluster": {"prefill_tokens": 70, "decode_requests": 6, **cluster},
            }
            job = write_job(folder, name=f"{name}.toml", **parts)
            ended = batchinfer("run", job, *options)
            assert ended.code == 0, ended.err
            made[name] = folder / name
        return made[name]

    return run


@pytest.fixture(scope="module", params=["shared", pytest.param("gloo", marks=pytest.mark.all)])  # make test: shared
def paired(request, run_of):
    """The run folder of two ranks whose micro-batches run in turn."""
    return run_of(request.param, "--trace", prefill_ranks=2, overlap=True, exchange=request.param)


@pytest.fixture(scope="module")
def trace(paired):
    return Trace.read(paired)


def test_each_rank_has_a_lane_for_steps_computing_and_communication(trace):
    expected = {f"rank {rank} {lane}" for rank in (0, 1) for lane in ("steps", "computing", "communication")}
    # a lane for KV is there only when a running request has moved
    assert {lane for lane in trace.lanes if not lane.endswith(" KV")} == {"controller", "ranks", *expected}
    for rank in (0, 1):
        assert {event.name for event in trace.lanes[f"rank {rank} communication"]} == {*EXCHANGES, *WAITS}
        assert {event.name for event in trace.lanes[f"rank {rank} steps"]} == {"prefill", "decode"}


def test_loading_planning_and_committing_are_spans_of_the_controller(trace):
    names = [event.name for event in trace.lanes["controller"]]
    assert names[:2] == ["plan", "load"]
    assert names.count("commit") >= 1
    assert names[-1] == "finish"
    (load,) = (event for event in trace.lanes["controller"] if event.name == "load")
    first_step = min(events[0].start for lane, events in trace.lanes.items() if lane.endswith(" steps"))
    assert load.end <= first_step + ROUNDING_US
    (ranks,) = trace.lanes["ranks"]
    assert ranks.name == "start and load"
    # begun ahead, while the job was planned
    assert ranks.start <= load.start
    assert ranks.end <= load.end


def test_spans_of_a_lane_do_not_overlap(trace):
    for lane, events in trace.lanes.items():
        for event, following in pairwise(events):
            assert event.start <= event.end <= following.start + ROUNDING_US, (lane, event, following)


def test_prefill_computes_in_the_published_order(trace):
    # layer            first                    | between, MOE_LAYERS - 1 times            | after the last one
    # micro-batch 1    ATTN         MLP   SHARED | ATTN              MLP     SHARED        |
    # micro-batch 0         ATTN       MLP       |      SHARED ATTN      MLP               | SHARED
    first = [("ATTN", 1), ("ATTN", 0), ("MLP", 1), ("MLP", 0), ("SHARED", 1)]
    between = [("ATTN", 1), ("SHARED", 0), ("ATTN", 0), ("MLP", 1), ("MLP", 0), ("SHARED", 1)]
    pairs = [step for step in trace.steps("prefill") if step.in_pairs]
    assert {step.rank for step in pairs} == {0, 1}
    for step in pairs:
        assert step.order("ATTN", "SHARED", "MLP") == first + between * (MOE_LAYERS - 1) + [("SHARED", 0)]


def test_prefill_communicates_in_the_published_order(trace):
    first = [("DISPATCH", 1), ("DISPATCH", 0), ("COMBINE", 1)]
    between = [("COMBINE", 0), ("DISPATCH", 1), ("DISPATCH", 0), ("COMBINE", 1)]
    for step in trace.steps("prefill"):
        if step.in_pairs:
            assert [event.what for event in step.flights] == first + between * (MOE_LAYERS - 1) + [("COMBINE", 0)]


def test_decode_computes_in_the_published_order(trace):
    # the roles swap in the middle of `turn`; micro-batch 0 is one segment ahead, so it begins and ends first
    first = [("ATTN-0", 0), ("ATTN-1", 0)]
    turn = [("SHARED", 0), ("ATTN-0", 1), ("MLP", 0), ("ATTN-1", 1)]
    swapped = [(name, 1 - micro_batch) for name, micro_batch in turn]
    last = [("SHARED", 1), ("MLP", 1)]
    pairs = [step for step in trace.steps("decode") if step.in_pairs]
    assert {step.rank for step in pairs} == {0, 1}
    for step in pairs:
        order = step.order("ATTN-0", "ATTN-1", "SHARED", "MLP")
        assert order == first + (turn + swapped) * (MOE_LAYERS - 1) + turn + last


def test_decode_communicates_in_the_published_order(trace):
    turn = [("DISPATCH", 0), ("COMBINE", 0), ("DISPATCH", 1), ("COMBINE", 1)]
    for step in trace.steps("decode"):
        if step.in_pairs:
            assert [event.what for event in step.flights] == turn * MOE_LAYERS


def test_the_dense_layer_runs_first_and_once_in_each_micro_batch(trace):
    for step in trace.steps("prefill") + trace.steps("decode"):
        for micro_batch in range(1 + step.in_pairs):
            names = [event.name for event in step.computing if event.micro_batch == micro_batch]
            assert (names[0], names[-1]) == ("DENSE", "LOGITS")
            assert (names.count("DENSE"), names.count("LOGITS")) == (1, 1)


def test_rows_fly_between_their_sending_and_their_receiving(trace):
    for step in trace.steps("prefill") + trace.steps("decode"):
        for micro_batch in range(1 + step.in_pairs):
            for name in EXCHANGES:
                sends, receives = (
                    [event for event in step.computing if event.what == (f"{name} {end}", micro_batch)]
                    for end in ("send", "receive")
                )
                flights = [event for event in step.flights if event.what == (name, micro_batch)]
                assert len(sends) == len(flights) == len(receives) == MOE_LAYERS
                for send, flight, receive in zip(sends, flights, receives, strict=True):
                    assert send.end <= flight.start + ROUNDING_US
                    assert flight.start <= flight.end <= receive.end + ROUNDING_US


def covered(events: list[Event]) -> list[tuple[float, float]]:
    """The time in which at least one of them runs."""
    result: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda event: event.start):
        if result and event.start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], event.end))
        else:
            result.append((event.start, event.end))
    return result


def length(intervals: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def in_both(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> float:
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)


def test_the_shares_of_communication_are_what_the_trace_shows(trace, paired):
    # waiting: nothing moves; hidden: rows fly while the rank computes, of flights, packing and unpacking
    assert all(step.computing for rank in trace.ranks for step in trace.steps_of(rank)), "all steps are traced"
    total = waiting = hidden = 0.0
    for step in trace.steps("prefill") + trace.steps("decode"):
        at_rows = [event for event in step.computing if event.name.startswith(EXCHANGES)]
        computing = [event for event in step.computing if not event.name.startswith(EXCHANGES)]
        moving = [event for event in at_rows if event.name.endswith("send")] + step.flights
        for name, micro_batch in {event.what for event in step.flights}:
            receives = [event for event in at_rows if event.what == (f"{name} receive", micro_batch)]
            flights = [event for event in step.flights if event.what == (name, micro_batch)]
            for receive, flight in zip(receives, flights, strict=True):
                moving.append(replace(receive, start=min(max(receive.start, flight.end), receive.end)))
        total += length(covered(at_rows + step.flights + step.waits))
        waiting += length(covered(step.waits)) - in_both(covered(step.waits), covered(moving))
        hidden += in_both(covered(step.flights), covered(computing))
    metrics = json.loads(batchinfer("report", paired, "--json").out)
    # each of about a thousand spans is rounded by some tenths of a microsecond, of some hundred thousand in all
    assert waiting / total == pytest.approx(metrics["wait_comm_share"], abs=1e-3)
    assert hidden / (total - waiting) == pytest.approx(metrics["hidden_comm_share"], abs=2e-3)
    # through shared memory the ranks copy rows themselves: nothing moves while they compute
    assert (metrics["hidden_comm_share"] > 0) == (paired.name != "shared")


def test_without_overlap_there_is_one_micro_batch_in_the_plain_order(run_of):
    trace = Trace.read(run_of("plain", "--trace", prefill_ranks=2, overlap=False))
    layers = {"prefill": ["ATTN", "MLP", "SHARED"], "decode": ["ATTN-0", "ATTN-1", "SHARED", "MLP"]}
    for kind, parts in layers.items():
        steps = trace.steps(kind)
        assert {step.rank for step in steps} == {0, 1}
        for step in steps:
            assert {event.micro_batch for event in step.computing + step.flights} == {0}
            assert step.order(*parts) == [(part, 0) for part in parts] * MOE_LAYERS
            assert [event.name for event in step.flights] == ["DISPATCH", "COMBINE"] * MOE_LAYERS


def test_a_single_rank_shows_the_plain_order_too(run_of):
    run = run_of("single", "--trace")
    trace = Trace.read(run)
    assert trace.ranks == [0]
    assert not any(step.in_pairs for step in trace.steps("prefill") + trace.steps("decode"))
    assert json.loads(batchinfer("report", run, "--json").out)["hidden_comm_share"] is None


def test_kv_between_prefill_and_decode_ranks_has_lanes_of_its_own(run_of):
    run = run_of("apart", "--trace", mode="disaggregated", prefill_ranks=1, decode_ranks=1)
    trace = Trace.read(run)
    assert {event.name for event in trace.lanes["rank 0 steps"]} == {"prefill"}
    assert {event.name for event in trace.lanes["rank 1 steps"]} == {"decode"}
    packed, taken_in = trace.lanes["rank 0 KV"], trace.lanes["rank 1 KV"]
    assert [event.name for event in packed] == ["KV out"] * NUM_ROWS
    assert [event.name for event in taken_in] == ["KV in"] * NUM_ROWS
    # there is one decode rank: it takes prompts in in the order in which they were packed
    for sent, received in zip(packed, taken_in, strict=True):
        assert sent.end <= received.start + ROUNDING_US
    for lane in ("rank 0 KV", "rank 1 KV"):
        for event, following in pairwise(trace.lanes[lane]):
            assert event.end <= following.start + ROUNDING_US


def test_only_the_first_steps_are_shown_in_detail(run_of):
    trace = Trace.read(run_of("long", "--trace", max_tokens=70, prefill_ranks=2, decode_requests=64))
    for rank in (0, 1):
        decode = [event for event in trace.lanes[f"rank {rank} steps"] if event.name == "decode"]
        detailed = [step for step in trace.steps("decode") if step.rank == rank]
        assert len(decode) > TRACED_STEPS == len(detailed)


def test_finish_adds_its_span_to_what_is_there(run_of):
    run = run_of("finished", "--trace", prefill_ranks=1)
    before = Trace.read(run)
    assert batchinfer("finish", run, "--trace").code == 0
    after = Trace.read(run)
    assert [event.name for event in after.lanes["controller"]][-2:] == ["finish", "finish"]
    assert after.lanes | {"controller": after.lanes["controller"][:-1]} == before.lanes
    others = '"otherData": {"dropped_events": 0}'
    for damaged in ("[]", "{", *(f'{{"traceEvents": [{event}], {others}}}' for event in ("1", '{"ph": "M"}'))):
        (run / "trace.json").write_text(damaged)
        ended = batchinfer("finish", run, "--trace")
        assert ended.code == 2
        assert f"{run}/trace.json is damaged: " in ended.err
        assert "delete it" in ended.err


def test_every_command_adds_its_spans_to_those_of_the_commands_before(tmp_path):
    write_questions(tmp_path / "prompts", (3,))
    job, run = write_job(tmp_path), tmp_path / "run"
    before: dict[str, list[Event]] = {}
    added = {"plan": {"plan"}, "work": {"load", "commit"}, "finish": {"finish"}, "run": {"plan", "finish"}}
    for command in ("plan", "work", "finish", "run"):
        assert batchinfer(command, job, "--trace").code == 0
        after = Trace.read(run).lanes
        for lane, events in before.items():
            assert after[lane][: len(events)] == events
        new = after["controller"][len(before.get("controller", ())) :]
        assert {event.name for event in new} == added[command]
        before = after
    assert batchinfer("work", job, "--trace").code == 0  # nothing is left
    assert Trace.read(run).lanes == before
    (run / "trace.json").write_text("{")
    for command in ("plan", "work", "run"):
        ended = batchinfer(command, job, "--trace")
        assert ended.code == 2
        assert f"{run}/trace.json is damaged: " in ended.err


def test_the_trace_of_another_job_goes_with_its_plan(tmp_path):
    write_questions(tmp_path / "prompts", (3,))
    for max_tokens in (3, 4):
        assert batchinfer("plan", write_job(tmp_path, sampling={"max_tokens": max_tokens}), "--trace").code == 0
        assert [event.name for event in Trace.read(tmp_path / "run").lanes["controller"]] == ["plan"]


def test_spans_that_an_earlier_command_has_dropped_stay_counted(monkeypatch, tmp_path):
    monkeypatch.setattr("batchinfer.run.trace.MAX_EVENTS", 2)
    for dropped in (1, 2):  # three spans, then one more
        tracer = Tracer(enabled=True)
        tracer.go_on(FolderStorage(RunDir(tmp_path)))
        for _ in range(3 if dropped == 1 else 1):
            tracer.add("step", "controller", 1.0, 2.0)
        tracer.write(tmp_path / "trace.json")
        assert json.loads((tmp_path / "trace.json").read_text())["otherData"] == {"dropped_events": dropped}


def test_no_trace_is_written_unless_asked_for(run_of):
    assert not (run_of("untraced", prefill_ranks=2) / "trace.json").exists()
