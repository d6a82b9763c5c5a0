"""This host: its name in a cluster, its free memory, its processor, its GPUs, and the settings of MKL that it needs.

Slurm, systemd, Docker and Kubernetes set their limits in control groups (Linux): this process's own and those above it
all count. In version 1 each controller has a tree of its own.

On Intel's processors, rows of plain PyTorch depend on their batch unless MKL is strict: it sums in another order for a
product of exactly 8 rows, say. On AMD's it keeps to one order by itself, and the same setting would take that away.
MKL reads it once, before its first product.
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
_GUESS_BYTES = 4 << 30  # of free memory, where the system does not say
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_MEMORY_FILES = (  # limit, use, and what memory.stat writes before the names of its sums; version 2, then 1
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
_QUOTA_FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))  # time of cores, per period


def processor_field(name: str) -> str | None:
    """What /proc/cpuinfo says under this name of the first processor; None where it does not."""
    try:
        with open(_INFO, encoding="utf-8") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() == name:
                    return value.strip()
                if not line.strip():  # the end of the first one
                    break
    except OSError:
        return None
    return None


def processor_name() -> str:
    """The processor's name as its maker writes it."""
    return processor_field("model name") or platform.processor() or platform.machine() or "unknown"


def processor_kind() -> str:
    """Maker, family and model; of Arm's maker and part."""
    names = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
    fields = [processor_field(name) for name in names]
    return "/".join(field for field in fields if field) or platform.machine()


def matrix_library_settings() -> dict[str, str]:
    """Environment variables for a process that is going to import torch; what the user has set goes before them."""
    return dict(_STRICT_MKL) if processor_field("vendor_id") == "GenuineIntel" else {}


def matrix_library_mode() -> str:
    """What this process's environment says of the order of MKL's sums, "" for nothing."""
    return os.environ.get("MKL_CBWR", "")


def set_up_matrix_library() -> None:
    """Give this process these variables, before it imports torch; what the user has set stays."""
    for name, value in matrix_library_settings().items():
        os.environ.setdefault(name, value)


def node_name() -> str:
    """The node by its cluster's name for it, or the host's own name."""
    return os.environ.get("BATCHINFER_NODE") or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def launcher_name() -> str:
    """Who has started this process's task, for a person."""
    return os.environ.get("BATCHINFER_LAUNCHER") or "Slurm"


def task_name() -> str | None:
    """The task that this process belongs to; None for a command that a person has started.

    That is BATCHINFER_TASK, which other launchers set, or the Slurm job, `<array>_<task>` in an array.
    """
    if named := os.environ.get("BATCHINFER_TASK"):
        return named
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def task_nodes() -> int:
    """Nodes of this process's task; 1 for a command that a person started."""
    return _count("BATCHINFER_GROUP_SIZE") or _count("SLURM_JOB_NUM_NODES") or 1


def task_restarts() -> int:
    """How often this task was started again: after a failure, after it was stopped, or by Slurm's queue."""
    return sum(map(_count, ("BATCHINFER_RESTARTS", "BATCHINFER_RESUMES", "SLURM_RESTART_COUNT")))


def free_memory_bytes() -> int:
    """Memory that can be taken without swapping, within this process's control groups (Linux), else a careful guess."""
    try:
        available = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        available = None
    free = int(available[1]) * 1024 if available else _GUESS_BYTES
    for group in _control_groups("memory"):
        for limit, used, total in _MEMORY_FILES:
            # none where the group has no limit ("max")
            with suppress(OSError, ValueError):
                left = int((group / limit).read_text()) - int((group / used).read_text())
                free = min(free, max(left + _file_bytes(group, total), 0))
    return free


def held_bytes() -> int | None:
    """Memory that this process holds by itself, as RLIMIT_DATA counts it; None where the system does not say."""
    held = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(held[1]) * 1024 if held else None


def num_cores() -> int:
    """Cores that this process can keep busy: those that it may run on, within its control groups' quotas (Linux)."""
    num = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _control_groups("cpu"):
        for files in _QUOTA_FILES:
            # none where the group has no quota ("max", -1)
            with suppress(OSError, ValueError):
                quota, period = map(int, " ".join((group / name).read_text() for name in files).split())
                if quota > 0:
                    num = min(num, math.ceil(quota / period))
    return num


def has_gpu() -> bool:
    """Whether ranks of this host will probably compute on GPUs: torch, which knows, is not there yet."""
    return Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def _count(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else 0


def _control_groups(controller: str) -> list[Path]:
    """This process's group and all above it; the folders of those that a container does not see do not exist."""
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
    """Files in the page cache: they count as used by the control group, but go when the memory is wanted."""
    try:
        parts = re.findall(rf"^{total}(?:in)?active_file (\d+)", (group / "memory.stat").read_text(), re.M)
    except OSError:
        return 0
    return sum(map(int, parts))
