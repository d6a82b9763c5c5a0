"""Messages between a user and the driver of a run's Ray job, as files of the run folder on disk or in a bucket.

ray/wanted.json   the wanted number of tasks; 0: commit and end
ray/tasks.json    the driver's tasks
"""

from dataclasses import asdict, dataclass, field

from batchinfer.checked_json import parse_json, publish_json, read_json
from batchinfer.records import DamagedFileError
from batchinfer.run.store.interface import Storage
from batchinfer.rundir import RunDir, launcher_folder


@dataclass(frozen=True, slots=True)
class Tasks:
    """The driver's tasks by state."""

    running: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)  # for resources in the cluster
    failed: list[str] = field(default_factory=list)  # too often; not started again


def write_wanted(storage: Storage, tasks: int) -> None:
    """Request a number of tasks."""
    path = launcher_folder(storage.run, "ray") / "wanted.json"
    publish_json(path, {"tasks": tasks})
    storage.put(path)


def read_wanted(storage: Storage) -> int:
    """Return the wanted number of tasks.

    Raises:
        DamagedFileError: the file is missing.
        StoreError: the object store does not answer.
    """
    path = launcher_folder(storage.run, "ray") / "wanted.json"
    data = storage.get(path)
    if data is None:
        raise DamagedFileError(path, "it is not there")
    return int(parse_json(data, path, "tasks")["tasks"])


def write_tasks(storage: Storage, tasks: Tasks) -> None:
    """Publish the driver's tasks."""
    path = launcher_folder(storage.run, "ray") / "tasks.json"
    publish_json(path, asdict(tasks))
    storage.put(path)


def read_tasks(run: RunDir) -> Tasks:
    """Read the tasks that the driver published last, from a bucket's fetched copy; none before its first report."""
    path = launcher_folder(run, "ray") / "tasks.json"
    return Tasks(**read_json(path, "running", "waiting", "failed")) if path.exists() else Tasks()
