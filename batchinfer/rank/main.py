"""The program of a rank: `python -m batchinfer.rank.main`, started by its node's controller or agent, or forked.

The rank connects to the controller named in its environment, meets the other ranks of its group, loads its share of
the model and steps until the controller ends the job; then it may stay for the next job. A rank ignores the signals
that stop a job, which the controller handles, and ends when its controller is gone.
"""

import gc

if __name__ == "__main__":
    from batchinfer.stop_signals import ignore_signals

    ignore_signals()

    import sys

    from batchinfer import own_process

    # libraries print to the command's log, too
    sys.stdout, sys.stderr = (own_process.wrap_stream(own_process.Log, of) for of in (sys.stdout, sys.stderr))
    gc.disable()  # until the model is loaded: imported objects stay, and scanning them takes 0.4 s of the start

import os
import queue
import secrets
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch

from batchinfer.config import JobConfig
from batchinfer.config.rank_layout import RankPlace, rank_places
from batchinfer.data.bucket import Bucket
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.launch.rank_forks import fork_ranks
from batchinfer.launch.rank_process import RankEnvironment
from batchinfer.model.fused.graphs import ON_HOST, why_not_recorded
from batchinfer.model.transformer import Transformer
from batchinfer.parallel.group_store import GroupStore
from batchinfer.parallel.mesh import Mesh, Seat
from batchinfer.parallel.tls_exchange import Meeting
from batchinfer.protocol import messages
from batchinfer.protocol.channel import Channel, ChannelClosedError
from batchinfer.protocol.feed import Feed
from batchinfer.protocol.messages import (
    Failed,
    FromController,
    MalformedMessageError,
    SharedValue,
    decode_from_controller,
)
from batchinfer.rank import may_draft
from batchinfer.rank.bit_equality import equal_rows, why_no_cpp
from batchinfer.rank.bucket_transfer import BucketTransfers
from batchinfer.rank.device import device_name, rank_device, ranks_per_gpu
from batchinfer.rank.kv_budget import kv_budget
from batchinfer.rank.load import LoadedRank, first_placements, load_model, make_worker
from batchinfer.rank.warm_up import warm_up
from batchinfer.records import BatchinferError, ConfigError, ExitCode
from batchinfer.resource_errors import explain_resource_error
from batchinfer.run.liveness import this_host
from batchinfer.run.store.interface import is_in_bucket
from batchinfer.sanitize import sanitize
from batchinfer.stop_signals import ignore_signals

CONNECT_S = 30.0
LOADING_S = 0.5  # between reports of the weights read

RankChannel = Channel[FromController]


def main() -> NoReturn:
    """Run one rank to its end."""
    ignore_signals()
    fork_ranks()
    environment = RankEnvironment.read()
    environment.take_cores()
    try:
        channel = Channel(environment.connect(CONNECT_S), decode_from_controller)
    except OSError as error:
        print(f"rank {environment.rank}: no controller at {environment.host}: {error}", file=sys.stderr)
        _end(ExitCode.INTERRUPTED)
    received: queue.SimpleQueue[FromController] = queue.SimpleQueue()
    store = GroupStore(lambda key, value: channel.send(SharedValue(key, value)))

    def take(message: FromController) -> None:
        if isinstance(message, SharedValue):
            store.learn(message.key, message.value)
        else:
            received.put(message)

    channel.read_on(take, at_end=lambda reason: _controller_ended(channel, reason))
    channel.send_on(at_fault=lambda error: _fail(channel, error))
    channel.send(messages.Hello(environment.rank, os.getpid(), this_host(), messages.own_version()))
    code = _run(channel, received, store, environment)
    channel.close()
    _end(code)


def _run(
    channel: RankChannel,
    received: queue.SimpleQueue[FromController],
    store: GroupStore,
    environment: RankEnvironment,
) -> int:
    """Run the job, report an error to the controller, and return the exit code."""
    try:
        _work(channel, received, store, environment)
        channel.send_last(messages.Bye())
        return ExitCode.OK
    except ChannelClosedError:
        return ExitCode.INTERRUPTED
    except BatchinferError as error:
        _say_last(channel, Failed(sanitize(str(error)), type(error).__name__))
        return error.exit_code
    except Exception as error:
        if (explained := explain_resource_error(error)) is not None:
            _say_last(channel, Failed(explained, ConfigError.__name__))
            return ExitCode.BAD_JOB
        traceback.print_exc()
        _say_last(channel, _failed(error))
        return ExitCode.INTERNAL


def _join(
    received: queue.SimpleQueue[FromController], store: GroupStore, environment: RankEnvironment
) -> tuple[messages.Join, JobConfig, RankPlace, torch.device, Mesh]:
    """Meet the other ranks of the group; return the controller's message, and job, place, device and mesh by it."""
    join = received.get()
    assert isinstance(join, messages.Join), join
    job = JobConfig.model_validate_json(join.job)
    place = rank_places(job.cluster)[environment.rank]
    seat = Seat(
        rank=place.group_rank,
        size=place.group_size,
        exchange=place.exchange(job.cluster),
        one_host=join.group_on_one_host,
        timeout_s=job.cluster.collective_seconds,
        meeting=Meeting(join.host, join.credentials) if join.credentials else None,
    )
    device = rank_device(job.cluster.backend, environment.index, job.cluster.exchange)
    store.set_timeout(timedelta(seconds=seat.timeout_s))
    return join, job, place, device, Mesh.join(seat, store, device)


