"""Claims units, deals their requests to the ranks, commits what is finished. Called by `batchinfer work` and `run`.

The controller imports no torch and computes nothing: what it holds is what the ranks have not finished yet. Any of its
ranks may die at any time; it starts them again and has the unfinished requests done once more.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchinfer.balance.decode import OutputLengths
from batchinfer.config import JobConfig
from batchinfer.controller.claims import Claims
from batchinfer.controller.dealer import Dealer
from batchinfer.controller.decode_loads import DecodeLoads
from batchinfer.controller.expert_placer import ExpertPlacer
from batchinfer.controller.open_units import OpenUnits
from batchinfer.controller.results import Results
from batchinfer.controller.units import kv_tokens, read_unit
from batchinfer.data.parquet import read_rows
from batchinfer.data.shards import refuse_changed
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.host_info import slurm_task
from batchinfer.launch.agent import serve_node
from batchinfer.launch.nodes import MeetingPoint, NodeShare, announce, own_address, this_node
from batchinfer.launch.rank_group import RankGroup, RanksDiedError, join_message, open_group
from batchinfer.model.config import load_model_config
from batchinfer.progress import Progress, note
from batchinfer.protocol.messages import (
    Adopt,
    Adoption,
    CountExperts,
    ExpertTokens,
    FreeKv,
    FromRank,
    GiveAway,
    Handover,
    Handovers,
    KvRead,
    NeedsRequests,
    PlaceExperts,
    Requests,
    Start,
    StepReport,
    Steps,
    StoreCounts,
    Wake,
)
from batchinfer.records import (
    BatchinferError,
    Completion,
    InputError,
    InterruptedRunError,
    Request,
    RequestKey,
    Shard,
    StoreError,
)
from batchinfer.run.equal_rows import UNEQUAL, EqualRows, together
from batchinfer.run.fingerprint import check_same, model_fingerprint
from batchinfer.run.probe import check_file_system
from batchinfer.run.session import Session
from batchinfer.run.trace import Tracer
from batchinfer.run.weights_digest import cache_folder, whole_weights_digest
from batchinfer.rundir import RunDir, read_json
from batchinfer.stop import StopSignal

GRACE_S = 2.0  # ranks notice first that another one does not answer; the controller when none of them can
WAIT_S = 0.2  # between questions whether there is a unit to be had
# Sending a KV token takes as long as reading it in so many decode steps: two copies, or memory against network speed
MOVE_STEPS = 4.0
MOVE_STEPS_BETWEEN_HOSTS = 64.0
# When ranks die again and again before they have any request, none is to blame: end after so many starts in a row
FAILED_STARTS = 3  # in which a rank said what was wrong
KILLED_STARTS = 50  # in which it was killed without a word,
KILLED_STARTS_LONG = 10  # or so many if they took longer than
KILLED_STARTS_S = 600.0
GIVEN_UP = 3  # and when no step has ever gone well, after so many requests that seemed to be to blame


class RanksFailError(BatchinferError):
    """The ranks cannot be kept running, whatever requests they get."""


def work_on(
    run: RunDir,
    job: JobConfig,
    session: Session,
    stop: StopSignal,
    tracer: Tracer,
    ranks_ahead: RankGroup | None = None,
) -> None:
    """Compute all units of a planned run that nobody else holds.

    Args:
        ranks_ahead: the job's ranks, if they were started already.

    Raises:
        InterruptedRunError: a signal came; everything finished is committed.
        ModelError, RunMismatchError: the model folder cannot be loaded, or it or an input shard changed since the plan.
        ConfigError: the file system of the run folder cannot hold a run.
        RanksFailError: the ranks die again and again before they have computed anything.
    """
    # tasks of an array start together: each begins at another place
    units = OpenUnits(run, read_rows(run.units), start=0 if slurm_task() is None else None)
    if not units.num_open:
        return
    check_file_system(run)
    _check_inputs(run, job)
    tokenizer = load_tokenizer(Path(job.model.path))
    _check_model(run, job, tokenizer.digest)
    node = this_node(job.cluster.num_ranks)
    session.hold_ranks(job.cluster, num_ranks=len(node.ranks))
    if node.index > 0:
        serve_node(run, session, stop, node)
        return
    total = sum(row["num_requests"] for row in units.rows)
    with (
        Claims(run) as claims,
        Progress("work", total, "requests") as progress,
        _rank_group(run, job, session, stop, node, ranks_ahead) as ranks,
    ):
        Controller(run, job, session, stop, tracer, ranks, claims, units, progress).run()
    if stop.requested:
        raise InterruptedRunError(
            f"stopped; {progress.count:,} of {progress.total:,} requests are done and kept; "
            "run the same command to go on"
        )


@contextmanager
def _rank_group(
    run: RunDir, job: JobConfig, session: Session, stop: StopSignal, node: NodeShare, ranks_ahead: RankGroup | None
) -> Iterator[RankGroup]:
    """The job's ranks, of which this process starts its own share; on one host they call by the loopback interface."""
    host = "127.0.0.1" if node.is_one_host else own_address()
    ranks = ranks_ahead or open_group(job, node.ranks, host, stop, one_host=node.is_one_host)
    point = MeetingPoint(host, ranks.listener.port, ranks.listener.token, session.name)
    announced = announce(run, node, point) if node.count > 1 else None
    try:
        yield ranks
    finally:
        stop.graceful = False
        ranks.close()
        if announced is not None:
            announced.unlink(missing_ok=True)
        _empty(run.parcels(session.name))


