"""Ranks for tests: threads of this process that meet at queues, and real processes that meet at a store."""

from __future__ import annotations

import itertools
import json
import os
import queue
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from batchinfer.net.credentials import make_credentials
from batchinfer.parallel.exchange import MAX_UNDER_WAY, DistributedExchange, Exchange, PendingRows, ReceivedRows
from batchinfer.parallel.shared_memory import SharedMemoryExchange
from batchinfer.parallel.staged_exchange import StagedExchange
from batchinfer.parallel.tls_exchange import Meeting, TlsExchange
from batchinfer.records import PeerLostError
from support.rank_forge import fork_server

DEADLINE_S = 60.0  # of every wait in here: a test that hangs fails
SPOILED = 255  # in a row of floats all NaN

ResultT = TypeVar("ResultT")


class ThreadedMesh:
    """A group of ranks that are threads: one queue for each pair of ranks, and sending never waits.

    Stricter than the real ones: a buffer is spoiled until it is filled, and received rows are spoiled as soon as the
    interface says that they are no longer valid.
    """

    def __init__(self, size: int, *, timeout_s: float = DEADLINE_S):
        self.size = size
        self.timeout_s = timeout_s
        pairs = itertools.product(range(size), repeat=2)
        self.queues: dict[tuple[int, int], queue.SimpleQueue[_Message | None]] = {
            (source, target): queue.SimpleQueue() for source, target in pairs
        }
        self.members = [ThreadedExchange(self, rank) for rank in range(size)]

    def run(self, work: Callable[[ThreadedExchange], ResultT]) -> list[ResultT]:
        """Run `work` for each rank in a separate thread; return the results by rank or raise the first error."""
        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(self._run_one, work, member) for member in self.members]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, PeerLostError)):
            raise error
        return [future.result() for future in futures]

    def _run_one(self, work: Callable[[ThreadedExchange], ResultT], member: ThreadedExchange) -> ResultT:
        try:
            return work(member)
        except BaseException:
            member.close()
            raise


@dataclass(frozen=True, slots=True)
class _Message:
    sequence: int
    rows: torch.Tensor
    counts: list[int]
    sent_s: float


