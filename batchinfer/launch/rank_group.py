"""All ranks of a job as their controller sees them: started, met, watched, and started again when one dies.

Importing and loading take a rank as long as planning takes the command: `ranks_ahead` has both done at once.

The ranks come to the controller by TCP and show a token that only their starter knew. Those of other nodes are started
by an agent there (agent.py); to the controller they look the same. When one rank is lost the others cannot go on: all
are ended and all start anew.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeVar

from msgspec.structs import replace

from batchinfer.config import JobConfig
from batchinfer.launch.local_ranks import LocalRanks, has_gpu
from batchinfer.launch.nodes import this_node
from batchinfer.launch.rank_listener import RankListener
from batchinfer.launch.read_ahead import read_ahead
from batchinfer.model.config import load_model_config
from batchinfer.model.weight_bytes import weight_bytes
from batchinfer.parallel.layout import RankPlace, rank_places
from batchinfer.protocol.channel import Channel, ChannelClosedError
from batchinfer.protocol.messages import (
    Bye,
    CanRun,
    ExpertSlots,
    Failed,
    FromRank,
    Join,
    Leave,
    MalformedMessageError,
    Message,
    OpenStore,
    Ready,
    Start,
    StoreOpened,
)
from batchinfer.records import BatchinferError, ConfigError, InterruptedRunError, ModelError, PeerLostError
from batchinfer.rundir import RunDir, read_json
from batchinfer.stop import StopSignal

CAUSE_S = 2.0  # after the first sign of a death, how long to collect what ranks say about it
LEAVE_S = 60.0  # for ranks to finish their step and leave
START_S = 3600.0  # for all ranks to load; a rank that was stopped in the middle must not hold the job for ever
POLL_S = 0.2
REFUSALS: dict[str, type[BatchinferError]] = {kind.__name__: kind for kind in (ConfigError, ModelError)}

AnswerT = TypeVar("AnswerT", bound=FromRank)


class RanksDiedError(Exception):
    """One rank was lost, and all were ended with it; the message says which one and why.

    has_reason: the rank itself said what went wrong.
    """

    def __init__(self, text: str, *, has_reason: bool = False) -> None:
        super().__init__(text)
        self.has_reason = has_reason


@dataclass(slots=True)
class _Connected:
    channel: Channel[FromRank]
    host: str


@dataclass(slots=True)
class RankGroup:
    """See module docstring.

    Args:
        places: all ranks.
        local: those that this process starts itself.
        stop: asked while waiting.
    """

    places: list[RankPlace]
    local: LocalRanks
    listener: RankListener
    stop: StopSignal
    started_s: float = 0.0  # Unix time when the ranks' processes were started
    loaded_s: float = 0.0  # and when all of them had loaded
    _start_deadline: float = 0.0
    _is_closed: bool = False
    _loading: Future[list[Ready]] | None = None  # of ranks that were started ahead
    _can_run: threading.Event = field(default_factory=threading.Event)  # all of them have said so
    _connected: dict[int, _Connected] = field(default_factory=dict)
    _incoming: queue.Queue[tuple[Channel[FromRank], FromRank | None]] = field(default_factory=queue.Queue)

    def load_ahead(self, join: Join) -> None:
        """Begin to start all ranks in another thread; the next call of `load` only waits for them."""
        thread = ThreadPoolExecutor(1, "load ranks")
        self._loading = thread.submit(self._load, join)
        thread.shutdown(wait=False)

    def load(self, join: Join) -> list[Ready]:
        """Start all ranks, bring them together and have them load their models.

        Args:
            join: what each rank has to know for that; where its group meets is added here.

        Returns:
            What each rank said when it had loaded.

        Raises:
            RanksDiedError: one of them ended or a controller's deadline passed.
            BatchinferError: the job cannot run (a rank said so).
            InterruptedRunError: a signal came.
        """
        loading, self._loading = self._loading, None
        return self._load(join) if loading is None else loading.result()

    def refuse_if_unable(self) -> None:
        """Wait until all ranks, started ahead, know that backend, exchange and dtype run here.

        A rank that is lost is no reason to refuse: `load` says so, and it may be started again.

        Raises:
            BatchinferError: the job cannot run (a rank said so).
            InterruptedRunError: a signal came.
        """
        assert self._loading is not None
        while not self._can_run.wait(POLL_S):
            if self._loading.done():
                with suppress(RanksDiedError):
                    self._loading.result()
                return

    def begin(self, start: Start) -> None:
        """Let the loaded ranks step.

        Raises:
            RanksDiedError: one of them is gone.
        """
        for place in self.places:
            self.send(place.rank, start)

    def _load(self, join: Join) -> list[Ready]:
        self._start_deadline = time.monotonic() + START_S
        self.started_s = self.local.start()
        while len(self._connected) < len(self.places):
            self._let_in()
        leaders = {place.leader for place in self.places if place.group_size > 1}
        for leader in leaders:
            self.send(leader, OpenStore())
        stores = self._answers(leaders, StoreOpened)
        for place in self.places:
            self.send(place.rank, self._joining(join, place, stores))
        ready = self._ready()
        self.loaded_s = time.time()
        return [ready[place.rank] for place in self.places]

    def send(self, rank: int, message: Message) -> None:
        """Send to one rank.

        Raises:
            RanksDiedError: it is gone.
        """
        try:
            self._connected[rank].channel.send(message)
        except ChannelClosedError:
            raise self._died() from None

    def receive(self) -> list[tuple[int, FromRank]]:
        """What has come from ranks; waits a moment for the first message.

        Raises:
            RanksDiedError: a rank has ended without a farewell.
            BatchinferError: a rank says that the job cannot run.
        """
        messages: list[tuple[int, FromRank]] = []
        try:
            channel, message = self._incoming.get(timeout=POLL_S)
            while True:
                rank = self._rank_of(channel)
                if rank is not None:
                    if message is None or isinstance(message, Failed):
                        # give what came before it a chance to be used
                        self._incoming.put((channel, message))
                        if messages:
                            return messages
                        raise self._died()
                    messages.append((rank, message))
                channel, message = self._incoming.get_nowait()
        except queue.Empty:  # everything that has come is taken
            pass
        if not messages and self.local.ended():
            raise self._died()
        return messages

    def give_up(self, reason: str) -> NoReturn:
        """End all ranks because of something they do not notice themselves.

        Raises:
            RanksDiedError: with this reason.
        """
        self.end()
        raise RanksDiedError(reason)

    def leave(self) -> list[tuple[int, FromRank]]:
        """Ask all ranks to finish their step and go; returns their last messages. Those that do not are killed."""
        last: list[tuple[int, FromRank]] = []
        try:
            for place in self.places:
                self.send(place.rank, Leave())
            deadline = time.monotonic() + LEAVE_S
            gone: set[int] = set()
            while len(gone) < len(self.places) and time.monotonic() < deadline:
                try:
                    channel, message = self._incoming.get(timeout=POLL_S)
                except queue.Empty:
                    continue
                rank = self._rank_of(channel)
                if rank is None:
                    continue
                if message is None or isinstance(message, Bye | Failed):
                    gone.add(rank)
                else:
                    last.append((rank, message))
        except RanksDiedError:  # they are on their way out in any case
            pass
        self.end()
        return last

    def end(self) -> None:
        """End all ranks at once: those of other nodes notice that their connection is closed."""
        self.local.kill()
        for connected in self._connected.values():
            connected.channel.close()
        self._connected.clear()

    def close(self) -> None:
        """End all ranks and answer no calls any more; may be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.exception()  # it ends soon, and what went wrong matters no more
        self.end()
        self.listener.close()

    def _let_in(self) -> None:
        """Take a rank that has called; look after signs of death meanwhile."""
        try:
            channel, hello = self.listener.callers.get(timeout=POLL_S)
        except queue.Empty:
            if self.local.ended():
                raise self._died() from None
            self._check_start()
            return
        rank = hello.rank
        if not 0 <= rank < len(self.places) or not self.local.may_be(rank, hello.pid):
            channel.close()  # of an earlier start, ended meanwhile
            return
        if rank in self._connected:
            # another node has started its ranks once more: the latest one counts
            self._connected[rank].channel.close()
        self._connected[rank] = _Connected(channel, hello.host)
        channel.read_on(
            lambda message: self._incoming.put((channel, message)),
            at_end=lambda reason: self._incoming.put((channel, _last_word(reason))),
        )

    def _check_start(self) -> None:
        if self.stop.requested or self._is_closed:
            raise InterruptedRunError("stopped by a signal; run the same command to go on")
        if time.monotonic() > self._start_deadline:
            self.give_up(f"the ranks were not ready within {START_S:,.0f} s")

    def _joining(self, join: Join, place: RankPlace, stores: dict[int, StoreOpened]) -> Join:
        """With where a rank finds the others of its group, and which of them share its host."""
        hosts = {rank: connected.host for rank, connected in self._connected.items()}
        group = [hosts[other.rank] for other in self.places if other.leader == place.leader]
        store = stores.get(place.leader)
        return replace(
            join,
            store_host=store and store.host,
            store_port=store and store.port,
            num_local_ranks=list(hosts.values()).count(hosts[place.rank]),
            group_on_one_host=len(set(group)) == 1,
            all_on_one_host=len(set(hosts.values())) == 1,
        )

    def _answers(self, ranks: Iterable[int], kind: type[AnswerT]) -> dict[int, AnswerT]:
        """The next message of each of these ranks, all of this kind; nothing else can come before `Start`."""
        answers: dict[int, AnswerT] = {}
        missing = set(ranks)
        while missing:
            self._check_start()
            for rank, message in self.receive():
                assert isinstance(message, kind), f"rank {rank} sent {message}"
                missing.discard(rank)
                answers[rank] = message
        return answers

    def _ready(self) -> dict[int, Ready]:
        """What each rank says when it has loaded; before that, that nothing but weights is missing."""
        ready: dict[int, Ready] = {}
        running: set[int] = set()
        while len(ready) < len(self.places):
            self._check_start()
            for rank, message in self.receive():
                if isinstance(message, CanRun):
                    running.add(rank)
                else:
                    assert isinstance(message, Ready), f"rank {rank} sent {message}"
                    ready[rank] = message
            if len(running) == len(self.places):
                self._can_run.set()
        return ready

    def _died(self) -> Exception:
        """End all ranks; the exception to raise, which names the rank that was lost first and why."""
        said: dict[int, Failed] = {}
        deadline = time.monotonic() + CAUSE_S
        while time.monotonic() < deadline:
            try:
                channel, message = self._incoming.get(timeout=POLL_S)
            except queue.Empty:
                if self.local.ended():
                    break
                continue
            rank = self._rank_of(channel)
            if rank is not None and isinstance(message, Failed):
                said.setdefault(rank, message)
        ended = self.local.ended()
        silent = [str(rank) for rank in self._connected if rank not in said]
        self.end()
        for message in said.values():
            if message.error_class in REFUSALS:
                return REFUSALS[message.error_class](message.error)
        # a rank that complains about another one is not the cause
        culprits = {rank: how for rank, how in ended.items() if rank not in said}
        if culprits:
            return RanksDiedError("; ".join(f"rank {rank} {how}" for rank, how in culprits.items()))
        for rank, message in said.items():
            if message.error_class != PeerLostError.__name__:
                return RanksDiedError(f"rank {rank} failed: {message.error}", has_reason=True)
        for rank, message in said.items():
            return RanksDiedError(f"rank {rank}: {message.error}")
        return RanksDiedError(f"the connection to one of the ranks {', '.join(silent)} was lost")

    def _rank_of(self, channel: Channel) -> int | None:
        """The rank behind a connection; None for one that was ended before."""
        return next((rank for rank, item in self._connected.items() if item.channel is channel), None)


