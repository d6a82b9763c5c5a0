"""Ranks of one host, forked from a process that has imported their program once.

Importing torch takes seconds of processor time, which ranks that share cores would spend one after the other.

    controller or agent -- starts --> forking process     imports, forks, waits; computes nothing
                                      |-- rank 0          with the environment and socket of a process of its own
                                      `-- rank 1

They talk over a socket of messages, of which each rank and the forking process hold the other end: it is closed when
all of them have ended. If the forking process is killed the kernel kills its ranks.

    controller -> forking process   [{"rank", "variables"}] of all ranks, with their ends of socket pairs, if any
    rank -> controller              {"rank", "pid"}, before it does anything else
    forking process -> controller   {"rank", "code"}, the exit code, or minus the number of the signal that ended it
"""

import gc
import json
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

from batchinfer import own_process
from batchinfer.launch.rank_process import SOCKET, RankStart, start_process
from batchinfer.records import ExitCode
from batchinfer.resource_errors import explain_resource_error

_CONTROL = "BATCHINFER_RANK_CONTROL"  # the number of the inherited socket; only in forking processes
MOST_RANKS = 128  # of a forking process: the kernel passes 253 files in a message, and some 200 KB
_MOST_BYTES = 1 << 20  # of a message


class RankForks:
    """The forking process of some ranks, as their controller sees it.

    Args:
        starts: of 1 to MOST_RANKS ranks.
    """

    def __init__(self, starts: list[RankStart]) -> None:
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._has_ended = False
        self._lock = threading.Lock()
        self._control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        common = starts[0].variables
        with far:
            self._process = start_process({**common, _CONTROL: str(far.fileno())}, far)
        own = [{"rank": start.rank, "variables": dict(start.variables.items() - common.items())} for start in starts]
        ends = [start.end.fileno() for start in starts if start.end is not None]
        with suppress(OSError):  # the process has ended, which `code` tells
            socket.send_fds(self._control, [json.dumps(own).encode()], ends)

    def pid(self, rank: int) -> int | None:
        """Return the process number of a rank, or None if it does not run yet."""
        self._read(wait=False)
        return self._pids.get(rank)

    def code(self, rank: int) -> int | None:
        """Return a rank's exit code, or minus the number of the signal that ended it; None while it may run."""
        self._read(wait=False)
        return self._codes.get(rank, self._process.poll() if self._has_ended else None)

    def kill(self) -> None:
        """Kill the forking process, and with it all its ranks."""
        self._process.kill()

    def wait(self) -> None:
        """Wait until the forking process and its ranks have ended."""
        self._read(wait=True)

    def _read(self, *, wait: bool) -> None:
        """Read the waiting messages; with `wait`, all messages until the processes have ended."""
        with self._lock:
            while not self._has_ended:
                try:
                    message = self._control.recv(_MOST_BYTES, 0 if wait else socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return
                except ConnectionError:  # killed before it had read everything
                    message = b""
                if message:
                    said = json.loads(message)
                    if "pid" in said:
                        self._pids[said["rank"]] = said["pid"]
                    else:
                        self._codes[said["rank"]] = said["code"]
                else:
                    self._process.wait()
                    self._control.close()
                    self._has_ended = True


class ForkedRank:
    """A forked rank, with the methods of subprocess.Popen that LocalRanks uses."""

    def __init__(self, forks: RankForks, rank: int) -> None:
        self._forks, self._rank = forks, rank
        self.kill, self.wait = forks.kill, forks.wait  # of all of them

    @property
    def pid(self) -> int | None:
        """The process number, or None if the rank does not run yet."""
        return self._forks.pid(self._rank)

    def poll(self) -> int | None:
        """Return the exit code, or minus the number of a signal; None while the rank may run."""
        return self._forks.code(self._rank)


def fork_ranks() -> None:
    """Return in each rank, with its environment; never return in a forking process.

    A process that a controller started as a rank of its own returns at once.
    """
    descriptor = os.environ.pop(_CONTROL, None)
    if descriptor is None:
        return
    control = socket.socket(fileno=int(descriptor))
    control.set_inheritable(False)
    gc.freeze()  # else a collection in a rank would copy the memory shared with the others
    forking = os.getpid()
    message, ends, _, _ = socket.recv_fds(control, _MOST_BYTES, MOST_RANKS)
    starts = json.loads(message or b"[]")  # empty if the controller is gone
    rank_of: dict[int, int] = {}
    for number, start in enumerate(starts):
        try:
            pid = os.fork()
        except OSError as error:
            print(f"rank {start['rank']}: {explain_resource_error(error) or error}", file=sys.stderr, flush=True)
            os._exit(ExitCode.BAD_JOB)  # which ends the ranks that were forked
        if pid == 0:
            if ends:
                os.environ[SOCKET] = str(ends[number])
            for other in ends[number + 1 :]:
                os.close(other)
            _become(start, control, forking)
            return
        rank_of[pid] = start["rank"]
        if ends:
            os.close(ends[number])
    while rank_of:
        pid, status = os.wait()
        code = {"rank": rank_of.pop(pid), "code": os.waitstatus_to_exitcode(status)}
        with suppress(OSError):  # the controller is gone
            control.send(json.dumps(code).encode())
    os._exit(ExitCode.OK)


def _become(start: dict[str, Any], control: socket.socket, forking: int) -> None:
    own_process.end_with_parent(signal.SIGKILL)
    if os.getppid() != forking:  # it has ended before
        os._exit(ExitCode.INTERRUPTED)
    os.environ.update(start["variables"])
    with suppress(OSError):  # the controller is gone, as the rank's connection will tell
        control.send(json.dumps({"rank": start["rank"], "pid": os.getpid()}).encode())
    control.detach()  # stays open until this process ends
