"""How much memory can still be had on this host. Asked by ranks and the controller; without torch."""

from __future__ import annotations

import re
from pathlib import Path

_GUESS_BYTES = 4 << 30  # where the system does not say
_GROUP = Path("/sys/fs/cgroup")


def free_memory_bytes() -> int:
    """Memory that can be taken without swapping, within this process's control group (Linux), else a careful guess."""
    try:
        available = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        available = None
    free = int(available[1]) * 1024 if available else _GUESS_BYTES
    try:
        limit, used = (int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):
        return free  # no control group, or one without a limit ("max")
    return min(free, max(limit - used + _file_bytes(), 0))


def _file_bytes() -> int:
    """Files in the page cache: they count as used by the control group, but go when the memory is wanted."""
    try:
        parts = re.findall(r"^(?:in)?active_file (\d+)", (_GROUP / "memory.stat").read_text(), re.M)
    except OSError:
        return 0
    return sum(map(int, parts))
