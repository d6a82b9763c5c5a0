"""Where a run folder is kept: on a file system, or in an object store of which each node works on a copy.

Commands read and write files by path in `Storage.run`. On a file system that is the run folder itself, and there is
nothing else to do. For output.dir = "s3://..." it is this node's copy (bucket_storage.py): parts of it are fetched
before they are read, and what is written counts when it has been kept or committed. How units are claimed says
controller/claiming.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, Protocol

from batchinfer.run.lock import locked
from batchinfer.run.probe import check_file_system
from batchinfer.rundir import RunDir
from batchinfer.whole_files import remove_folder

MADE = "made"  # of run.json in an object store: tells one run from an earlier one in the same place
# of a run folder: run.json and job.toml; plan/; tokens/; done marks and what they vouch for; claims of units that are
# not done; stats/; outputs/ and dataset/; signs of life; what was sent to clusters
Part = Literal["state", "plan", "tokens", "results", "claims", "stats", "outputs", "signs", "sent"]
ALL_PARTS: tuple[Part, ...] = ("plan", "tokens", "results", "claims", "stats", "outputs", "signs")


class Storage(Protocol):
    """See module docstring.

    beat_s: seconds between signs of life.
    look_s: seconds between looks at what another process is to write.
    """

    run: RunDir
    beat_s: float
    look_s: float

    def check(self) -> None:
        """Refuse a place that cannot hold a run, with the reason."""

    def locked(self, *, doing: str) -> AbstractContextManager[None]:
        """Only one plan, finish or retry at a time."""

    def fetch(self, *parts: Part) -> None:
        """Have parts of the run folder at hand, as they are now."""

    def names(self, folder: Path) -> Iterable[str]:
        """Of done_marks or unit_folders: the units that are done, or that were ever claimed."""

    def keep(self, path: Path) -> None:
        """Make a file durable that only this process writes."""

    def kept(self, path: Path) -> bytes | None:
        """What another process has kept in a file; None: nothing."""

    def keep_sent(self) -> None:
        """Make durable what was sent to clusters."""

    def keep_statistics(self, session: str) -> None:
        """Make durable what is new of a session's statistics."""

    def forget(self, path: Path) -> None:
        """Delete such a file, if it is there."""

    def forget_folder(self, folder: Path) -> None:
        """Delete a folder of files that only this process and its ranks write."""

    def sweep(self) -> None:
        """Once all units are done: delete what dead workers have left where nobody else would."""

    def commit(self, *, anew: bool = False) -> None:
        """Make a plan or outputs count: the files that run.json vouches for, statistics, and run.json itself, last.

        Args:
            anew: also files that are there already: they may be damaged.
        """


class FolderStorage:
    """A run folder on a file system: what is published in it counts at once."""

    beat_s = 5.0
    look_s = 0.2

    def __init__(self, run: RunDir) -> None:
        self.run = run

    def check(self) -> None:
        check_file_system(self.run)

    def locked(self, *, doing: str) -> AbstractContextManager[None]:
        return locked(self.run, doing=doing)

    def fetch(self, *parts: Part) -> None:
        pass

    def names(self, folder: Path) -> Iterable[str]:
        try:
            return os.listdir(folder)
        except FileNotFoundError:  # nobody has claimed a unit yet
            return ()

    def keep(self, path: Path) -> None:
        pass

    def kept(self, path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

    def keep_sent(self) -> None:
        pass

    def keep_statistics(self, session: str) -> None:
        pass

    def forget(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def forget_folder(self, folder: Path) -> None:
        remove_folder(folder)

    def sweep(self) -> None:
        pass

    def commit(self, *, anew: bool = False) -> None:
        pass


def is_in_bucket(output_dir: str) -> bool:
    """Whether output.dir names an object store."""
    return output_dir.startswith("s3://")


def uri_of(target: Path) -> str | None:
    """The URI that a person gave where a path could stand: a path has one of its slashes less."""
    text = str(target)
    return f"s3://{text.removeprefix('s3:').lstrip('/')}" if text.startswith("s3:/") else None
