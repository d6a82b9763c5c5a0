"""A disk of a chosen size for tests, mounted in memory: root only."""

from __future__ import annotations

import contextlib
import subprocess
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest


def remount(folder: Path, mode: str) -> None:
    """Make a mounted file system "ro" or "rw"; it is busy while a thread has a file open for writing."""
    command = ["mount", "-o", f"remount,{mode}", str(folder)]
    deadline = time.monotonic() + 30
    while (done := subprocess.run(command, check=False, capture_output=True, text=True)).returncode:
        if "busy" not in done.stderr or time.monotonic() > deadline:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
        time.sleep(0.05)


class SmallDisk:
    """A file system that can be filled, freed, and made read only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.filler = folder / "filler"

    def fill(self, *, but_bytes: int) -> None:
        """Leave only `but_bytes` free, in whole pages of memory; others may be writing meanwhile."""
        with open(self.filler, "wb", buffering=0) as file:
            with contextlib.suppress(OSError):  # the end that is wanted
                while True:
                    file.write(bytes(4096))
            file.truncate(max(0, file.tell() - but_bytes))

    def free(self) -> None:
        self.filler.unlink()

    def set_read_only(self, read_only: bool) -> None:
        """Make the disk read-only, even for root."""
        remount(self.folder, "ro" if read_only else "rw")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """32 MiB in tmp_path / "disk"."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode:
        reason = f"NOT TESTED ON A FULL OR READ-ONLY DISK: only root can mount one ({done.stderr.strip()})"
        warnings.warn(reason, stacklevel=1)
        pytest.skip(reason)
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