def _last_word(reason: Exception) -> Failed | None:
    """What the end of a connection says of the rank behind it; None: nothing, it is gone."""
    return Failed(str(reason)) if isinstance(reason, MalformedMessageError) else None


def open_group(job: JobConfig, ranks: range, host: str, stop: StopSignal, *, one_host: bool) -> RankGroup:
    """The job's ranks, none of them started yet.

    Args:
        ranks: those that this process starts.
        host: the address of this process at which they call.
        one_host: whether there are no others.
    """
    listener = RankListener(host)
    local = LocalRanks(ranks, host, listener.port, listener.token, one_host=one_host, weight_bytes=_weight_bytes(job))
    return RankGroup(rank_places(job.cluster), local, listener, stop)


@contextmanager
def ranks_ahead(job: JobConfig, stop: StopSignal, *, know_experts: bool) -> Iterator[RankGroup | None]:
    """The ranks of a job that is still to be planned, loading meanwhile; its controller takes them over.

    None for a job that has a run folder already (there may be nothing left to compute), or whose plan says which
    experts a rank holds.

    Args:
        know_experts: whether the plan will say that.
    """
    if know_experts or RunDir(Path(job.output.dir)).run_json.exists():
        yield None
        return
    node = this_node(job.cluster.num_ranks)
    ranks = open_group(job, node.ranks, "127.0.0.1", stop, one_host=True)
    try:
        read_ahead(Path(job.model.path))
        ranks.load_ahead(join_message(job, {}))
        yield ranks
    finally:
        ranks.close()


