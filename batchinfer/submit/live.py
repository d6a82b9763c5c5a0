"""The number of a run's live tasks."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LiveTasks:
    """A run's pending and running tasks, as the cluster reports them."""

    launcher: str  # 'Slurm', 'Kubernetes' or 'Ray'
    running: int
    waiting: int
    problems: list[str] = field(default_factory=list)
