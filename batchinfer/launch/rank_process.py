"""The process of one rank: its settings, how it learns what it is, and its start."""

from __future__ import annotations

import os
import socket
import subprocess
from dataclasses import dataclass

from batchinfer import own_process
from batchinfer.host_info import matrix_library_settings, num_cores
from batchinfer.net.stream import Stream
from batchinfer.records import ConfigError
from batchinfer.stop import signals_wait

_PREFIX = "BATCHINFER_RANK_"
_SOCKET = _PREFIX + "SOCKET"  # the number of an inherited socket
# Memory that a step gives back is kept for the next one: the kernel would have to clear it again, page by page. Large
# pages: reading weights and KV all over memory takes fewer address translations (a seventh of a decode step).
MALLOC = (
    f"glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={2**40}:glibc.malloc.top_pad={2**26}"
)


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """How a rank process finds its controller and its cores.

    index: its number among the ranks of this host, from 0; with GPUs, that of its GPU.
    host, port, credentials: where the controller listens, if it is another process than the one that starts this rank.
    socket: else the number of this process's end of a socket pair.
    """

    rank: int
    index: int = 0
    host: str = ""
    port: int = 0
    credentials: str = ""
    socket: int | None = None

    def variables(self, cores: list[int]) -> dict[str, str]:
        """As environment variables, which only the same user can read."""
        values: dict[str, str | int] = {"NUMBER": self.rank, "INDEX": self.index}
        values |= {"HOST": self.host, "PORT": self.port, "CREDENTIALS": self.credentials}
        values["CORES"] = ",".join(map(str, cores))
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
        end = int(os.environ[_SOCKET]) if _SOCKET in os.environ else None
        if end is not None:
            os.set_inheritable(end, False)  # the controller is to see at once that this process has ended
        return cls(int(number), int(index), host, int(port), credentials, end)

    def connect(self, timeout_s: float) -> Stream:
        """The connection to the controller.

        Raises:
            OSError: it cannot be reached, or who answers there does not have the credentials.
        """
        if self.socket is not None:
            return Stream(socket.socket(fileno=self.socket))
        from batchinfer.net.tls import call  # most runs are on one host

        return call(self.host, self.port, self.credentials, timeout_s)

    @staticmethod
    def take_cores() -> None:
        """Keep this process to the cores that its starter chose; without a choice it may use all."""
        cores = os.environ.get(_PREFIX + "CORES")
        if cores:
            os.sched_setaffinity(0, map(int, cores.split(",")))


def rank_variables(environment: RankEnvironment, *, num_ranks: int) -> dict[str, str]:
    """All environment variables of a rank; what the user has set goes before the settings here.

    Args:
        num_ranks: of this process: each gets cores of its own where there are enough, else all of them share all.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // num_ranks
    if share:
        first = share * (environment.index % num_ranks)
        cores = cores[first : first + share]
    # all run where they may, also where a quota leaves them less time than so many cores have
    num_threads = max(1, min(share, num_cores() // num_ranks))
    # when ranks are ended the controller says why; what torch notices of it is a page of C++ frames
    settings = {"GLIBC_TUNABLES": MALLOC, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    settings |= thread_settings(num_threads) | matrix_library_settings()
    return {**settings, **os.environ, **environment.variables(cores)}


def start_rank(variables: dict[str, str], end: socket.socket | None) -> subprocess.Popen[bytes]:
    """A rank with these environment variables.

    Args:
        end: of a socket pair, for the rank; None: it calls its controller.
    """
    command = own_process.command("batchinfer.rank.main")
    inherited = [] if end is None else [end.fileno()]
    if end is not None:
        variables = {**variables, _SOCKET: str(end.fileno())}
    # standard output stays the command's own: what a rank's libraries print is for people
    with signals_wait():  # a rank ignores them, but Ctrl-C comes to it, too, before its first line has run
        return subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=2, pass_fds=inherited)


def thread_settings(num_threads: int) -> dict[str, str]:
    """Environment variables for a process that computes with this number of threads.

    Torch's own threads wait awake for about 10 microseconds only: after an operation of torch they would be in the way
    of the threads of the C++ operations, and of other processes.
    """
    return {"OMP_NUM_THREADS": str(num_threads), "GOMP_SPINCOUNT": "1000"}
