"""A run folder as named documents with a few operations, on a file system or in an object store.

Commands read files by path in `Storage.run`. A folder on a file system holds those files itself. For output.dir =
"s3://..." this node works on a copy: `fetch` brings parts of the run folder before they are read, and a written file
counts once `put` or `commit` has sent it. Documents are named by the path that they have in `Storage.run`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from batchinfer.rundir import LAUNCHERS, RunDir, launcher_folder

MADE = "made"  # of run.json in an object store: tells one run from an earlier one in the same place
# of a run folder: run.json and job.toml; plan/; tokens/; done marks and the results that they name; claims of units
# that are not done; stats/; outputs/ and dataset/; heartbeats of sessions; records of submissions to clusters
Part = Literal["state", "plan", "tokens", "results", "claims", "stats", "outputs", "signs", "sent"]
ALL_PARTS: tuple[Part, ...] = ("plan", "tokens", "results", "claims", "stats", "outputs", "signs")


@dataclass(frozen=True, slots=True)
class Found:
    """Content and version of a document; each write and each `touch` gives another version."""

    data: bytes
    version: str


@dataclass(frozen=True, slots=True)
class Listed:
    """A document in a listing, which may be older than the document."""

    path: Path
    num_bytes: int
    written_s: float  # Unix time by the store's clock


class WorkingCopy(Protocol):
    """Local copy of a run folder in an object store."""

    def fetch(self, *parts: Part) -> None:
        """See Storage.fetch."""

    def commit(self, *, again: bool) -> None:
        """See Storage.commit."""

    def collect_garbage(self) -> None:
        """See Storage.collect_garbage."""


class Storage(ABC):
    """The documents of one run.

    beat_s: seconds between heartbeats of a session.
    look_s: seconds between looks at a document that another process is to write.
    watch_s: seconds between looks at leases of others; inf: only when they may have run out.
    copy: this node's copy; None if documents are files that every node shares.
    """

    run: RunDir
    beat_s: float
    look_s: float
    watch_s: float
    copy: WorkingCopy | None = None

    @abstractmethod
    def check(self) -> None:
        """Check that the store offers what a run needs.

        Raises:
            ConfigError: an operation is missing, or the folder holds something else.
        """

    @abstractmethod
    def locked(self, *, doing: str) -> AbstractContextManager[None]:
        """Hold the run's lock: for one plan, finish or retry at a time.

        Args:
            doing: the work, for messages: "finish this run".
        """

    @abstractmethod
    def create(self, path: Path, data: bytes) -> bool:
        """Create a document unless its name is taken; return whether this call created it."""

    @abstractmethod
    def put(self, path: Path, data: bytes | None = None) -> None:
        """Create or replace a document atomically.

        Args:
            data: the content; None: that of the local file at `path`.
        """

    @abstractmethod
    def get(self, path: Path) -> bytes | None:
        """Return the content of a document, None if there is none."""

    @abstractmethod
    def find(self, path: Path) -> Found | None:
        """Return the content and version of a document, None if there is none."""

    @abstractmethod
    def touch(self, path: Path, data: bytes) -> None:
        """Renew a document of this process: its content stays, its version changes.

        Args:
            data: the JSON document that this process has put there.
        """

    @abstractmethod
    def names(self, folder: Path) -> Iterable[str]:
        """Return the names of documents and folders directly in a folder."""

    @abstractmethod
    def list(self, folder: Path) -> Iterable[Listed]:
        """Yield all documents in a folder and below."""

    @abstractmethod
    def delete(self, path: Path) -> None:
        """Delete a document, if there is one."""

    @abstractmethod
    def delete_folder(self, folder: Path) -> None:
        """Delete a folder whose files only this process and its ranks write."""

    @abstractmethod
    def local(self, path: Path) -> Path:
        """Return the local file of a document, with the content that the document has now."""

    def fetch(self, *parts: Part) -> None:
        """Update the local files of these parts of the run folder; do nothing on a file system."""
        if self.copy is not None:
            self.copy.fetch(*parts)

    def commit(self, *, again: bool = False) -> None:
        """Make a plan or outputs count: put the files that run.json vouches for, statistics, and run.json last.

        Args:
            again: put files that are there already, too: they may be damaged.
        """
        if self.copy is not None:
            self.copy.commit(again=again)

    def collect_garbage(self) -> None:
        """Delete what dead workers have left in an object store. To be called once all units are done."""
        if self.copy is not None:
            self.copy.collect_garbage()


def put_sent(storage: Storage) -> None:
    """Put the records of submissions to clusters that this node has written."""
    folders = [launcher_folder(storage.run, launcher) for launcher in LAUNCHERS]
    for path in [path for folder in folders for path in folder.rglob("*") if path.is_file()]:
        storage.put(path)


def put_statistics(storage: Storage, session: str) -> None:
    """Put the new statistics of a session."""
    for path in sorted(storage.run.stats.glob(f"*/{session}*.parquet")):
        storage.put(path)


def is_in_bucket(output_dir: str) -> bool:
    """Return whether output.dir names an object store."""
    return output_dir.startswith("s3://")


def uri_of(target: Path) -> str | None:
    """Return the URI that a person gave in place of a path, None if it is a path; a path drops one of its slashes."""
    text = str(target)
    return f"s3://{text.removeprefix('s3:').lstrip('/')}" if text.startswith("s3:/") else None