def _empty(folder: Path) -> None:
    """Remove what earlier ranks left there."""
    if folder.exists():
        shutil.rmtree(folder)


class Controller:
    """The loop between claims, ranks and results."""

    def __init__(
        self,
        run: RunDir,
        job: JobConfig,
        session: Session,
        stop: StopSignal,
        tracer: Tracer,
        ranks: RankGroup,
        claims: Claims,
        units: OpenUnits,
        progress: Progress,
    ) -> None:
        self._run, self._job, self._session, self._stop, self._tracer = run, job, session, stop, tracer
        self._ranks, self._claims, self._units, self._progress = ranks, claims, units, progress
        self._results = Results(run, session, claims)
        self._default = job.sampling.to_sampling()
        model = load_model_config(Path(job.model.path))
        self._lengths = OutputLengths()
        self._dealer = Dealer(
            (place.rank for place in ranks.places if place.runs_prefill),
            self._lengths,
            with_decode=job.cluster.mode == "colocated",
        )
        self._loads = DecodeLoads(
            [place.rank for place in ranks.places if place.runs_decode],
            self._lengths,
            max_requests=job.cluster.decode_requests,
            request_load=model.row_cost_in_kv_tokens,
            move_steps=MOVE_STEPS if ranks.local.one_host else MOVE_STEPS_BETWEEN_HOSTS,
        )
        fingerprint = read_json(run.run_json)["fingerprint"]
        self._model_digests = {name: fingerprint[name] for name in ("model.weights", "model.config")}
        if job.kv.dir is not None:
            self._model_digests["model.weights"] = whole_weights_digest(Path(job.model.path), cache_folder())
        self._experts = ExpertPlacer(run, job.cluster, model.n_routed_experts)
        self._handovers: dict[RequestKey, tuple[int, Handover]] = {}  # on their way, with the rank that holds the KV
        # unit -> tokens that its last prompt shares with the first of the unit behind it
        self._shared_with_next = {row["unit"] - 1: row["shared_tokens"] for row in units.all_rows}
        self._needs_work: set[int] = set()  # ranks that ask for requests
        self._is_fed = False  # whether any rank has got one since they were started
        self._num_prefill_ranks = sum(place.runs_prefill for place in ranks.places)
        self._has_told_of_waiting = False
        self._told: set[str] = set()  # problems that ranks have found
        self._starts_in_vain = self._starts_failed = 0
        self._num_given_up = 0
        self._has_stepped = False
        self._last_step_s = self._last_sign_s = time.monotonic()
        self._recent_tokens = 0
        self._recent_since = time.monotonic()
        self._speed = ""

    def run(self) -> None:
        """Start the ranks and work until every unit is done, or a signal comes."""
        try:
            while not self._is_done():
                try:
                    self._stop.graceful = True
                    self._wait_for_unit()
                    if self._is_done():
                        break
                    self._start_ranks()
                    while not self._is_done():
                        self._serve()
                    for rank, message in self._ranks.leave():
                        self._take(rank, message)
                except RanksDiedError as death:
                    self._ranks_died(death)
        finally:
            # a further signal, as clusters send them, must not cut this short
            self._stop.graceful = True
            self._ranks.end()
            self._commit()
            self._stop.graceful = False

    def _wait_for_unit(self) -> None:
        """Hold a unit before ranks start: loading takes them long, and there may be nothing for them."""
        pause = threading.Event()  # never set
        while not self._is_done() and not self._dealer.num_unfinished and not self._open_next_unit():
            pause.wait(WAIT_S)

    def _is_done(self) -> bool:
        """Whether to go home. With no request of our own left, units of others may still have to be taken over."""
        if self._stop.requested:
            return True
        if self._dealer.num_unfinished or self._results.num_open:
            return False
        if self._units.are_all_done(self._claims.completed):
            return True
        self._tell_of_waiting()
        return False

    def _serve(self) -> None:
        """One round: take what came, deal to ranks that ask, commit when it is time."""
        messages = self._ranks.receive()
        for rank, message in messages:
            self._take(rank, message)
        if messages or not self._dealer.num_running:
            self._last_sign_s = time.monotonic()
        elif time.monotonic() - self._last_sign_s > self._job.cluster.collective_seconds + GRACE_S:
            self._ranks.give_up(f"no rank has ended a step for {time.monotonic() - self._last_sign_s:,.0f} s")
        self._deal()
        self._place_experts()
        if time.monotonic() - self._results.last_commit_s >= self._job.cluster.commit_seconds:
            self._commit()

    def _start_ranks(self) -> None:
        # of all units: those that are done may be opened again
        most_tokens, largest_tokens = kv_tokens(self._units.all_rows)
        _empty(self._run.parcels(self._session.name))
        with self._tracer.span("load", "controller"):
            slots = {str(place.role): self._experts.slots(place.role) for place in self._ranks.places}
            ready = self._ranks.load(join_message(self._job, slots))
            self._ranks.begin(
                Start(
                    most_tokens=most_tokens,
                    largest_tokens=largest_tokens,
                    parcel_folder=str(self._run.parcels(self._session.name)),
                    traced=self._tracer.enabled,
                    model_digests=self._model_digests,
                )
            )
        self._tracer.add("start and load", "ranks", self._ranks.started_s, self._ranks.loaded_s)
        self._results.set_moe_layers(ready[0].moe_layers)
        self._experts.set_layers(ready[0].moe_layers)
        self._session.device = ready[0].device
        self._note_equal_rows([message.equal_rows for message in ready])
        self._needs_work.clear()
        self._is_fed = False
        self._last_sign_s = time.monotonic()

    def _note_equal_rows(self, said: list[EqualRows]) -> None:
        """Keep what the ranks say of their rows, beside what those before a restart have said; tell what is wrong."""
        earlier = [] if self._session.equal_rows is None else [self._session.equal_rows]
        found = self._session.equal_rows = together([*earlier, *said])
        if found.bit_equal is False and found.bit_equal_reason not in self._told:
            self._told.add(str(found.bit_equal_reason))
            note(f"warning: {UNEQUAL}: {found.bit_equal_reason}")

    def _take(self, rank: int, message: FromRank) -> None:
        match message:
            case Steps():
                for report in message.reports:
                    self._take_step(rank, report)
            case NeedsRequests():
                self._needs_work.add(rank)
            case Handovers():
                self._pass_on(rank, message.handovers)
            case KvRead():
                self._kv_read(rank, message.keys)
            case StoreCounts():
                self._results.set_store_counts(rank, message.counts)
                for problem in message.problems:
                    if problem not in self._told:  # every rank finds the same
                        self._told.add(problem)
                        note(f"warning: {problem}")
            case _:
                assert isinstance(message, ExpertTokens), f"rank {rank} sent {message}"
                self._results.set_expert_tokens(rank, message.tokens)
                self._experts.add_counts(rank, message.tokens)

    def _take_step(self, rank: int, report: StepReport) -> None:
        self._has_stepped = True
        self._starts_in_vain = self._starts_failed = 0
        self._last_step_s = time.monotonic()
        if self._session.first_prefill_s is None:
            self._session.first_prefill_s = report.record.start_s
            self._session.record("running")
        self._results.add_step(rank, report.record)
        self._tracer.add_step(rank, report.record.kind, report.record.start_s, report.record.duration_s, report.spans)
        if report.record.kind == "decode":
            self._loads.step(rank)
        for key in report.started:
            self._loads.start(self._dealer.running_request(key), rank)
        self._finish(report.completions)
        self._show(len(report.completions), report.record.new_tokens)

    def _finish(self, completions: list[Completion]) -> None:
        for completion in completions:
            request = self._dealer.running_request(completion.key)
            self._lengths.finish(request.prompt_group, len(completion.token_ids))
            self._dealer.finish(completion.unit, completion.key)
            self._loads.finish(completion.key)
        if self._results.add(completions):
            self._commit()
            self._experts.unit_done()

    def _pass_on(self, holder: int, handovers: list[Handover]) -> None:
        """Requests that go on elsewhere: prompts that have run wait for a place, moved requests have one."""
        for handover in handovers:
            self._handovers[handover.key] = (holder, handover)
            moved = self._loads.give_away(handover.key)
            if moved is None:
                self._loads.add_ready(self._dealer.running_request(handover.key))
            else:
                self._session.moves += 1
                self._send_handover(*moved)

    def _send_handover(self, request: Request, rank: int) -> None:
        adoption = Adoption(request, self._handovers[request.key][1])
        self._ranks.send(rank, Adopt([adoption]))
        self._wake_others([rank])

    def _kv_read(self, rank: int, keys: list[RequestKey]) -> None:
        """A rank goes on with requests; whoever holds their KV may free it."""
        for key in keys:
            holder, handover = self._handovers.pop(key)
            self._loads.start(self._dealer.running_request(key), rank, len(handover.tokens))
            self._ranks.send(holder, FreeKv([key]))

    def _deal(self) -> None:
        """Requests for the ranks that ask; opens the next unit when theirs have run out. Places and moves others."""
        # they begin together: who got requests first would run a step, and the others would have to take part idly
        self._is_fed = self._is_fed or len(self._needs_work) == self._num_prefill_ranks
        fed: list[int] = []
        for rank in sorted(self._needs_work) if self._is_fed else []:
            requests = self._take_for(rank)
            if not requests and not self._dealer.is_isolating:
                if not self._open_next_unit():
                    self._dealer.take_over(rank)
                requests = self._take_for(rank)
            if requests:
                self._needs_work.discard(rank)
                self._ranks.send(rank, Requests(requests))
                fed.append(rank)
        self._wake_others(fed)
        for request, rank in self._loads.place_ready():
            self._send_handover(request, rank)
        for key, rank in self._loads.moves():
            self._ranks.send(rank, GiveAway([key]))

    def _take_for(self, rank: int) -> list[Request]:
        """What keeps a rank busy until it asks again: two prefill steps."""
        cluster = self._job.cluster
        return self._dealer.take(rank, cluster.decode_requests, 2 * cluster.prefill_tokens)

    def _place_experts(self) -> None:
        """After the first unit ask the ranks for their counts; when their experts are placed, let them move."""
        if self._dealer.num_unfinished and self._experts.should_count():
            for place in self._ranks.places:
                self._ranks.send(place.rank, CountExperts())
        for role, slots in self._experts.take_placed().items():
            for place in self._ranks.places:
                if place.role == role:
                    self._ranks.send(place.rank, PlaceExperts(slots))

    def _wake_others(self, ranks: list[int]) -> None:
        """Ranks have got something: wake the others of their groups, since they take part in every step."""
        leaders = {self._ranks.places[rank].leader for rank in ranks}
        for place in self._ranks.places:
            if place.leader in leaders and place.rank not in ranks:
                self._ranks.send(place.rank, Wake())

    def _open_next_unit(self) -> bool:
        """Claim a unit that has something left to do; False when there is none now."""
        while (found := self._units.claim(self._claims.try_claim, self._results.open_units)) is not None:
            row, claim = found
            unit = claim.unit
            self._progress.extend(self._units.take_reopened())
            after_tokens = self._shared_with_next.get(unit, 0)
            requests = read_unit(self._run, row, self._default, after_tokens=after_tokens)
            missing = self._results.open_unit(claim, {request.key for request in requests})
            self._progress.advance(row["num_requests"] - len(missing))
            if missing:
                self._dealer.add_unit(
                    unit,
                    [request for request in requests if request.key in missing],
                    is_fresh=len(missing) == len(requests),
                    after_tokens=after_tokens,
                )
                return True
        return False

    def _tell_of_waiting(self) -> None:
        self._progress.extend(self._units.take_reopened())
        self._progress.advance(self._units.take_done_elsewhere())
        if self._units.is_waiting and not self._has_told_of_waiting:
            note(f"{self._units.num_open} units are held by other workers; waiting for them")
            self._has_told_of_waiting = True

    def _ranks_died(self, death: RanksDiedError) -> None:
        """Put back what was running; give up a request that is the cause."""
        self._results.ranks_ended()
        self._experts.ranks_died()
        self._handovers.clear()
        self._loads.clear()
        self._session.restarts += 1
        is_in_vain = not self._dealer.num_running
        self._starts_in_vain = self._starts_in_vain + 1 if is_in_vain else 0
        self._starts_failed = self._starts_failed + 1 if is_in_vain and death.has_reason else 0
        if self._is_hopeless():
            raise RanksFailError(
                f"the ranks ended {self._starts_in_vain} times in a row before they had anything to do; the last time: "
                f"{death}"
            )
        for request in self._dealer.ranks_died():
            self._num_given_up += 1
            if self._num_given_up >= GIVEN_UP and not self._has_stepped:
                raise RanksFailError(f"the ranks end with whatever request they run; the last time: {death}")
            self._finish([_given_up(request, str(death))])
            self._progress.advance(1)
        note(f"warning: {death}; starting the ranks again, {self._dealer.num_unfinished:,} requests go on")

    def _is_hopeless(self) -> bool:
        took_long = time.monotonic() - self._last_step_s > KILLED_STARTS_S
        limit = KILLED_STARTS_LONG if took_long else KILLED_STARTS
        return self._starts_failed >= FAILED_STARTS or self._starts_in_vain >= limit

    def _commit(self) -> None:
        with self._tracer.span("commit", "controller"):
            self._results.commit()

    def _show(self, num_completions: int, num_tokens: int) -> None:
        self._recent_tokens += num_tokens
        seconds = time.monotonic() - self._recent_since
        if seconds >= 1.0:
            self._speed = f"{self._recent_tokens / seconds:,.0f} tokens/s"
            self._recent_tokens, self._recent_since = 0, time.monotonic()
        self._progress.advance(num_completions, self._speed)


def _given_up(request: Request, reason: str) -> Completion:
    """The error row of a request that ends the ranks."""
    return Completion(
        key=request.key,
        unit=request.unit,
        text="",
        token_ids=[],
        finish_reason="error",
        stop_reason=None,
        prompt_tokens=len(request.token_ids),
        cached_memory_tokens=0,
        cached_disk_tokens=0,
        kv_tokens_sum=0,
        error=f"the ranks ended twice while only this request was running; the last time: {reason}",
    )


def _check_inputs(run: RunDir, job: JobConfig) -> None:
    """Refuse to compute for shards that were replaced: `finish` could not use the results.

    Nothing is read from them here, so a node that cannot reach them may work all the same.
    """
    try:
        refuse_changed([Shard(**shard) for shard in read_json(run.run_json)["shards"]], job.s3)
    except (InputError, StoreError) as error:
        note(f"warning: {error}; going on, since the plan holds what is needed")


def _check_model(run: RunDir, job: JobConfig, tokenizer_digest: str) -> None:
    """Refuse to compute with another model than the plan was made for."""
    recorded = read_json(run.run_json)["fingerprint"]
    check_same(recorded, model_fingerprint(job, tokenizer_digest), run.root)
