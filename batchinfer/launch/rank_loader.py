"""Starting, connecting and loading of all ranks of a job, again whenever they were lost.

A rank imports and loads for about as long as the command plans: `ranks_ahead` does both at once.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

from msgspec.structs import replace

from batchinfer.clock import unix_s
from batchinfer.config import JobConfig
from batchinfer.config.rank_layout import RankPlace, rank_places
from batchinfer.launch.dead_ranks import RanksDiedError
from batchinfer.launch.host_memory import with_weights
from batchinfer.launch.local_ranks import LocalRanks
from batchinfer.launch.nodes import this_node
from batchinfer.launch.rank_group import POLL_S, RankGroup
from batchinfer.progress import Progress
from batchinfer.protocol.messages import CanRun, ExpertSlots, Join, Loading, Ready
from batchinfer.records import InterruptedRunError
from batchinfer.run.store.open import storage_of
from batchinfer.stop_signals import StopSignal

START_S = 3600.0  # for all ranks to load; a rank that was stopped in the middle must not hold the job for ever


class RankLoader:
    """The loader of a group's ranks.

    Args:
        stop: checked while waiting.
        weights: of the job, as decided: "resident" or "stream".
    """

    def __init__(self, group: RankGroup, stop: StopSignal, weights: str = "resident") -> None:
        self.group = group
        self.weights = weights
        self.started_s = 0.0  # Unix time when the ranks' processes were started
        self.loaded_s = 0.0  # and when all of them had loaded
        self.stop = stop
        self._deadline = 0.0
        self._is_closed = False
        self._loading: Future[list[Ready]] | None = None  # of ranks that were started ahead
        self._can_run = threading.Event()  # all ranks have reported CanRun
        self._loaded: tuple[Join, list[Ready]] | None = None  # of the latest load

    def load_ahead(self, join: Join) -> None:
        """Begin to start all ranks in another thread; the next call of `load` only waits for them.

        Ranks that rest, load or have loaded are left alone.
        """
        loading = self._loading
        if self.group.is_resting or (loading is not None and not (loading.done() and loading.exception())):
            return
        thread = ThreadPoolExecutor(1, "load ranks")
        self._loading = thread.submit(self._load, join)
        thread.shutdown(wait=False)

    def load(self, join: Join) -> list[Ready]:
        """Start all ranks, connect them and have them load their models; or wake resting ranks that have loaded it.

        Returns:
            The Ready message of each rank.

        Raises:
            RanksDiedError: a rank ended or a controller's deadline passed.
            BatchinferError: a rank reports that the job cannot run.
            InterruptedRunError: a signal came.
        """
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.result()
        elif self.group.wake():
            self.started_s = self.loaded_s = unix_s()
        else:
            return self._load(join)
        assert self._loaded is not None
        held, ready = self._loaded
        return ready if _placed(held) == _placed(join) else self._load(join)

    def wait_until_can_run(self) -> None:
        """Wait until all ranks, started ahead, report that backend, exchange and dtype run here.

        A lost rank is no refusal: `load` reports it, and it may be restarted.

        Raises:
            BatchinferError: a rank reports that the job cannot run.
            InterruptedRunError: a signal came.
        """
        if self.group.is_resting:
            return
        assert self._loading is not None
        while not self._can_run.wait(POLL_S):
            if self._loading.done():
                with suppress(RanksDiedError):
                    self._loading.result()
                return

    def close(self) -> None:
        """End all ranks and stop listening; may be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.exception()  # wait for its end; its error no longer matters
        self.group.close()

    def _load(self, join: Join) -> list[Ready]:
        group, places = self.group, self.group.places
        group.end()  # ranks that rest with another placement, or that an earlier load left
        self._deadline = time.monotonic() + START_S
        with Progress("load", 0, "B", phase="loading") as progress:
            self.started_s = group.start()
            while len(group.connections.hosts) < len(places):
                self._check_start()
                group.accept()
            for place in places:
                group.send(place.rank, self._joining(join, place))
            ready = self._ready(progress)
        self.loaded_s = unix_s()
        self._loaded = join, [ready[place.rank] for place in places]
        return self._loaded[1]

    def _check_start(self) -> None:
        if self.stop.requested or self._is_closed:
            raise InterruptedRunError("stopped by a signal; run the same command to go on")
        if time.monotonic() > self._deadline:
            self.group.give_up(f"the ranks were not ready within {START_S:,.0f} s")

    def _joining(self, join: Join, place: RankPlace) -> Join:
        """Return a rank's Join message with the address for other ranks and the facts about its host."""
        connections = self.group.connections
        hosts = connections.hosts
        group = [hosts[other.rank] for other in self.group.places if other.leader == place.leader]
        return replace(
            join,
            host=connections.address(place.rank),
            credentials=connections.credentials,
            num_local_ranks=list(hosts.values()).count(hosts[place.rank]),
            group_on_one_host=len(set(group)) == 1,
            all_on_one_host=len(set(hosts.values())) == 1,
        )

    def _ready(self, progress: Progress) -> dict[int, Ready]:
        """Wait for every rank's Ready message and return them; only CanRun and Loading can come before."""
        ready: dict[int, Ready] = {}
        loading: dict[int, Loading] = {}
        unable = {place.rank for place in self.group.places}
        while len(ready) < len(self.group.places):
            self._check_start()
            for rank, message in self.group.receive():
                if isinstance(message, CanRun):
                    unable.discard(rank)
                    if not unable:
                        self._can_run.set()
                    continue
                if isinstance(message, Loading):
                    loading[rank] = message
                    told = loading.values()
                    progress.set(sum(one.num_bytes for one in told), sum(one.total_bytes for one in told))
                    continue
                assert isinstance(message, Ready), f"rank {rank} sent {message}"
                ready[rank] = message
        return ready


