"""A run folder on a file system: documents are files, created by hard links and replaced by renames."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from batchinfer.run.store.interface import Found, Listed, Storage
from batchinfer.run.store.lock import locked
from batchinfer.run.store.probe import check_file_system
from batchinfer.rundir import RunDir
from batchinfer.whole_files import create_exclusively, published, remove_folder


class FolderStorage(Storage):
    """See module docstring."""

    beat_s = 5.0
    look_s = 0.2
    watch_s = 15.0

    def __init__(self, run: RunDir) -> None:
        self.run = run

    def check(self) -> None:
        check_file_system(self.run)

    def locked(self, *, doing: str) -> AbstractContextManager[None]:
        return locked(self.run, doing=doing)

    def create(self, path: Path, data: bytes) -> bool:
        if path.exists():  # cheaper than to write a file that gets no name
            return False
        # a file server that is asked twice, since its first answer was lost, says that the name is taken
        return create_exclusively(path, data.decode()) or self.get(path) == data

    def put(self, path: Path, data: bytes | None = None) -> None:
        if data is not None:  # else the local file is the document
            with published(path) as temporary:
                temporary.write_bytes(data)

    def get(self, path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

    def find(self, path: Path) -> Found | None:
        try:
            # opened: a network file system asks its server for the date then
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                return Found(file.read(), f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}")
        except FileNotFoundError:
            return None
        except OSError:  # the document exists and cannot be read
            return Found(b"", "unreadable")

    def touch(self, path: Path, data: bytes) -> None:
        os.utime(path)  # the date is the file system's own time

    def names(self, folder: Path) -> Iterable[str]:
        try:
            return os.listdir(folder)
        except FileNotFoundError:
            return ()

    def list(self, folder: Path) -> Iterator[Listed]:
        for root, _, names in os.walk(folder):
            for path in (Path(root, name) for name in names):
                try:
                    status = path.stat()
                except FileNotFoundError:  # deleted since
                    continue
                yield Listed(path, status.st_size, status.st_mtime)

    def delete(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def delete_folder(self, folder: Path) -> None:
        remove_folder(folder)

    def local(self, path: Path) -> Path:
        return path