class ThreadedExchange:
    """One member of a ThreadedMesh; see Exchange."""

    def __init__(self, mesh: ThreadedMesh, rank: int):
        self.rank, self.size = rank, mesh.size
        self._mesh = mesh
        self._num_started = 0
        self._received: list[ReceivedRows] = []

    def buffer(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        """See Exchange."""
        assert self._num_started - len(self._received) < MAX_UNDER_WAY, "too many exchanges under way"
        return torch.full((num_rows, row_bytes), SPOILED, dtype=torch.uint8)

    def start(self, rows: torch.Tensor, counts: list[list[int]]) -> PendingRows:
        """See Exchange."""
        sizes = [sum(rank_counts) for rank_counts in counts]
        assert len({len(rank_counts) for rank_counts in counts}) == 1, "not the same number of counts for all ranks"
        assert sum(sizes) == len(rows), f"{len(rows)} rows, but counts for {sum(sizes)}"
        sequence, sent_s = self._num_started, time.time()
        for target, part in enumerate(rows.clone().split(sizes)):
            self._mesh.queues[self.rank, target].put(_Message(sequence, part, list(counts[target]), sent_s))
        self._num_started += 1
        if sequence >= MAX_UNDER_WAY:
            for received in self._received[sequence - MAX_UNDER_WAY].rows:
                received.fill_(SPOILED)
        return PendingRows(partial(self._receive, sequence))

    def _receive(self, sequence: int) -> ReceivedRows:
        """The rows of one exchange from all ranks."""
        assert sequence == len(self._received), f"exchange {sequence} is waited for as number {len(self._received)}"
        messages = [self._next_message(source) for source in range(self.size)]
        assert all(message.sequence == sequence for message in messages), "ranks are at different exchanges"
        arrived_s = max(message.sent_s for message in messages)
        self._received.append(
            ReceivedRows(
                [message.rows for message in messages], [message.counts for message in messages], arrived_s, arrived_s
            )
        )
        return self._received[-1]

    def close(self) -> None:
        """See Exchange."""
        for target in range(self.size):
            self._mesh.queues[self.rank, target].put(None)

    def _next_message(self, source: int) -> _Message:
        try:
            message = self._mesh.queues[source, self.rank].get(timeout=self._mesh.timeout_s)
        except queue.Empty:
            raise PeerLostError(f"rank {source} did not answer within {self._mesh.timeout_s:g} s") from None
        if message is None:
            raise PeerLostError(f"rank {source} has ended")
        return message


@contextmanager
def shared_memory_group(size: int) -> Iterator[list[SharedMemoryExchange]]:
    """SharedMemoryExchange of each rank, all in this process, connected by threads and closed at the end."""
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as pool, ExitStack() as stack:
        futures = [pool.submit(SharedMemoryExchange, store, rank, size, timeout_s=DEADLINE_S) for rank in range(size)]
        members = [future.result() for future in futures]
        for member in members:
            stack.callback(member.close)
        yield members


def open_exchange(kind: str, store: dist.Store, rank: int, size: int, timeout_s: float) -> Exchange:
    """Open the exchange "shared", "staged", "tls" or "gloo" as the mesh of a real rank does."""
    if kind in ("shared", "staged"):
        exchange = SharedMemoryExchange(store, rank, size, timeout_s=timeout_s)
        return exchange if kind == "shared" else StagedExchange(exchange, torch.device("cpu"))
    if kind == "tls":
        return TlsExchange(store, rank, size, meeting(store, rank), timeout_s=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    assert dist.group.WORLD is not None
    return DistributedExchange(dist.group.WORLD)


def meeting(store: dist.Store, rank: int) -> Meeting:
    """Return the meeting of a rank on this host; rank 0 makes the credentials."""
    if rank == 0:
        store.set("credentials", make_credentials())
    return Meeting("127.0.0.1", store.get("credentials").decode())


@dataclass(slots=True)
class RankProcesses:
    """`work(rank, size, store, *arguments)` in a process per rank, `work` being a function of a module.

    Use as a context: processes that are left at its end are killed. What a rank returns must fit into JSON.
    """

    folder: Path
    size: int
    work: Callable[..., Any]
    arguments: Sequence[Any] = ()
    _processes: list[BaseProcess] = field(init=False, default_factory=list)

    def __enter__(self) -> RankProcesses:
        # forking takes a tenth of the time of a new interpreter
        context = fork_server()
        for rank in range(self.size):
            arguments = (self._path(rank), self.work, rank, self.size, *self.arguments)
            self._processes.append(context.Process(target=_run_rank, args=arguments, daemon=True))
            self._processes[-1].start()
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.kill()  # a stopped one too
            process.join()
            process.close()

    def results(self, ranks: Sequence[int] | None = None) -> list[Any]:
        """Return the results of these ranks (None: all); fail if one of them failed or does not end."""
        end_s = time.monotonic() + DEADLINE_S
        results = []
        for rank in range(self.size) if ranks is None else ranks:
            self._processes[rank].join(max(end_s - time.monotonic(), 0.0))
            code = self._processes[rank].exitcode
            assert code is not None, f"rank {rank} does not end"
            assert self._path(rank).exists(), f"rank {rank} ended with {code} and without a result"
            outcome = json.loads(self._path(rank).read_text())
            assert "failure" not in outcome, f"rank {rank} failed:\n{outcome['failure']}"
            results.append(outcome["result"])
        return results

    def exit_code(self, rank: int) -> int | None:
        """Wait for a rank to end and return its exit code; minus the number of the signal that ended it."""
        self._processes[rank].join(DEADLINE_S)
        return self._processes[rank].exitcode

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.json"


def _run_rank(path: Path, work: Callable[..., Any], rank: int, size: int, *arguments: Any) -> None:
    try:
        store = dist.FileStore(str(path.parent / "store"), size)
        store.set_timeout(timedelta(seconds=DEADLINE_S))
        outcome = {"result": work(rank, size, store, *arguments)}
    except BaseException:
        outcome = {"failure": traceback.format_exc()}
    path.write_text(json.dumps(outcome))
    # like a real rank: threads may be stuck in a collective that all other ranks have left
    os._exit(0)
