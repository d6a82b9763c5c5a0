"""What a person and the driver of a run's Ray job tell each other, through the run folder, wherever that is kept.

ray/wanted.json   how many tasks there should be; 0: commit and leave
ray/tasks.json    which there are
"""

from dataclasses import asdict, dataclass, field

from batchinfer.checked_json import parse_json, publish_json, read_json
from batchinfer.records import DamagedFileError
from batchinfer.run.storage import Storage
from batchinfer.rundir import RunDir, launcher_folder


@dataclass(frozen=True, slots=True)
class Tasks:
    """The driver's own account."""

    running: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)  # for room in the cluster
    failed: list[str] = field(default_factory=list)  # for good


def write_wanted(storage: Storage, tasks: int) -> None:
    """Ask for a number of tasks."""
    path = launcher_folder(storage.run, "ray") / "wanted.json"
    publish_json(path, {"tasks": tasks})
    storage.keep(path)


def read_wanted(storage: Storage) -> int:
    """The number that was asked for last.

    Raises:
        DamagedFileError: there is none.
        StoreError: the object store does not say.
    """
    path = launcher_folder(storage.run, "ray") / "wanted.json"
    data = storage.kept(path)
    if data is None:
        raise DamagedFileError(path, "it is not there")
    return int(parse_json(data, path, "tasks")["tasks"])


def write_tasks(storage: Storage, tasks: Tasks) -> None:
    """Tell which tasks there are."""
    path = launcher_folder(storage.run, "ray") / "tasks.json"
    publish_json(path, asdict(tasks))
    storage.keep(path)


def read_tasks(run: RunDir) -> Tasks:
    """The tasks as the driver saw them last, of an object store when it was fetched; none before its first look."""
    path = launcher_folder(run, "ray") / "tasks.json"
    return Tasks(**read_json(path, "running", "waiting", "failed")) if path.exists() else Tasks()
