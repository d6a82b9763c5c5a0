"""The rank processes of this host: started, watched, killed. Called by the controller and by other nodes' agents.

A command that will probably need a lone rank has one started before it has even read its job (`start_spare`): the
rank's imports take longer than all that the command does until then.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from batchinfer.host_info import matrix_library_settings
from batchinfer.records import ConfigError

_PREFIX = "BATCHINFER_RANK_"
_SPARE = _PREFIX + "SPARE"  # set: the other variables of this prefix come on standard input, a JSON line
# Memory that a step gives back is kept for the next one: the kernel would have to clear it again, page by page. Large
# pages: reading weights and KV all over memory takes fewer address translations (a seventh of a decode step).
_MALLOC = (
    f"glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={2**40}:glibc.malloc.top_pad={2**26}"
)


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """How a rank process finds its controller and its cores; the token shows that it belongs there.

    place: its number among the ranks of this host, from 0; with GPUs, that of its GPU.
    weight_bytes: memory for weights to touch before they are loaded, 0: none.
    """

    rank: int
    host: str
    port: int
    token: str
    place: int = 0
    weight_bytes: int = 0

    def variables(self, cores: list[int]) -> dict[str, str]:
        """As environment variables, which only the same user can read."""
        values = {"NUMBER": self.rank, "HOST": self.host, "PORT": self.port, "TOKEN": self.token}
        values |= {"PLACE": self.place, "WEIGHT_BYTES": self.weight_bytes}
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
            names = ("NUMBER", "HOST", "PORT", "TOKEN", "PLACE", "WEIGHT_BYTES")
            number, host, port, token, place, weight_bytes = (os.environ[_PREFIX + name] for name in names)
        except KeyError:
            raise ConfigError("a rank is started by `batchinfer work` or `batchinfer run`, not by hand") from None
        return cls(int(number), host, int(port), token, int(place), int(weight_bytes))

    @staticmethod
    def take_cores() -> None:
        """Keep this process to the cores that its starter chose; without a choice it may use all."""
        cores = os.environ.get(_PREFIX + "CORES")
        if cores:
            os.sched_setaffinity(0, map(int, cores.split(",")))


class LocalRanks:
    """The ranks that run on this host.

    Args:
        ranks: their numbers.
        one_host: whether there are no others: then they talk over the loopback interface only.
        weight_bytes: see RankEnvironment.
    """

    def __init__(
        self, ranks: range, host: str, port: int, token: str, *, one_host: bool, weight_bytes: int = 0
    ) -> None:
        # torchrun starts several of these on a host, with one rank each
        first = int(os.environ.get("LOCAL_RANK", "0")) if "TORCHELASTIC_RUN_ID" in os.environ else 0
        self._environments = [
            RankEnvironment(rank, host, port, token, place, weight_bytes) for place, rank in enumerate(ranks, first)
        ]
        self.one_host = one_host
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def num_ranks(self) -> int:
        return len(self._environments)

    def start(self) -> float:
        """Start all of them; none may be running. Returns since when, in Unix seconds: a spare one has begun before."""
        assert not self._processes
        started_s = time.time()
        for environment, cores in zip(self._environments, self._cores(), strict=True):
            variables = self._variables(environment, cores)
            spare = _take_spare(variables)
            if spare is not None:
                started_s = spare.started_s
            self._processes[environment.rank] = start_rank(variables) if spare is None else spare.process
        return started_s

    def may_be(self, rank: int, pid: int) -> bool:
        """Whether a caller with this process number can be the rank; of other hosts' ranks nothing is known here."""
        process = self._processes.get(rank)
        return process is None or process.pid == pid

    def ended(self) -> dict[int, str]:
        """Ranks whose process has ended, and how."""
        return {
            rank: _describe(process.returncode)
            for rank, process in self._processes.items()
            if process.poll() is not None
        }

    def all_ended_well(self) -> bool:
        return all(process.poll() == 0 for process in self._processes.values())

    def wait(self, timeout_s: float) -> None:
        """Wait until all have ended, at most this long."""
        deadline = time.monotonic() + timeout_s
        while any(process.poll() is None for process in self._processes.values()) and time.monotonic() < deadline:
            time.sleep(0.05)

    def can_reach_controller(self) -> bool:
        """Whether anybody listens where the ranks are sent."""
        environment = self._environments[0]
        try:
            socket.create_connection((environment.host, environment.port), timeout=10).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """End those that still run, also stopped ones, and wait until they are gone."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()

    def _cores(self) -> list[list[int]]:
        """Cores for each rank: its own where there are enough, else all of them share all."""
        cores = sorted(os.sched_getaffinity(0))
        share = len(cores) // self.num_ranks
        if share == 0:
            return [cores] * self.num_ranks
        return [cores[share * place : share * (place + 1)] for place in range(self.num_ranks)]

    def _variables(self, environment: RankEnvironment, cores: list[int]) -> dict[str, str]:
        return {**self._defaults(len(cores)), **os.environ, **environment.variables(cores)}

    def _defaults(self, num_cores: int) -> dict[str, str]:
        """Settings that the user may override."""
        num_threads = min(num_cores, max(1, len(os.sched_getaffinity(0)) // self.num_ranks))
        # when ranks are ended the controller says why; what torch notices of it is a page of C++ frames
        defaults = {"GLIBC_TUNABLES": _MALLOC, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        defaults |= thread_settings(num_threads) | matrix_library_settings()
        if self.one_host:
            loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
            defaults["GLOO_SOCKET_IFNAME"] = loopback
        return defaults


def has_gpu() -> bool:
    """Whether ranks of this host will probably compute on GPUs: torch, which knows, is not there yet."""
    return Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def thread_settings(num_threads: int) -> dict[str, str]:
    """Environment variables for a process that computes with so many threads.

    Torch's own threads wait awake for about 10 microseconds only: after an operation of torch they would be in the way
    of the threads of the C++ operations, and of other processes.
    """
    return {"OMP_NUM_THREADS": str(num_threads), "GOMP_SPINCOUNT": "1000"}


def start_rank(variables: dict[str, str], stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """A rank with these environment variables."""
    # standard output stays the command's own: what a rank's libraries print is for people
    command = [sys.executable, "-m", "batchinfer.rank.main"]
    return subprocess.Popen(command, env=variables, stdin=stdin, stdout=2)


@dataclass(frozen=True, slots=True)
class _Spare:
    process: subprocess.Popen[bytes]
    variables: dict[str, str]
    started_s: float  # Unix time


_spares: list[_Spare] = []  # at most one


def start_spare() -> None:
    """Start the lone rank of a job that is not known yet. Whoever calls this calls `end_spare` at the end."""
    lone = LocalRanks(range(1), "", 0, "", one_host=True)
    ((environment, cores),) = zip(lone._environments, lone._cores(), strict=True)
    variables = {**lone._variables(environment, cores), _SPARE: "1"}
    try:
        process = start_rank(variables, subprocess.PIPE)
    except OSError:
        return  # too many processes, say; the rank is started when it is needed, and then this is told
    _spares.append(_Spare(process, variables, time.time()))


def end_spare() -> None:
    """End the spare rank if nobody took it."""
    while _spares:
        process = _spares.pop().process
        process.kill()
        process.wait()


def _take_spare(variables: dict[str, str]) -> _Spare | None:
    """The spare rank, if it is there and was started with the very variables that are wanted but for its task's."""
    if not _spares or _settings(_spares[0].variables) != _settings(variables):
        end_spare()
        return None
    spare = _spares.pop()
    process = spare.process
    assert process.stdin is not None
    task = {name: value for name, value in variables.items() if name.startswith(_PREFIX)}
    try:
        process.stdin.write(json.dumps(task).encode() + b"\n")
        process.stdin.close()
    except BrokenPipeError:  # somebody has killed it
        process.wait()
        return None
    return spare


def _settings(variables: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not name.startswith(_PREFIX)}


def _describe(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (out of memory, or by hand)" if -code == signal.SIGKILL else "")
