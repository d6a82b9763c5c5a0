"""The process of one rank: its settings, how it learns what it is, and its start."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from batchinfer import own_process
from batchinfer.host_info import matrix_library_settings, num_cores
from batchinfer.net.stream import Stream
from batchinfer.records import ConfigError
from batchinfer.stop import signals_wait

_PREFIX = "BATCHINFER_RANK_"
_SPARE = _PREFIX + "SPARE"  # set: the other variables of this prefix come on standard input, a JSON line
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
        """What the starter of this process left; a spare rank waits here until it is needed, and ends when it is not.

        Raises:
            ConfigError: it was started by hand.
        """
        if os.environ.pop(_SPARE, None):
            line = sys.stdin.readline()
            if not line:
                sys.exit()
            os.environ.update(json.loads(line))
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


def start_rank(
    variables: dict[str, str], end: socket.socket | None, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
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
        return subprocess.Popen(command, env=variables, stdin=stdin, stdout=2, pass_fds=inherited)


class SpareRank:
    """A lone rank started before its job is known: its imports take longer than all that the command does until then.

    It waits for its task. Whoever makes one calls `end` at last.
    """

    def __init__(self) -> None:
        self._variables = rank_variables(RankEnvironment(0), num_ranks=1)
        self._process: subprocess.Popen[bytes] | None = None  # None: taken, ended, or never started
        self._lock = threading.Lock()  # ranks are loaded by a thread, while this one may have been told to stop
        self.started_s = time.time()
        self._end, end = socket.socketpair()
        with suppress(OSError), end:  # too many processes, say; the rank is started when it is needed, and this is told
            self._process = start_rank({**self._variables, _SPARE: "1"}, end, subprocess.PIPE)

    def take(self, variables: dict[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket] | None:
        """Hand over the process with its task, and this end of the connection to it.

        Ends it if it was started with other settings than are wanted now.
        """
        if _settings(self._variables) != _settings(variables):
            self.end()
        process = self._let_go()
        if process is None:
            return None
        assert process.stdin is not None
        task = {name: value for name, value in variables.items() if name.startswith(_PREFIX)}
        try:
            process.stdin.write(json.dumps(task).encode() + b"\n")
            process.stdin.close()
        except BrokenPipeError:  # somebody has killed it
            process.wait()
            return None
        return process, self._end

    def end(self) -> None:
        """End the process unless somebody took it."""
        process = self._let_go()
        if process is not None:
            self._end.close()
            process.kill()
            process.wait()

    def _let_go(self) -> subprocess.Popen[bytes] | None:
        """The process, for one caller alone."""
        with self._lock:
            process, self._process = self._process, None
        return process


def _settings(variables: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not name.startswith(_PREFIX)}


def thread_settings(num_threads: int) -> dict[str, str]:
    """Environment variables for a process that computes with this number of threads.

    Torch's own threads wait awake for about 10 microseconds only: after an operation of torch they would be in the way
    of the threads of the C++ operations, and of other processes.
    """
    return {"OMP_NUM_THREADS": str(num_threads), "GOMP_SPINCOUNT": "1000"}