def refuse_what_cannot_run_here(job: JobConfig, ranks: RankGroup | None, stop: StopSignal) -> None:
    """Wait for the ranks' word on what the job names, where this machine decides whether it runs.

    A job that leaves backend and exchange to the machine is not held up.

    Args:
        ranks: started ahead; None: some are started for this question alone.

    Raises:
        BatchinferError: the job cannot run here; the sentence says what and why.
        InterruptedRunError: a signal came.
    """
    if not _depends_on_machine(job) or _is_planned(job):
        return
    if ranks is not None:
        ranks.refuse_if_unable()
        return
    asked = open_group(job, this_node(job.cluster.num_ranks).ranks, "127.0.0.1", stop, one_host=True)
    try:
        asked.load_ahead(join_message(job, {}))
        asked.refuse_if_unable()
    finally:
        asked.close()


def _depends_on_machine(job: JobConfig) -> bool:
    cluster = job.cluster
    if cluster.backend not in ("auto", "reference") or (cluster.exchange != "auto" and cluster.num_ranks > 1):
        return True
    # a GPU for each rank, and one that multiplies in FP8
    return has_gpu() and cluster.backend == "auto" and (cluster.num_ranks > 1 or job.model.dtype == "fp8")


def _is_planned(job: JobConfig) -> bool:
    """Whether the run folder has a whole plan, or one that cannot be read, which the planner says."""
    path = RunDir(Path(job.output.dir)).run_json
    try:
        return path.exists() and read_json(path)["state"] != "planning"
    except (ConfigError, LookupError, TypeError):
        return True


def _weight_bytes(job: JobConfig) -> int:
    """What the weights take in memory when one rank holds them all; 0 when they are spread, or nothing is known."""
    if job.cluster.num_ranks > 1:
        return 0
    try:
        return weight_bytes(load_model_config(Path(job.model.path)), job.model.dtype)
    except ModelError:  # said where the model is loaded
        return 0


def join_message(job: JobConfig, slots_of_role: dict[str, ExpertSlots | None]) -> Join:
    """What ranks have to know to load their models; where their group meets is added when they have called."""
    return Join(job.model_dump_json(), slots_of_role)
