"""Whether a process that has left its name in a run folder is still alive."""

import functools
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SILENT_S = 60.0  # without a sign of life for so long, by the file system's clock, a process of another host is gone


def this_process() -> dict[str, Any]:
    """Return the identity of this process, which `is_dead` reads from a file."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "process": process_identity(os.getpid())}


def is_dead(holder: Mapping[str, Any]) -> bool:
    """Whether a process that this one would see in /proc has ended; of others nothing is known here.

    Args:
        holder: with the keys of `this_process`.
    """
    numbering, identity = process_numbering(), str(holder["process"])
    is_visible = holder["host"] == socket.gethostname() and numbering is not None
    return is_visible and identity.startswith(f"{numbering}:") and not _exists(holder["pid"], identity)


def this_host() -> str:
    """Names what processes share that reach each other's memory: abstract sockets, and the files of /proc.

    Other hosts may have the same host name, and so may other containers on this one.
    """
    try:
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        network = ""
    return f"{socket.gethostname()}:{process_numbering()}:{network}"


@functools.cache
def process_numbering() -> str | None:
    """Names what gives this process its number: this start of the host's kernel, and the PID namespace in it.

    Containers on one host may have the same host name and boot, but other processes under the same numbers. None where
    /proc does not say, or is that of another namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace, own_number = os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self")
    except OSError:
        return None
    return f"{boot}:{namespace}" if own_number == str(os.getpid()) else None


def process_identity(pid: int) -> str | None:
    """Names one process for ever, also after its number is used again; None when it has ended or cannot be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # a zombie has ended already: it only waits to be collected
    return None if fields[0] in ("Z", "X") else f"{process_numbering()}:{fields[19]}"


def _exists(pid: int, identity: str) -> bool:
    """Whether a process is still there; one of another user may be hidden in /proc."""
    if Path(f"/proc/{pid}").exists():
        return process_identity(pid) == identity
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is there
        pass
    return True
