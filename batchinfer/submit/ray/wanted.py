"""What a person and the driver of a run's Ray job tell each other, through the run folder.

ray/wanted.json   how many tasks there should be; 0: commit and leave
ray/tasks.json    which there are
"""

from dataclasses import asdict, dataclass, field

from batchinfer.rundir import RunDir, launcher_folder, publish_json, read_json


@dataclass(frozen=True, slots=True)
class Tasks:
    """The driver's own account."""

    running: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)  # for room in the cluster
    failed: list[str] = field(default_factory=list)  # for good


def write_wanted(run: RunDir, tasks: int) -> None:
    """Ask for a number of tasks."""
    publish_json(launcher_folder(run, "ray") / "wanted.json", {"tasks": tasks})


def read_wanted(run: RunDir) -> int:
    """The number that was asked for last."""
    return int(read_json(launcher_folder(run, "ray") / "wanted.json", "tasks")["tasks"])


def write_tasks(run: RunDir, tasks: Tasks) -> None:
    """Tell which tasks there are."""
    publish_json(launcher_folder(run, "ray") / "tasks.json", asdict(tasks))


def read_tasks(run: RunDir) -> Tasks:
    """The tasks as the driver saw them last; none before its first look."""
    path = launcher_folder(run, "ray") / "tasks.json"
    return Tasks(**read_json(path, "running", "waiting", "failed")) if path.exists() else Tasks()