def _work(
    channel: RankChannel,
    received: queue.SimpleQueue[FromController],
    store: GroupStore,
    environment: RankEnvironment,
) -> None:
    """Load the model, report it, and run one job after another until the controller ends this rank."""
    join, job, place, device, mesh = _join(received, store, environment)
    slots = join.slots_of_role.get(place.role)
    asked = may_draft.should_draft(job, place)
    no_drafts = may_draft.why_not(job, place, device) if asked else None
    model = load_model(
        job,
        mesh,
        place,
        slots,
        device,
        mtp=asked and no_drafts is None,
        most_tokens=join.most_tokens,
        largest_tokens=join.largest_tokens,
        num_local_ranks=join.num_local_ranks,
        before_weights=lambda: channel.send(messages.CanRun()),
        on_read=_load_reports(channel),
    )
    # on a GPU the measuring of the KV budget does it
    if mesh.size == 1 and device.type == "cpu" and model.stream is None:
        warm_up(model, place.most_tokens(job.cluster))
    tokenizer = load_tokenizer(Path(job.model.path))
    equality = equal_rows(model, job.cluster.backend)
    if model.mtp is not None and equality.bit_equal is not True:
        no_drafts = "answers may depend on what rows are batched with"
    ready = messages.Ready(
        device_name(device),
        model.config.moe_layers,
        equality,
        no_drafts,
        _graphs(model, place, job),
        why_no_cpp(model, job.cluster.backend),
        _sharing(job, join, device),
    )
    channel.send(ready)
    rank = LoadedRank(place, mesh, model, tokenizer, slots, can_draft=model.mtp is not None and no_drafts is None)
    while isinstance(start := received.get(), messages.Start):
        gc.freeze()  # objects of now stay: scanning them again and again would cost a part of every short step
        gc.enable()
        if not _run_job(rank, join, start, channel, received).stay:
            mesh.close()
            return
        channel.send(messages.Bye())
        gc.collect()  # reference cycles of the job keep its pages alive
    assert isinstance(start, messages.Leave), start


def _run_job(
    rank: LoadedRank,
    join: messages.Join,
    start: messages.Start,
    channel: RankChannel,
    received: queue.SimpleQueue[FromController],
) -> messages.Leave:
    """Step until the controller ends the job; return its message."""
    job, model = JobConfig.model_validate_json(start.job), rank.model
    transfers = None if join.all_on_one_host else _transfers(job, Path(start.transfer_folder), rank.place)
    budget = kv_budget(job, model, rank.place, start, join.num_local_ranks)
    worker = make_worker(job, rank, start, budget, transfers)
    feed = Feed(channel, received, worker.telemetry.expert_counts, job.cluster.num_ranks)
    try:
        worker.run(feed)
    finally:
        feed.send_steps()
    feed.send_experts()
    leave = feed.wait_for_leave()
    if leave.stay and worker.telemetry.placement != rank.placement:
        placements = first_placements(job, model.config, rank.slots, rank.mesh)
        model.place_experts(Path(job.model.path), placements, rank.mesh.rank)
    return leave


def _graphs(model: Transformer, place: RankPlace, job: JobConfig) -> str | None:
    """Return a sentence for the user about this rank's CUDA graphs; None on a CPU, where none are expected."""
    switched_off = job.cluster.graphs == "off"
    reason = why_not_recorded(model, switched_off=switched_off) if place.runs_decode else ON_HOST
    if reason == ON_HOST:
        return None
    return "decode steps run as CUDA graphs" if reason is None else f"decode steps run as no CUDA graphs: {reason}"


def _sharing(job: JobConfig, join: messages.Join, device: torch.device) -> str | None:
    """Return a sentence for the user if ranks share a GPU, else None."""
    num_ranks = 1 if device.type == "cpu" else ranks_per_gpu(job.cluster.exchange, join.num_local_ranks)
    return None if num_ranks == 1 else f"{num_ranks} ranks share a GPU: rows between them go through the host's memory"


def _transfers(job: JobConfig, folder: Path, place: RankPlace) -> Path | BucketTransfers:
    """Return where this rank writes KV for other hosts: a folder, or in a bucket objects named by its path.

    The folder is new for each start: an earlier process of the rank, on another host, may still write and delete.
    """
    own = folder / f"rank-{place.rank}-{secrets.token_hex(4)}"
    if not is_in_bucket(job.output.dir):
        return own
    return BucketTransfers(Bucket(job.output.dir, job.s3), "/".join(own.parts[-3:]))


def _load_reports(channel: RankChannel) -> Callable[[int, int], None]:
    """Return a callback that reports the bytes of weights read to the controller, twice a second and at the end."""
    told_s = -LOADING_S

    def tell(num_bytes: int, total_bytes: int) -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if num_bytes == total_bytes or now_s - told_s >= LOADING_S:
            told_s = now_s
            channel.send(messages.Loading(num_bytes, total_bytes))

    return tell


def _say_last(channel: RankChannel, message: Failed) -> None:
    with suppress(ChannelClosedError):  # the controller is gone
        channel.send_last(message)


def _failed(error: Exception) -> Failed:
    return Failed(sanitize(f"{type(error).__name__}: {error}"))


def _controller_ended(channel: RankChannel, reason: Exception) -> NoReturn:
    """End this rank: without a controller none of its results would be kept."""
    if isinstance(reason, MalformedMessageError):
        _fail(channel, reason)
    _end(ExitCode.INTERRUPTED)


def _fail(channel: RankChannel, error: Exception) -> NoReturn:
    """Report an error of a thread that sends or reads messages, and end."""
    with suppress(ChannelClosedError):
        channel.send_now(_failed(error))
    _end(ExitCode.INTERNAL)


def _end(code: int) -> NoReturn:
    """End the process at once: threads of libraries may be stuck in a collective that the other ranks have left."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
