"""The protocol of launchers, and the only place where a launcher is chosen by its name."""

from collections.abc import Container
from typing import Any, Protocol, TypeVar

from batchinfer.checked_json import read_json
from batchinfer.config import JobConfig
from batchinfer.records import ConfigError
from batchinfer.run.store.interface import Storage
from batchinfer.rundir import LAUNCHERS, RunDir, submission_records
from batchinfer.submit.k8s.launcher import KubernetesLauncher
from batchinfer.submit.ray.launcher import RayLauncher
from batchinfer.submit.size import ArraySize, LiveTasks
from batchinfer.submit.slurm.launcher import SlurmLauncher


class TaskShape(Protocol):
    """The resources and placement of one task; each launcher has its own further options."""

    @property
    def nodes_per_group(self) -> int: ...


Shape = TypeVar("Shape", bound=TaskShape)


class Launcher(Protocol[Shape]):
    """A kind of cluster on which a planned run's tasks are submitted, counted, resized and cancelled.

    Every method that asks the cluster raises ConfigError if the cluster refuses or cannot be reached. Returned texts
    and lines are for a person.
    """

    def parse_size(self, text: str) -> ArraySize:
        """Parse the value of --array or --resize.

        Raises:
            ConfigError: `text` is no number of tasks, or has a limit that this launcher does not support.
        """

    def shape(self, run: RunDir, job: JobConfig, options: dict[str, Any]) -> Shape:
        """Return the shape of each task, checked without asking the cluster.

        Args:
            options: of `submit`, by the names of the shape's fields.

        Raises:
            ConfigError: an option is invalid, or the job's ranks do not fit into tasks of this shape.
        """

    def dry_run(self, run: RunDir, job: JobConfig, shape: Shape, size: ArraySize) -> str:
        """Return the commands or manifests that `submit` would send."""

    def check_cluster(self, shape: Shape) -> None:
        """Raise ConfigError if the cluster cannot be reached; called before a plan is made."""

    def submit(self, storage: Storage, job: JobConfig, shape: Shape, size: ArraySize) -> str:
        """Submit tasks of a planned run and the job that finishes it; return their names and how to follow them.

        Raises:
            ConfigError: tasks of this run are pending or running.
        """

    def submit_again(self, storage: Storage, size: ArraySize) -> str:
        """Submit tasks of the last submission's shape. Returns and raises as `submit`."""

    def resize(self, storage: Storage, size: ArraySize, busy: Container[str]) -> list[str]:
        """Change the number of pending and running tasks; return the changes, none if the number was right.

        Args:
            busy: names of tasks that hold units, which are the last to be removed.

        Raises:
            ConfigError: the run was never submitted.
        """

    def cancel(self, storage: Storage) -> list[str]:
        """End all pending and running jobs of a run, the finishing job too; return the names of the ended jobs."""

    def live_tasks(self, run: RunDir) -> LiveTasks | None:
        """Count the run's tasks in the cluster; return None if the launcher's client is not installed here."""


DEFAULT_LAUNCHER = "slurm"
_BY_NAME: dict[str, Launcher[Any]] = {"slurm": SlurmLauncher(), "k8s": KubernetesLauncher(), "ray": RayLauncher()}


def launcher_named(name: str) -> Launcher[Any]:
    """Return the launcher of --to `name`."""
    return _BY_NAME[name]


def last_launcher(run: RunDir) -> Launcher[Any] | None:
    """Return the launcher of the run's last submission, None if it was never submitted."""
    sent = [(read_json(path, "submitted_s")["submitted_s"], path.parent.name) for path in submission_records(run)]
    return _BY_NAME[max(sent)[1]] if sent else None


def launchers_of(run: RunDir) -> list[Launcher[Any]]:
    """Return every launcher to which the run was ever submitted."""
    found = {path.parent.name for path in submission_records(run)}
    return [_BY_NAME[name] for name in LAUNCHERS if name in found]


def count_live_tasks(run: RunDir) -> tuple[LiveTasks | None, list[str]]:
    """Count the run's tasks in the cluster of its last submission; return the count and the problems to report."""
    try:
        launcher = last_launcher(run)
        tasks = None if launcher is None else launcher.live_tasks(run)
    except ConfigError as error:
        return None, [str(error)]
    return tasks, [] if tasks is None else tasks.problems
