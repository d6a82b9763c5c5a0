"""Facts about this host: its name in a cluster, free memory, processor, GPUs, and the MKL settings that it needs.

Slurm, systemd, Docker and Kubernetes set their limits in control groups (Linux): this process's own and those above it
all count. In version 1 each controller has its own tree.

On Intel's processors, rows of plain PyTorch depend on their batch unless MKL is strict: for example, MKL sums a product
of exactly 8 rows in another order. On AMD's processors MKL keeps to one order, which the same setting would change.
MKL reads the setting once, before its first product.
"""

import math
import os
import platform
import re
import socket
from contextlib import suppress
from pathlib import Path

_INFO = "/proc/cpuinfo"
_STRICT_MKL = {"MKL_CBWR": "AVX2,STRICT"}
_GUESS_BYTES = 4 << 30  # of free memory, if the system does not report any
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_MEMORY_FILES = (  # limit, use, and the prefix of sums in memory.stat; version 2, then 1
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
_QUOTA_FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))  # time of cores, per period


def processor_field(name: str) -> str | None:
    """Return a field of the first processor in /proc/cpuinfo, or None."""
    try:
        with open(_INFO, encoding="utf-8") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() == name:
                    return value.strip()
                if not line.strip():  # the end of the first processor
                    break
    except OSError:
        return None
    return None


def processor_name() -> str:
    """Return the processor's name as its maker writes it."""
    return processor_field("model name") or platform.processor() or platform.machine() or "unknown"


def processor_kind() -> str:
    """Return maker, family and model; of Arm's processors maker and part."""
    names = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
    fields = [processor_field(name) for name in names]
    return "/".join(field for field in fields if field) or platform.machine()


def matrix_library_settings() -> dict[str, str]:
    """Return environment variables for a process that will import torch; the user's own settings take precedence."""
    return dict(_STRICT_MKL) if processor_field("vendor_id") == "GenuineIntel" else {}


def matrix_library_mode() -> str:
    """Return this process's setting of the order of MKL's sums, "" if unset."""
    return os.environ.get("MKL_CBWR", "")


def set_up_matrix_library() -> None:
    """Set these variables in this process, before it imports torch, unless the user has set them."""
    for name, value in matrix_library_settings().items():
        os.environ.setdefault(name, value)


def node_name() -> str:
    """Return the node's name in its cluster, or the host's own name."""
    return os.environ.get("BATCHINFER_NODE") or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def launcher_name() -> str:
    """Return the launcher of this process's task, for messages."""
    return os.environ.get("BATCHINFER_LAUNCHER") or "Slurm"


def task_name() -> str | None:
    """Return the task that this process belongs to; None for a command started by a person.

    The name is BATCHINFER_TASK, which other launchers set, or the Slurm job, `<array>_<task>` in an array.
    """
    if named := os.environ.get("BATCHINFER_TASK"):
        return named
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def task_nodes() -> int:
    """Return the number of nodes of this process's task; 1 for a command started by a person."""
    return _count("BATCHINFER_GROUP_SIZE") or _count("SLURM_JOB_NUM_NODES") or 1


def task_restarts() -> int:
    """Return how often this task was restarted: after a failure, after a stop, or by Slurm's queue."""
    return sum(map(_count, ("BATCHINFER_RESTARTS", "BATCHINFER_RESUMES", "SLURM_RESTART_COUNT")))


def free_memory_bytes() -> int:
    """Return the memory that can be taken without swapping, within control groups (Linux), else a careful guess."""
    try:
        available = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        available = None
    free = int(available[1]) * 1024 if available else _GUESS_BYTES
    for group in _control_groups("memory"):
        for limit, used, total in _MEMORY_FILES:
            # ValueError if the group has no limit ("max")
            with suppress(OSError, ValueError):
                left = int((group / limit).read_text()) - int((group / used).read_text())
                free = min(free, max(left + _file_bytes(group, total), 0))
    return free


def held_bytes() -> int | None:
    """Return the private memory of this process, as RLIMIT_DATA counts it; None if the system does not report it."""
    held = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(held[1]) * 1024 if held else None


def num_cores() -> int:
    """Return the cores that this process can keep busy, within affinity and control groups' quotas (Linux)."""
    num = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _control_groups("cpu"):
        for files in _QUOTA_FILES:
            # ValueError if the group has no quota ("max"); -1 is no quota, either
            with suppress(OSError, ValueError):
                quota, period = map(int, " ".join((group / name).read_text() for name in files).split())
                if quota > 0:
                    num = min(num, math.ceil(quota / period))
    return num


def has_gpu() -> bool:
    """Return whether ranks of this host will probably compute on GPUs, without importing torch."""
    return Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def _count(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else 0


def _control_groups(controller: str) -> list[Path]:
    """Return the folders of this process's group and all above it; folders hidden from a container do not exist."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = _GROUPS / controller if controllers else _GROUPS
        own = top / path.lstrip("/")
        found += [own, *(above for above in own.parents if above.is_relative_to(top))]
    return found


def _file_bytes(group: Path, total: str) -> int:
    """Return the bytes of cached files: they count as used by the control group, but are freed on demand."""
    try:
        parts = re.findall(rf"^{total}(?:in)?active_file (\d+)", (group / "memory.stat").read_text(), re.M)
    except OSError:
        return 0
    return sum(map(int, parts))
