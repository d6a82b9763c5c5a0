"""The process of one rank: its settings, its environment and its start."""

from __future__ import annotations

import os
import socket
import subprocess
from dataclasses import dataclass

from batchinfer import clock, own_process
from batchinfer.host_info import matrix_library_settings, num_cores
from batchinfer.net.stream import Stream
from batchinfer.records import ConfigError
from batchinfer.stop_signals import signals_held

_PREFIX = "BATCHINFER_RANK_"
SOCKET = _PREFIX + "SOCKET"  # the number of an inherited socket
# Memory that a step gives back is kept for the next one: the kernel would have to clear it again, page by page. Large
# pages: reading weights and KV all over memory takes fewer address translations (a seventh of a decode step).
MALLOC = (
    f"glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={2**40}:glibc.malloc.top_pad={2**26}"
)


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """Settings by which a rank process finds its controller and its GPU.

    rank: number of the rank in the job.
    index: number of the rank on this host, from 0, and of its GPU.
    host, port, credentials: of the controller, if another process than the controller starts this rank.
    socket: else the number of this process's end of a socket pair.
    """

    rank: int
    index: int = 0
    host: str = ""
    port: int = 0
    credentials: str = ""
    socket: int | None = None

    def variables(self, cores: list[int]) -> dict[str, str]:
        """Return the settings as environment variables, which only the same user can read."""
        values: dict[str, str | int] = {"NUMBER": self.rank, "INDEX": self.index}
        values |= {"HOST": self.host, "PORT": self.port, "CREDENTIALS": self.credentials}
        values |= {"CORES": ",".join(map(str, cores)), "CLOCK_NS": clock.DIFFERENCE_NS}
        return {_PREFIX + name: str(value) for name, value in values.items()}

    @classmethod
    def read(cls) -> RankEnvironment:
        """Return the settings that the starter of this process left in its environment.

        Raises:
            ConfigError: the process was started by hand.
        """
        try:
            names = ("NUMBER", "INDEX", "HOST", "PORT", "CREDENTIALS")
            number, index, host, port, credentials = (os.environ[_PREFIX + name] for name in names)
        except KeyError:
            raise ConfigError("a rank is started by `batchinfer work` or `batchinfer run`, not by hand") from None
        end = int(os.environ[SOCKET]) if SOCKET in os.environ else None
        if end is not None:
            os.set_inheritable(end, False)  # so that the controller sees at once when this process ends
        return cls(int(number), int(index), host, int(port), credentials, end)

    def connect(self, timeout_s: float) -> Stream:
        """Connect to the controller.

        Raises:
            OSError: the controller cannot be reached, or the process that answers lacks the credentials.
        """
        if self.socket is not None:
            return Stream(socket.socket(fileno=self.socket))
        from batchinfer.net.tls import call  # most runs are on one host

        return call(self.host, self.port, self.credentials, timeout_s)

    @staticmethod
    def take_cores() -> None:
        """Limit this process to the cores that its starter chose, if it chose any."""
        cores = os.environ.get(_PREFIX + "CORES")
        if cores:
            os.sched_setaffinity(0, map(int, cores.split(",")))


def rank_variables(environment: RankEnvironment, *, num_ranks: int) -> dict[str, str]:
    """Return all environment variables of a rank; the user's variables override the settings here.

    Args:
        num_ranks: number of ranks that this process starts: each gets separate cores if there are enough, else all
            share all cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // num_ranks
    if share:
        first = share * (environment.index % num_ranks)
        cores = cores[first : first + share]
    # a quota may leave ranks less time than their cores have: it limits threads, not the choice of cores
    num_threads = max(1, min(share, num_cores() // num_ranks))
    # when ranks are ended the controller reports the cause; torch would add a page of C++ frames
    settings = {"GLIBC_TUNABLES": MALLOC, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    settings |= thread_settings(num_threads) | matrix_library_settings()
    return {**settings, **os.environ, **environment.variables(cores)}


@dataclass(frozen=True, slots=True)
class RankStart:
    """The start settings of one rank.

    variables: all environment variables, see `rank_variables`.
    end: the rank's end of a socket pair; None: the rank connects to its controller.
    """

    rank: int
    variables: dict[str, str]
    end: socket.socket | None


def start_rank(start: RankStart) -> subprocess.Popen[bytes]:
    """Start one rank in a separate process."""
    if start.end is None:
        return start_process(start.variables, None)
    return start_process({**start.variables, SOCKET: str(start.end.fileno())}, start.end)


def start_process(variables: dict[str, str], inherited: socket.socket | None) -> subprocess.Popen[bytes]:
    """Start a process of a rank's program with these environment variables."""
    command = own_process.command("batchinfer.rank.main")
    files = [] if inherited is None else [inherited.fileno()]
    # a rank's libraries print to stderr: standard output is for the command's results
    with signals_held():  # a rank ignores signals, but Ctrl-C may reach it before its first line has run
        return subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=2, pass_fds=files)


def thread_settings(num_threads: int) -> dict[str, str]:
    """Return environment variables for a process that computes with this number of threads.

    Torch's threads spin for about 10 microseconds only: after an operation of torch they would take time from the
    threads of the C++ operations, and from other processes.
    """
    return {"OMP_NUM_THREADS": str(num_threads), "GOMP_SPINCOUNT": "1000"}
