"""Another user of this machine, who calls at every socket of a run that he can find, says something and stays."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Event, Value, get_context
from pathlib import Path
from typing import Any

import pytest

NOBODY = 65534
AS_NOBODY = pytest.mark.skipif(os.getuid() != 0, reason="NOT TESTED: only root can act as another user")
SAYS = (
    b"",
    os.urandom(4096),
    b"\x16\x03\x01\x40\x00" + b"x" * 4096,
    *(bytes([n]) + bytes(7) + b"x" * 99 for n in range(4)),
)
PER_SOCKET = 200
PREFIX = "@batchinfer-"  # of the run's abstract names
_LISTENS = "0A"


@dataclass
class Seen:
    """The findings of a stranger: ports, abstract Unix sockets, files of meetings, and whether one was readable."""

    ports: int
    names: int
    files: int
    read: int


def listening_ports(pids: list[int]) -> set[int]:
    """TCP ports at which these processes listen."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):  # closed, or ended meanwhile
                inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


@contextmanager
def another_user(pids: Callable[[], list[int]], run: Path, host: str = "127.0.0.1") -> Iterator[Callable[[], Seen]]:
    """He is there while the context is; the function says what he has found so far."""
    context = get_context("fork")
    counts = [Value("i") for _ in range(4)]
    over, (ours, his) = Event(), context.Pipe()
    process = context.Process(target=_disturb, args=(his, run, host, counts, over), daemon=True)
    process.start()
    finder = context.Process(target=_find, args=(ours, pids, over), daemon=True)
    finder.start()
    try:
        yield lambda: Seen(*(count.value for count in counts))
    finally:
        over.set()
        for each in (finder, process):
            each.kill()
            each.join()


def _find(told: Any, pids: Callable[[], list[int]], over: Any) -> None:
    known: set[int] = set()
    while not over.is_set():
        for port in listening_ports(pids()) - known:
            known.add(port)
            told.send(port)
        time.sleep(0.1)


def _disturb(told: Any, run: Path, host: str, counts: Any, over: Any) -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    ports, names, files, read = counts
    kept: list[socket.socket] = []
    known: set[str] = set()
    while not over.is_set():
        while told.poll(0.1):
            port = told.recv()
            ports.value += _call(kept, socket.AF_INET, socket.SOCK_STREAM, (host, port))
        lines = Path("/proc/net/unix").read_text().splitlines()
        for name in {line.split()[-1] for line in lines if PREFIX in line} - known:
            known.add(name)
            names.value += _call(kept, socket.AF_UNIX, socket.SOCK_SEQPACKET, "\0" + name[1:])
        for path in run.glob("work/meeting-*"):
            files.value += 1
            with suppress(OSError):
                path.read_bytes()
                read.value += 1


def _call(kept: list[socket.socket], family: int, kind: int, address: Any) -> bool:
    """Return whether anything answered at the address."""
    called = False
    for number in range(PER_SOCKET):
        caller = socket.socket(family, kind)
        caller.settimeout(0.2)
        with suppress(OSError):
            caller.connect(address)
            called = True
            kept.append(caller)
            caller.sendall(SAYS[number % len(SAYS)])
    return called
