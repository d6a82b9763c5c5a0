"""All ranks of a job started, brought together and loaded; again whenever they were lost.

Importing and loading take a rank as long as planning takes the command: `ranks_ahead` has both done at once.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

from msgspec.structs import replace

from batchinfer.config import JobConfig
from batchinfer.config.rank_layout import RankPlace, rank_places
from batchinfer.launch.host_memory import refuse_too_large
from batchinfer.launch.nodes import this_node
from batchinfer.launch.rank_group import POLL_S, RankGroup, RanksDiedError
from batchinfer.launch.rank_watcher import LocalRanks
from batchinfer.progress import Progress
from batchinfer.protocol.messages import CanRun, ExpertSlots, Join, Loading, Ready
from batchinfer.records import InterruptedRunError
from batchinfer.run.open_storage import storage_of
from batchinfer.stop import StopSignal

START_S = 3600.0  # for all ranks to load; a rank that was stopped in the middle must not hold the job for ever


class RankLoader:
    """Loads the ranks of a group.

    Args:
        stop: asked while waiting.
    """

    def __init__(self, group: RankGroup, stop: StopSignal) -> None:
        self.group = group
        self.started_s = 0.0  # Unix time when the ranks' processes were started
        self.loaded_s = 0.0  # and when all of them had loaded
        self.stop = stop
        self._deadline = 0.0
        self._is_closed = False
        self._loading: Future[list[Ready]] | None = None  # of ranks that were started ahead
        self._can_run = threading.Event()  # all of them have said so
        self._loaded: tuple[Join, list[Ready]] | None = None  # the latest of all

    def load_ahead(self, join: Join) -> None:
        """Begin to start all ranks in another thread; the next call of `load` only waits for them.

        Those that rest or are loading or loaded are left alone.
        """
        loading = self._loading
        if self.group.is_resting or (loading is not None and not (loading.done() and loading.exception())):
            return
        thread = ThreadPoolExecutor(1, "load ranks")
        self._loading = thread.submit(self._load, join)
        thread.shutdown(wait=False)

    def load(self, join: Join) -> list[Ready]:
        """Start all ranks, bring them together and have them load their models; or wake those that rest with it loaded.

        Returns:
            What each rank said when it had loaded.

        Raises:
            RanksDiedError: one of them ended or a controller's deadline passed.
            BatchinferError: the job cannot run (a rank said so).
            InterruptedRunError: a signal came.
        """
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.result()
        elif self.group.wake():
            self.started_s = self.loaded_s = time.time()
        else:
            return self._load(join)
        assert self._loaded is not None
        held, ready = self._loaded
        return ready if _placed(held) == _placed(join) else self._load(join)

    def refuse_if_unable(self) -> None:
        """Wait until all ranks, started ahead, know that backend, exchange and dtype run here.

        A rank that is lost is no reason to refuse: `load` says so, and it may be started again.

        Raises:
            BatchinferError: the job cannot run (a rank said so).
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
        """End all ranks and answer no calls any more; may be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.exception()  # it ends soon, and what went wrong matters no more
        self.group.close()

    def _load(self, join: Join) -> list[Ready]:
        group, places = self.group, self.group.places
        group.end()  # any that rest with another placement of the experts, or that did not get as far as this
        self._deadline = time.monotonic() + START_S
        with Progress("load", 0, "B", phase="loading") as progress:
            self.started_s = group.start()
            while len(group.connections.hosts) < len(places):
                self._check_start()
                group.let_in()
            for place in places:
                group.send(place.rank, self._joining(join, place))
            ready = self._ready(progress)
        self.loaded_s = time.time()
        self._loaded = join, [ready[place.rank] for place in places]
        return self._loaded[1]

    def _check_start(self) -> None:
        if self.stop.requested or self._is_closed:
            raise InterruptedRunError("stopped by a signal; run the same command to go on")
        if time.monotonic() > self._deadline:
            self.group.give_up(f"the ranks were not ready within {START_S:,.0f} s")

    def _joining(self, join: Join, place: RankPlace) -> Join:
        """With where other ranks reach this one, and which of them share its host."""
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
        """What each rank says when it has loaded; nothing else but CanRun and Loading can come before."""
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
    """The job's ranks, none of them started yet.

    Args:
        ranks: those that this process starts.
        host: the address of this process at which those of other processes call; None: there are none.
        one_host: whether all ranks of the job are on this host.
    """
    local = LocalRanks(ranks, one_host=one_host)
    return RankLoader(RankGroup(rank_places(job.cluster), local, host), stop)


def open_local_ranks(job: JobConfig, stop: StopSignal) -> RankLoader:
    """The ranks of a job of which all run on this host, none of them started yet.

    Raises:
        ConfigError: their weights do not fit into its memory.
    """
    ranks = this_node(job.cluster.num_ranks).ranks
    refuse_too_large(job, ranks)
    return open_ranks(job, ranks, stop)


@contextmanager
def ranks_ahead(job: JobConfig, stop: StopSignal, *, know_experts: bool) -> Iterator[RankLoader | None]:
    """The ranks of a job that is still to be planned, loading meanwhile; its controller takes them over.

    None for a job that has a run folder already (there may be nothing left to compute), or whose plan says which
    experts a rank holds.

    Args:
        know_experts: whether the plan will say that.
    """
    if know_experts or _is_begun(job):
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


def join_message(job: JobConfig, slots_of_role: dict[str, ExpertSlots | None]) -> Join:
    """What ranks have to know to load their models; which of them share a host is added when they have called."""
    return Join(job.model_dump_json(), slots_of_role)


def _placed(join: Join) -> dict[str, ExpertSlots]:
    """Where experts are of groups that do not have them in order."""
    return {role: slots for role, slots in join.slots_of_role.items() if slots is not None}