def open_ranks(
    job: JobConfig,
    ranks: range,
    stop: StopSignal,
    *,
    host: str | None = None,
    one_host: bool = True,
) -> RankLoader:
    """Return the loader of the job's ranks, none of which is started yet.

    Args:
        ranks: the ranks that this process starts.
        host: the address at which ranks of other processes connect to this one; None: there are no such ranks.
        one_host: whether all ranks of the job are on this host.
    """
    local = LocalRanks(ranks, one_host=one_host)
    return RankLoader(RankGroup(rank_places(job.cluster), local, host), stop, job.cluster.weights)


def open_local_ranks(job: JobConfig, stop: StopSignal) -> RankLoader:
    """Return the loader of a job whose ranks all run on this host; none is started yet.

    Args:
        job: with its weights decided, see host_memory.with_weights.
    """
    return open_ranks(job, this_node(job.cluster.num_ranks).ranks, stop)


def decide_weights(job: JobConfig) -> JobConfig:
    """Return the job with its weights decided for ranks that all run on this host; see host_memory.with_weights."""
    return with_weights(job, this_node(job.cluster.num_ranks).ranks)


@contextmanager
def ranks_ahead(job: JobConfig, stop: StopSignal, *, know_experts: bool) -> Iterator[RankLoader | None]:
    """Load the ranks of a job while it is planned; the job's controller takes them over.

    Yield None for a job with a run folder (there may be nothing left to compute), if the plan will place experts, or if
    weights are streamed.

    Args:
        know_experts: whether the plan will place experts.
    """
    if know_experts or _is_begun(job):
        yield None
        return
    job = decide_weights(job)
    if job.cluster.weights == "stream":  # its memory is split by what is planned
        yield None
        return
    ranks = open_local_ranks(job, stop)
    try:
        ranks.load_ahead(join_message(job, {}))
        yield ranks
    finally:
        ranks.close()


def _is_begun(job: JobConfig) -> bool:
    storage = storage_of(job)
    storage.fetch("state")
    return storage.run.run_json.exists()


def join_message(
    job: JobConfig, slots_of_role: dict[str, ExpertSlots | None], *, most_tokens: int = 0, largest_tokens: int = 0
) -> Join:
    """Return the Join message of a job; RankLoader adds each rank's host and address.

    Args:
        most_tokens, largest_tokens: see Join.
    """
    return Join(job.model_dump_json(), slots_of_role, most_tokens=most_tokens, largest_tokens=largest_tokens)


def _placed(join: Join) -> dict[str, ExpertSlots]:
    """Return the expert slots of groups whose experts are not in order, by role."""
    return {role: slots for role, slots in join.slots_of_role.items() if slots is not None}
