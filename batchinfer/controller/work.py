"""Entry point of `work`: the controller and its ranks, or the ranks of one node of a larger group."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchinfer.balance.decode_loads import MOVE_STEPS, MOVE_STEPS_BETWEEN_HOSTS, DecodeLoads
from batchinfer.balance.output_lengths import OutputLengths
from batchinfer.balance.request_load import RequestLoad
from batchinfer.config import JobConfig
from batchinfer.controller.controller import Controller
from batchinfer.controller.dealer import Dealer
from batchinfer.controller.experts.history import ExpertHistory
from batchinfer.controller.experts.placer import ExpertPlacer
from batchinfer.controller.experts.statistics import ExpertStatistics
from batchinfer.controller.open_units import OpenUnits
from batchinfer.controller.rank_failures import RankFailures
from batchinfer.controller.rank_start import RankStart
from batchinfer.controller.reports import Reports
from batchinfer.controller.results import Results
from batchinfer.controller.unit_queue import UnitQueue
from batchinfer.controller.units import PlannedRequests
from batchinfer.controller.waiting_pieces import RankRoom
from batchinfer.controller.work_progress import SweepCount, WorkProgress
from batchinfer.controller.work_sender import WorkSender
from batchinfer.data.parquet import read_rows
from batchinfer.data.shards import refuse_changed
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.host_info import task_name
from batchinfer.launch.agent import serve_node
from batchinfer.launch.host_memory import decided, stream_forecast, stream_words, with_weights
from batchinfer.launch.nodes import MeetingPoint, NodeShare, announce, own_address, tell_end, this_node
from batchinfer.launch.rank_loader import RankLoader, open_ranks
from batchinfer.manifest import Manifest
from batchinfer.model.config import load_model_config
from batchinfer.model.stream_forecast import check_hours
from batchinfer.model.weight_mode import streams_to_device
from batchinfer.progress import note
from batchinfer.records import InputError, InterruptedRunError, RequestKey, StoreError
from batchinfer.run.fingerprint import check_same, model_fingerprint
from batchinfer.run.session import Session
from batchinfer.run.store.interface import Storage
from batchinfer.run.store.open import storage_of
from batchinfer.run.trace import Tracer
from batchinfer.run.units.claims import UnitClaims
from batchinfer.run.units.damage import reopen_damaged_units
from batchinfer.run.units.reused import REUSED, rows_to_compute
from batchinfer.rundir import RunDir, read_state, shards_of_state
from batchinfer.sanitize import count_text
from batchinfer.stop_signals import StopSignal


def work_on(
    run: RunDir,
    job: JobConfig,
    session: Session,
    stop: StopSignal,
    tracer: Tracer,
    ranks_ahead: RankLoader | None = None,
) -> None:
    """Compute the open units of a planned run.

    Args:
        ranks_ahead: the job's ranks, if the caller has started them; the caller closes them.

    Raises:
        InterruptedRunError: a stop signal came; all finished requests are committed.
        ModelError, RunMismatchError: the model folder cannot be loaded, or it or an input shard changed since the plan.
        ConfigError: the file system of the run folder cannot hold a run.
        RanksFailError: the ranks die repeatedly before they have computed anything.
    """
    # tasks of an array start together: each begins at another unit
    storage = storage_of(job)
    storage.fetch("state", "plan")
    if task_name() is None:  # not in each of many tasks: one check of the done units is enough
        reopen_damaged_units(storage)
    state = read_state(run)
    manifest = Manifest(run.root, state.get("files"))
    units = OpenUnits(storage, read_rows(run.units, manifest), start=0 if task_name() is None else None)
    if not units.num_open:
        return
    storage.check()
    _check_inputs(run, job)
    tokenizer = load_tokenizer(Path(job.model.path))
    _check_model(run, job, tokenizer.digest)
    node = this_node(job.cluster.num_ranks)
    is_asked = job.cluster.weights == "stream"
    job = with_weights(job, node.ranks) if ranks_ahead is None else decided(job, ranks_ahead.weights)
    sweeps = SweepCount(num_ranks=job.cluster.num_ranks) if job.cluster.weights == "stream" else None
    if sweeps is not None and ranks_ahead is None:
        sweeps.planned = _announce_stream(job, units.rows, is_asked=is_asked)
    session.hold_ranks(job.cluster, node.ranks)
    if node.index > 0:
        serve_node(storage, session, stop, node, lambda: not OpenUnits(storage, units.all_rows).num_open)
        return
    open_units = [row["unit"] for row in units.rows]
    with (
        UnitClaims(storage) as claims,
        WorkProgress(
            rows_to_compute(units.all_rows, state), open_units, state["counts"], job.cluster, started_s=session.start_s
        ) as progress,
        _ranks(storage, job, session, stop, node, ranks_ahead) as ranks,
    ):
        progress.sweeps = sweeps
        _controller(run, manifest, job, session, stop, tracer, ranks, claims, units, progress).run()
    if stop.requested:
        are = "is" if progress.rows_done == 1 else "are"
        raise InterruptedRunError(
            f"stopped; {progress.rows_done:,} of {count_text(progress.rows, 'row')} {are} done and kept; "
            "run the same command to go on"
        )


@contextmanager
def _ranks(
    storage: Storage,
    job: JobConfig,
    session: Session,
    stop: StopSignal,
    node: NodeShare,
    ranks_ahead: RankLoader | None,
) -> Iterator[RankLoader]:
    """Start this process's share of the job's ranks; ranks of other processes connect to it."""
    host = None if node.count == 1 else "127.0.0.1" if node.is_one_host else own_address()
    ranks = ranks_ahead or open_ranks(job, node.ranks, stop, host=host, one_host=node.is_one_host)
    is_ours = ranks_ahead is None
    connections, announced = ranks.group.connections, None
    if connections.listener is not None:
        called_at, port = connections.listener.host, connections.listener.port
        announced = announce(storage, node, MeetingPoint(called_at, port, connections.credentials, session.name))
    try:
        yield ranks
    except Exception as error:
        if announced is not None:
            tell_end(storage, session.name, error)
        raise
    finally:
        stop.graceful = False
        if is_ours:
            ranks.close()
        if announced is not None:
            storage.delete(announced)
            storage.delete_folder(storage.run.kv_transfers(session.name))


def _controller(
    run: RunDir,
    manifest: Manifest,
    job: JobConfig,
    session: Session,
    stop: StopSignal,
    tracer: Tracer,
    ranks: RankLoader,
    claims: UnitClaims,
    units: OpenUnits,
    progress: WorkProgress,
) -> Controller:
    """Build the controller and its parts."""
    group, cluster = ranks.group, job.cluster
    reuses = REUSED in read_state(run)
    model = load_model_config(Path(job.model.path))
    lengths = OutputLengths()
    dealer = Dealer(
        (place.rank for place in group.places if place.runs_prefill),
        lengths,
        room=RankRoom.of(cluster, keeps_states=not model.attention.cuts_anywhere),
        with_store=job.kv.dir is not None,
        counts_as_dealt=reuses,
    )
    loads: DecodeLoads[RequestKey] = DecodeLoads(
        [place.rank for place in group.places if place.runs_decode],
        lengths,
        max_requests=cluster.running_requests,
        request_load=RequestLoad(*model.decode_loads),
        move_steps=MOVE_STEPS if group.local.one_host else MOVE_STEPS_BETWEEN_HOSTS,
        is_lone_rank=cluster.num_ranks == 1,
    )
    results = Results(run, session, claims)
    history = ExpertHistory(run, cluster, model, may_keep=run.experts not in manifest)
    job_tokens = sum(row["new_tokens"] for row in units.all_rows)
    experts = ExpertPlacer(history, job, model, progress.requests, job_tokens=job_tokens)
    statistics = ExpertStatistics(run, session.name, history, group.ranks_of_role, model.moe_layers)
    requests = PlannedRequests(run, manifest, job.sampling.to_sampling())
    queue = UnitQueue(requests, units, claims, results, dealer, progress, reuses)
    return Controller(
        stop,
        cluster.commit_seconds,
        group,
        RankStart(run, job, session, tracer, ranks, units.all_rows, history, claims),
        queue,
        WorkSender(cluster, session, group, queue, dealer, loads, experts),
        Reports(session, tracer, progress, results, dealer, loads, lengths, experts, statistics),
        RankFailures(dealer, cluster.collective_seconds),
    )


def _announce_stream(job: JobConfig, units: list[dict[str, Any]], *, is_asked: bool) -> int | None:
    """Say how long a run takes and return its sweeps, if known; refuse a long run that did not ask for it."""
    if streams_to_device(job):  # never unasked
        words, num_sweeps = stream_words(job, units)
        note(words)
        return num_sweeps
    found = stream_forecast(job, units)
    note(str(found))
    check_hours(found, is_asked=is_asked)
    return found.schedule.num_sweeps


def _check_inputs(run: RunDir, job: JobConfig) -> None:
    """Refuse to compute for shards that were replaced, since `finish` could not use the results.

    Rows are not read here, so a node that cannot reach the shards may work all the same.
    """
    try:
        refuse_changed(shards_of_state(read_state(run)), job.s3)
    except (InputError, StoreError) as error:
        note(f"warning: {error}; going on, since the plan holds what is needed")


def _check_model(run: RunDir, job: JobConfig, tokenizer_digest: str) -> None:
    """Raise an error if the model is not the one that the plan was made for."""
    recorded = read_state(run)["fingerprint"]
    check_same(recorded, model_fingerprint(job, tokenizer_digest), run.root)
