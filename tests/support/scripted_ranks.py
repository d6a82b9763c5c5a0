"""A group of one rank that computes nothing, in a process of its own, so that its controller's time can be told.

Messages are encoded in both directions, as over a channel. Every step ends at once: a prefill step begins up to 16
prompts, a decode step adds a token to each running request.
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from batchinfer.config import ClusterConfig, load_job
from batchinfer.config.rank_layout import rank_places
from batchinfer.controller import work
from batchinfer.controller.controller import Controller
from batchinfer.controller.open_units import OpenUnits
from batchinfer.controller.work_progress import WorkProgress
from batchinfer.data.parquet import read_rows
from batchinfer.manifest import Manifest
from batchinfer.protocol import messages
from batchinfer.protocol.messages import Message, StepRecord, StepReport
from batchinfer.records import Completion, Request, RequestTimes
from batchinfer.run.session import Session
from batchinfer.run.store.open import storage_of
from batchinfer.run.trace import Tracer
from batchinfer.run.units.claims import UnitClaims
from batchinfer.rundir import read_state
from batchinfer.stop_signals import StopSignal

STEPS_PER_MESSAGE = 8  # short steps are reported together
PROMPTS_PER_STEP = 16
NUM_PAGES = 100_000  # enough for everything


class ScriptedGroup:
    """In place of a RankGroup: the controller's end of the rank's process.

    Args:
        num_slots: requests that the rank decodes at once.
    """

    def __init__(self, num_slots: int) -> None:
        self.places = rank_places(ClusterConfig())
        self.local = SimpleNamespace(one_host=True)
        self.ranks_of_role = {"both": [0]}
        self.is_resting = False
        self.num_steps = 0  # reported
        fork = multiprocessing.get_context("fork")
        self._pipe, other_end = fork.Pipe()
        self._process = fork.Process(target=_serve, args=(other_end, self._pipe, num_slots), daemon=True)
        self._process.start()
        other_end.close()

    def send(self, rank: int, message: Message) -> None:
        self._pipe.send_bytes(messages.encode(message))

    def receive(self) -> list[tuple[int, Any]]:
        """Return what the rank reports of its next steps."""
        self._pipe.send_bytes(b"")
        found = [(0, messages.decode_from_rank(content)) for content in pickle.loads(self._pipe.recv_bytes())]
        self.num_steps += sum(len(message.reports) for _, message in found if isinstance(message, messages.Steps))
        return found

    def leave(self) -> list[tuple[int, Any]]:
        return []

    def end(self) -> None:
        self._pipe.close()
        self._process.join()


def _serve(pipe: Connection, other_end: Connection, num_slots: int) -> None:
    """Answer the controller until it closes its end."""
    other_end.close()  # this process's copy
    rank = _Rank(num_slots)
    while True:
        try:
            content = pipe.recv_bytes()
        except EOFError:
            return
        if content:
            rank.take(messages.decode_from_controller(content))
        else:
            pipe.send_bytes(pickle.dumps([messages.encode(message) for message in rank.report()]))


class _Rank:
    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._waiting: deque[Request] = deque()
        self._running: list[tuple[int, Request]] = []  # with the step in which each ends
        self._step = 0
        self._has_asked = False

    def take(self, message: Message) -> None:
        if isinstance(message, messages.Requests):
            self._waiting.extend(message.requests)
            self._has_asked = False

    def report(self) -> list[Message]:
        """Return the reports of the next steps, and the rank's demand for requests."""
        reports = []
        for _ in range(STEPS_PER_MESSAGE):
            if self._waiting and len(self._running) < self._num_slots:
                reports.append(self._prefill())
            elif self._running:
                reports.append(self._decode())
        found: list[Message] = [messages.Steps(reports)] if reports else []
        if len(self._waiting) < self._num_slots and not self._has_asked:
            self._has_asked = True
            found.append(messages.NeedsRequests(NUM_PAGES))
        return found

    def _prefill(self) -> StepReport:
        begun = [self._waiting.popleft() for _ in range(min(PROMPTS_PER_STEP, len(self._waiting)))]
        self._running += [(self._step + request.sampling.max_tokens - 1, request) for request in begun]
        record = _record("prefill", len(begun), sum(len(request.token_ids) for request in begun))
        return StepReport(record, [], [request.key for request in begun])

    def _decode(self) -> StepReport:
        record = _record("decode", len(self._running), len(self._running))
        self._step += 1
        ended = [request for end, request in self._running if end <= self._step]
        self._running = [(end, request) for end, request in self._running if end > self._step]
        return StepReport(record, list(map(_completion, ended)))


def _record(kind: str, num_requests: int, num_tokens: int) -> StepRecord:
    counts: dict[str, Any] = dict.fromkeys(
        ("cached_tokens", "kv_tokens", "largest_kv_tokens", "pages_used", "expert_rows"), 0
    )
    times: dict[str, Any] = {"start_s": time.time(), "duration_s": 0.01, "comm_s": 0.0, "exposed_comm_s": 0.0}
    return StepRecord(
        kind=kind, num_requests=num_requests, new_tokens=num_tokens, output_tokens=num_requests, micro_batches=1,
        placement=0, wait_comm_s=None, hidden_comm_s=None, fallback_calls=0, **counts, **times,
    )  # fmt: skip


def _completion(request: Request) -> Completion:
    num_prompt, tokens = len(request.token_ids), [7] * request.sampling.max_tokens
    times = RequestTimes(1.0, 2.0, 3.0)
    return Completion(
        request.key, request.unit, " word" * len(tokens), tokens, "length", None, num_prompt, 0, 0,
        num_prompt * len(tokens), times, computed_tokens=num_prompt,
    )  # fmt: skip


@contextmanager
def controller_of(job_file: Path, group: ScriptedGroup) -> Iterator[Controller]:
    """Yield the controller of a planned job with this group in place of its ranks."""
    job = load_job(job_file)
    storage = storage_of(job)
    run = storage.run
    state = read_state(run)
    manifest = Manifest(run.root, state.get("files"))
    units = OpenUnits(storage, read_rows(run.units, manifest))
    open_units = [row["unit"] for row in units.rows]
    stop = StopSignal()
    with (
        Session("work", stop) as session,
        UnitClaims(storage) as claims,
        WorkProgress(units.all_rows, open_units, state["counts"], job.cluster) as progress,
    ):
        session.attach(storage)
        ranks: Any = SimpleNamespace(group=group)
        tracer = Tracer(enabled=False)
        controller = work._controller(run, manifest, job, session, stop, tracer, ranks, claims, units, progress)
        controller.sender.experts.history.ranks_loaded({role: ["here"] for role in group.ranks_of_role})
        started: Any = lambda: None  # noqa: E731
        yield replace(controller, start_ranks=started)
