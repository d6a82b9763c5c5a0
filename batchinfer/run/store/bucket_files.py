"""Files of this node's copy of a run folder, and their objects."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from batchinfer.data.bucket import Bucket
from batchinfer.manifest import Checksums, file_checksums
from batchinfer.ownership import check_folder, make_folder
from batchinfer.records import ConfigError, DamagedFileError
from batchinfer.run.store.interface import Part
from batchinfer.rundir import LAUNCHERS, RunDir
from batchinfer.whole_files import published

TRANSFERS = 8  # at a time
DIGEST_LETTERS = 16


class BucketFiles:
    """Transfers of files to and from the bucket, by their path in the copy."""

    def __init__(self, bucket: Bucket, run: RunDir) -> None:
        self._bucket, self._run = bucket, run
        self._kept: dict[Path, tuple[int, int]] = {}  # as they were when they were put
        self._sent: dict[str, str] = {}  # versions of what was fetched of what was sent

    def name(self, path: Path) -> str:
        """Return the name of a file's object."""
        return path.relative_to(self._run.root).as_posix()

    def vouched_name(self, path: Path, checksums: Checksums) -> str:
        """Return the name of the object of a file that run.json vouches for.

        Those of a plan have their digest in the name: a process that has lost its lock, and does not know yet, cannot
        write over the plan of the one that has it now.
        """
        if part_of(path, self._run) in ("outputs", "stats"):
            return self.name(path)
        return self.name(path.with_name(f"{path.stem}-{checksums.digest[:DIGEST_LETTERS]}{path.suffix}"))

    def put(self, path: Path) -> None:
        self._bucket.put(self.name(path), path)

    def put_changed(self, path: Path) -> None:
        """Upload a file unless this version was uploaded or fetched before."""
        now = _as_it_is(path)
        if self._kept.get(path) != now:
            self.put(path)
            self._kept[path] = now

    def note_kept(self, path: Path) -> None:
        """Record that the bucket has the file's current version."""
        self._kept[path] = _as_it_is(path)

    def fetch_vouched(self, path: Path, checksums: Checksums) -> None:
        """Fetch a file that run.json vouches for, damaged or not: its readers compare the checksum."""
        try:
            if path.stat().st_size == checksums.num_bytes and file_checksums(path) == checksums:
                return
        except (OSError, DamagedFileError):  # not here, or damaged: it is fetched
            pass
        self.fetch(self.vouched_name(path, checksums), path)

    def fetch(self, name: str, path: Path) -> None:
        """Fetch an object into a file.

        Raises:
            DamagedFileError: it is gone.
        """
        with published(path) as temporary:
            if not self._bucket.fetch(name, temporary):
                raise DamagedFileError(path, f"{self._bucket.uri}/{name} is gone")

    def read(self, path: Path) -> bytes | None:
        """Return the content of a file's object, None if there is none."""
        found = self._bucket.read(self.name(path))
        return None if found is None else found.data

    def fetch_sent(self) -> None:
        """Fetch the records of submissions to clusters: jobs, goals, dismissed tasks and drivers' reports."""
        listed = {item.name: item.version for launcher in LAUNCHERS for item in self._bucket.objects(launcher)}
        due = [name for name, version in listed.items() if self._sent.get(name) != version]
        self.each(lambda name: self.fetch(name, self._run.root / name), due)
        for name in due:
            self._sent[name] = listed[name]
            self.note_kept(self._run.root / name)

    def delete(self, path: Path) -> None:
        """Delete a file's object, if there is one."""
        self._kept.pop(path, None)
        self._bucket.delete(self.name(path))

    def delete_below(self, folder: str) -> None:
        """Delete all objects in a folder."""
        self.each(self._bucket.delete, [item.name for item in self._bucket.objects(folder)])

    def each(self, call: Callable[[Any], object], items: Iterable[Any]) -> None:
        """Call a function for each item, TRANSFERS of them at a time."""
        with ThreadPoolExecutor(TRANSFERS) as pool:
            for _ in pool.map(call, items):
                pass


def part_of(path: Path, run: RunDir) -> Part:
    """Return the part of a run folder that a file of its manifest belongs to."""
    if path.is_relative_to(run.outputs) or path.is_relative_to(run.dataset):
        return "outputs"
    if path.is_relative_to(run.stats):
        return "stats"
    return "tokens" if path.parent == run.tokens(0).parent else "plan"


def copies_folder() -> Path:
    """Return the default folder of this user's copies."""
    return Path(tempfile.gettempdir()) / f"batchinfer-{os.getuid()}"


def make_copy(run: RunDir) -> None:
    """Make the folder of this node's copy, writable and exchangeable for this user alone.

    Raises:
        ConfigError: it cannot be made, or it or a folder that is made for it is somebody else's.
    """
    parent = run.root.parent
    try:
        parent.parent.parent.mkdir(parents=True, exist_ok=True)
        for folder in (parent.parent, parent, run.root):
            make_folder(folder, None)
        if parent.parent == copies_folder():  # in a place where everybody may make one of this name
            check_folder(parent.parent, None, setting="output.work_dir", also_root=True)
        for folder in (parent, run.root):
            check_folder(folder, None, setting="output.work_dir")
    except OSError as error:
        raise ConfigError(
            f"cannot make this node's copy of {run.shown} in {parent.parent}: {error.strerror or error}; choose "
            "another output.work_dir"
        ) from None


def clear_copy(run: RunDir) -> None:
    """Delete the files of another run."""
    for path in run.root.iterdir():
        if path != run.lock:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _as_it_is(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
