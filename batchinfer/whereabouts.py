"""Where this process runs, as a cluster names it. Called by session, claims and `batchinfer work`."""

from __future__ import annotations

import os
import socket


def node_name() -> str:
    """The node by Slurm's name for it, or the host's own name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def slurm_task() -> str | None:
    """The Slurm job of this process, `<array>_<task>` in an array; None outside of Slurm."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def slurm_restarts() -> int:
    """How often Slurm has put this job back into the queue and started it again."""
    text = os.environ.get("SLURM_RESTART_COUNT", "0")
    return int(text) if text.isdigit() else 0
