"""The program of one rank: `python -m batchinfer.rank.main`, started by its node's controller (or torchrun).

It finds the controller through its environment, meets the other ranks of its group, loads its share of the model and
steps until the controller says that this is over. Signals are the controller's business: a rank ignores those that stop
a job, and ends by itself when the controller is gone.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    from batchinfer.stop import leave_signals_to_controller

    leave_signals_to_controller()

    from batchinfer.rank.rank_task import read_task
    from batchinfer.rank.torch_import import put_off_compilers

    put_off_compilers()
    gc.disable()  # until the model stands: all that is imported stays, and looking through it takes 0.4 s of the start
    task = read_task()

import os
import queue
import socket
import sys
import traceback
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from batchinfer.config import JobConfig
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.launch.local_ranks import RankEnvironment
from batchinfer.model.fresh_memory import FreshMemory
from batchinfer.parallel.layout import rank_places
from batchinfer.parallel.mesh import Mesh, Seat, find_store, open_store
from batchinfer.protocol.channel import Channel, ChannelClosedError, Message
from batchinfer.protocol.channel_feed import ChannelFeed, with_nouns
from batchinfer.protocol.feed import ExpertSlots
from batchinfer.rank.device import device_name, rank_device
from batchinfer.rank.load import Surroundings, load_model, make_worker
from batchinfer.rank.rank_task import RankTask
from batchinfer.rank.row_equality import equal_rows
from batchinfer.rank.warm_up import warm_up
from batchinfer.records import BatchinferError, ExitCode
from batchinfer.sanitize import sanitize
from batchinfer.stop import leave_signals_to_controller

CONNECT_S = 30.0


def main(task: Future[RankTask]) -> NoReturn:
    """Run one rank to its end."""
    leave_signals_to_controller()
    environment, memory = task.result()
    environment.take_cores()
    try:
        channel = Channel.connect(environment.host, environment.port, CONNECT_S)
    except OSError as error:
        print(f"rank {environment.rank}: no controller at {environment.host}: {error}", file=sys.stderr)
        _end(ExitCode.INTERRUPTED)
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    # without its controller nothing that a rank computes would be kept
    channel.read_on(lambda message: messages.put(with_nouns(message)), at_end=lambda: _end(ExitCode.INTERRUPTED))
    channel.send_on(at_fault=lambda error: _fail(channel, error))
    channel.send(
        {
            "type": "hello",
            "token": environment.token,
            "rank": environment.rank,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
    )
    code = _run(channel, messages, environment, memory)
    channel.close()
    _end(code)


def _run(
    channel: Channel, messages: queue.SimpleQueue[Message], environment: RankEnvironment, memory: FreshMemory | None
) -> int:
    """Take part in the job; what goes wrong is told to the controller."""
    try:
        feed = _work(channel, messages, environment, memory)
        feed.send_experts()
        channel.send_last({"type": "bye"})
        return ExitCode.OK
    except ChannelClosedError:
        return ExitCode.INTERRUPTED
    except BatchinferError as error:
        _say_last(channel, {"type": "failed", "error": sanitize(str(error)), "class": type(error).__name__})
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        _say_last(channel, _failed(error))
        return ExitCode.INTERNAL


def _work(
    channel: Channel, messages: queue.SimpleQueue[Message], environment: RankEnvironment, memory: FreshMemory | None
) -> ChannelFeed:
    message = messages.get()
    store = None
    if message["type"] == "open_store":
        store = open_store(channel.own_host)
        channel.send({"type": "store", "host": channel.own_host, "port": store.port})
        message = messages.get()
    assert message["type"] == "join", message
    job = JobConfig.model_validate_json(message["job"])
    place = rank_places(job.cluster)[environment.rank]
    if store is None and place.group_size > 1:
        store = find_store(message["store_host"], message["store_port"], job.cluster.collective_seconds)
    seat = Seat(
        rank=place.group_rank,
        size=place.group_size,
        exchange=place.exchange(job.cluster),
        one_host=message["group_on_one_host"],
        timeout_s=job.cluster.collective_seconds,
    )
    device = rank_device(job.cluster.backend, environment.place)
    mesh = Mesh.alone() if store is None else Mesh.join(seat, store, device)
    slots = message["expert_slots"].get(place.role)
    model = load_model(
        job,
        mesh,
        place,
        None if slots is None else ExpertSlots(**slots),
        device,
        memory,
        before_weights=lambda: channel.send({"type": "can_run"}),
    )
    if mesh.size == 1 and device.type == "cpu":  # on a GPU the measuring of page room does it
        warm_up(model, place.most_tokens(job.cluster))
    tokenizer = load_tokenizer(Path(job.model.path))
    moe_layers = [layer for layer in range(model.config.num_hidden_layers) if model.config.is_moe_layer(layer)]
    channel.send(
        {
            "type": "ready",
            "device": device_name(device),
            "exchange": mesh.kind,
            "moe_layers": moe_layers,
            "equal_rows": asdict(equal_rows(model, job.cluster.backend)),
        }
    )

    started = messages.get()
    if started["type"] == "leave":
        return ChannelFeed(channel, messages, {})
    assert started["type"] == "start", started
    around = Surroundings(
        most_tokens=started["most_tokens"],
        largest_tokens=started["largest_tokens"],
        num_local_ranks=message["num_local_ranks"],
        parcel_folder=None if message["all_on_one_host"] else Path(started["parcel_folder"]),
        traced=started["traced"],
        model_digests=started["model_digests"],
    )
    gc.freeze()  # what stands now stays: looking through it again and again would cost a part of every short step
    gc.enable()
    worker = make_worker(job, model, tokenizer, mesh, place, around)
    feed = ChannelFeed(channel, messages, worker.expert_tokens)
    try:
        worker.run(feed)
    finally:
        feed.send_steps()
    mesh.close()
    return feed


def _say_last(channel: Channel, message: Message) -> None:
    with suppress(ChannelClosedError):  # then nobody is there to hear it
        channel.send_last(message)


def _failed(error: Exception) -> Message:
    return {"type": "failed", "error": sanitize(f"{type(error).__name__}: {error}"), "class": ""}


def _fail(channel: Channel, error: Exception) -> NoReturn:
    """End because of what went wrong while a message was sent."""
    with suppress(ChannelClosedError):
        channel.send_now(_failed(error))
    _end(ExitCode.INTERNAL)


def _end(code: int) -> NoReturn:
    """End at once: threads of libraries may be stuck in a collective that nobody else is in any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(task)
