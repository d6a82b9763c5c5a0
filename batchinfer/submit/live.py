"""What of a run waits or runs in a cluster now."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LiveTasks:
    """A run's tasks by the account of the cluster that has them."""

    launcher: str  # 'Slurm', 'Kubernetes' or 'Ray'
    running: int
    waiting: int
    problems: list[str] = field(default_factory=list)
