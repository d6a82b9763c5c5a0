"""The rank processes of this host: start, watch and kill."""

import os
import signal
import socket
import subprocess
import time

from batchinfer.clock import unix_s
from batchinfer.host_info import has_gpu
from batchinfer.launch.nodes import MeetingPoint
from batchinfer.launch.rank_forks import MOST_RANKS, ForkedRank, RankForks
from batchinfer.launch.rank_process import RankEnvironment, RankStart, rank_variables, start_rank
from batchinfer.net.stream import Stream


class LocalRanks:
    """The ranks that run on this host.

    Args:
        ranks: numbers of the ranks.
        controller: address to which the ranks connect; None: this process, by socket pairs.
        one_host: whether all ranks of the job are on this host.
    """

    def __init__(
        self,
        ranks: range,
        *,
        controller: MeetingPoint | None = None,
        one_host: bool = True,
    ) -> None:
        # torchrun starts several of these on a host, with one rank each
        first = int(os.environ.get("LOCAL_RANK", "0")) if "TORCHELASTIC_RUN_ID" in os.environ else 0
        call = () if controller is None else (controller.host, controller.port, controller.credentials)
        self._environments = [RankEnvironment(rank, index, *call) for index, rank in enumerate(ranks, first)]
        self._controller = controller
        self.one_host = one_host
        self.streams: list[Stream] = []  # to each rank, unless they connect to another process
        self._processes: dict[int, subprocess.Popen[bytes] | ForkedRank] = {}

    @property
    def num_ranks(self) -> int:
        return len(self._environments)

    def start(self) -> float:
        """Start the ranks, of which none may be running; return when, in Unix seconds."""
        assert not self._processes
        started_s = unix_s()
        starts = [self._prepare(environment) for environment in self._environments]
        self._processes = start_ranks(starts)
        for start in starts:
            if start.end is not None:
                start.end.close()
        return started_s

    def may_be(self, rank: int, pid: int) -> bool:
        """Return whether a caller with this process number can be the rank; always True for ranks of other hosts."""
        process = self._processes.get(rank)
        return process is None or process.pid == pid

    def ended(self) -> dict[int, str]:
        """Return the end of each ended process, as text, by rank."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: _describe(code) for rank, code in codes.items() if code is not None}

    def all_ended_well(self) -> bool:
        return all(process.poll() == 0 for process in self._processes.values())

    def wait(self, timeout_s: float) -> None:
        """Wait until all ranks have ended, at most this long."""
        deadline = time.monotonic() + timeout_s
        while any(process.poll() is None for process in self._processes.values()) and time.monotonic() < deadline:
            time.sleep(0.05)

    def can_reach_controller(self) -> bool:
        """Return whether a process listens at the controller's address."""
        assert self._controller is not None
        try:
            socket.create_connection((self._controller.host, self._controller.port), timeout=10).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """Kill the ranks that still run, also stopped ones, and wait until they have ended."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()
        self.streams.clear()

    def _prepare(self, environment: RankEnvironment) -> RankStart:
        end = None
        if self._controller is None:
            near, end = socket.socketpair()
            self.streams.append(Stream(near))
        return RankStart(environment.rank, rank_variables(environment, num_ranks=self.num_ranks), end)


def start_ranks(starts: list[RankStart]) -> dict[int, subprocess.Popen[bytes] | ForkedRank]:
    """Start ranks on this host; return their processes by rank.

    Several ranks are forked from one process, except next to GPUs, where each has cores enough to import for itself.
    """
    if len(starts) < 2 or has_gpu():
        return {start.rank: start_rank(start) for start in starts}
    processes: dict[int, subprocess.Popen[bytes] | ForkedRank] = {}
    for first in range(0, len(starts), MOST_RANKS):
        forks = RankForks(starts[first : first + MOST_RANKS])
        processes |= {start.rank: ForkedRank(forks, start.rank) for start in starts[first : first + MOST_RANKS]}
    return processes


def _describe(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (out of memory, or by hand)" if -code == signal.SIGKILL else "")
