"""The rank processes of this host: started, watched, killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time

from batchinfer.launch.rank_process import RankEnvironment, SpareRank, rank_variables, start_rank


class LocalRanks:
    """The ranks that run on this host.

    Args:
        ranks: their numbers.
        one_host: whether there are no others: then they talk over the loopback interface only.
        weight_bytes: see RankEnvironment.
        spare: taken for a lone rank if it fits.
    """

    def __init__(
        self,
        ranks: range,
        host: str,
        port: int,
        token: str,
        *,
        one_host: bool,
        weight_bytes: int = 0,
        spare: SpareRank | None = None,
    ) -> None:
        # torchrun starts several of these on a host, with one rank each
        first = int(os.environ.get("LOCAL_RANK", "0")) if "TORCHELASTIC_RUN_ID" in os.environ else 0
        self._environments = [
            RankEnvironment(rank, host, port, token, index, weight_bytes) for index, rank in enumerate(ranks, first)
        ]
        self.one_host = one_host
        self._spare = spare
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def num_ranks(self) -> int:
        return len(self._environments)

    def start(self) -> float:
        """Start all of them; none may be running. Returns since when, in Unix seconds: a spare one has begun before."""
        assert not self._processes
        started_s = time.time()
        spare, self._spare = self._spare, None
        for environment in self._environments:
            variables = rank_variables(environment, num_ranks=self.num_ranks, one_host=self.one_host)
            taken = spare and spare.take(variables)
            if spare is not None and taken is not None:
                started_s = spare.started_s
            self._processes[environment.rank] = taken or start_rank(variables)
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


def _describe(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (out of memory, or by hand)" if -code == signal.SIGKILL else "")
