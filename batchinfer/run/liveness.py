"""Check whether a process that is named in a run folder is still alive."""

import functools
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SILENT_S = 60.0  # without a sign of life, by the file system's clock, after which another host's process counts as dead


def this_process() -> dict[str, Any]:
    """Return the identity of this process, which `is_dead` reads from a file."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "process": process_identity(os.getpid())}


def is_dead(holder: Mapping[str, Any]) -> bool:
    """Return whether a process has ended; False if it is not visible in /proc here, as on another host.

    Args:
        holder: with the keys of `this_process`.
    """
    numbering, identity = process_numbering(), str(holder["process"])
    is_visible = holder["host"] == socket.gethostname() and numbering is not None
    return is_visible and identity.startswith(f"{numbering}:") and not _exists(holder["pid"], identity)


def this_host() -> str:
    """Return a name that two processes share if they can reach each other's abstract sockets and /proc entries.

    The host name is not enough: other hosts, and containers on this one, may have the same.
    """
    try:
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        network = ""
    return f"{socket.gethostname()}:{process_numbering()}:{network}"


@functools.cache
def process_numbering() -> str | None:
    """Return a name of this boot and PID namespace, in which a process id names one process at a time.

    Containers on one host may have the same host name and boot, but the same id names another process in each. None if
    /proc is missing or belongs to another namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace, own_number = os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self")
    except OSError:
        return None
    return f"{boot}:{namespace}" if own_number == str(os.getpid()) else None


def process_identity(pid: int) -> str | None:
    """Return a name of a process that stays unique after its id is reused; None if it has ended or is not visible."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # a zombie has ended: only its parent has not collected its exit status
    return None if fields[0] in ("Z", "X") else f"{process_numbering()}:{fields[19]}"


def _exists(pid: int, identity: str) -> bool:
    """Return whether a process is running; /proc may hide processes of other users."""
    if Path(f"/proc/{pid}").exists():
        return process_identity(pid) == identity
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is there
        pass
    return True
