"""Files that are whole or absent: written to a temporary name in the same file system, synced, and renamed.

The leftover of a killed process has a name that no reader takes, and is deleted after LEFTOVER_S.
"""

import errno
import os
import resource
import secrets
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from batchinfer.progress import note
from batchinfer.records import ConfigError

TEMPORARY = ".tmp"  # suffix of temporary files and folders, whose names begin with a dot
NAME_BYTES = 100  # of the target's name in the temporary name
REMOVALS, REMOVAL_PAUSE_S = 5, 0.1  # tries to delete a folder that other processes still use
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)  # errors of a limit of open files: no fault of a file or a request
SYNCED_TOGETHER = 4  # files that a publisher syncs at the same time
MOST_WAITING = 64  # written files that are not published yet, and are lost if the process is killed
LEFTOVER_S = 3600.0  # a temporary file unchanged for this long belongs to a dead process


class Publisher:
    """Syncs and renames files while the next ones are written; a disk syncs several in the time of one.

    At the end of its `with` statement all files are published.

    Args:
        then: called with each published file.
    """

    def __init__(self, then: Callable[[Path], None] | None = None) -> None:
        self._then = then
        self._pool = ThreadPoolExecutor(SYNCED_TOGETHER)
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._pool:
            if error is None:
                self.wait()

    def put(self, temporary: Path, target: Path) -> None:
        """Take a written file; raise the error of an earlier one."""
        self._waiting.append(self._pool.submit(self._publish, temporary, target))
        self.wait(MOST_WAITING)

    def wait(self, most_waiting: int = 0) -> None:
        """Wait until at most `most_waiting` files are unpublished.

        Raises:
            ConfigError: a file could not be written.
        """
        while len(self._waiting) > most_waiting or (self._waiting and self._waiting[0].done()):
            self._waiting.popleft().result()

    def _publish(self, temporary: Path, target: Path) -> None:
        with _whole_or_absent(temporary, target):
            _put_in_place(temporary, target)
        if self._then is not None:
            self._then(target)


@contextmanager
def published(
    target: Path, scratch: Path | None = None, *, mode: int = 0o666, publisher: Publisher | None = None
) -> Iterator[Path]:
    """Yield a temporary path; on success sync and rename it to `target`, which is therefore whole or absent.

    Args:
        scratch: folder for the temporary file (for targets in folders that users list), on the same file system;
            None: the target's folder.
        mode: of the file from its first byte on, restricted by the umask.
        publisher: syncs and renames later.

    Raises:
        ConfigError: the folder cannot be written (read only, full); the message names it.
    """
    try:
        for folder in {target.parent, scratch or target.parent}:
            folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = _create_beside(target, scratch or target.parent, mode)
    except OSError as error:
        raise cannot_write(target, error) from None
    os.close(handle)
    with _whole_or_absent(temporary, target):
        yield temporary
        if publisher is None:
            _put_in_place(temporary, target)
    if publisher is not None:
        publisher.put(temporary, target)


@contextmanager
def _whole_or_absent(temporary: Path, target: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        with suppress(OSError):  # a failing disk; `remove_leftovers` deletes the file later
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise cannot_write(target, error) from None
        raise


def _put_in_place(temporary: Path, target: Path) -> None:
    sync_file(temporary)
    temporary.rename(target)
    sync_folder(target.parent)


def cannot_write(path: Path, error: OSError) -> ConfigError:
    """Return the error for a file of the run folder that cannot be written."""
    if error.errno in NO_DESCRIPTOR:
        return too_many_files(f"cannot write {path}")
    remedy = "free space or choose" if error.errno in FULL_DISK else "choose"
    return ConfigError(f"cannot write {path}: {error.strerror or error}; {remedy} another folder")


def too_many_files(what: str) -> ConfigError:
    """Return the error for an action that failed with NO_DESCRIPTOR."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ConfigError(f"{what}: no file descriptor is left (`ulimit -n` is {limit}); raise the limit of open files")


def publish_text(target: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a small text file atomically; `mode` as in `published`."""
    with published(target, mode=mode) as temporary:
        temporary.write_text(text, encoding="utf-8")


def create_exclusively(path: Path, text: str, *, mode: int = 0o666) -> bool:
    """Create `path` with `text` in it unless it exists; return True in the one process that did.

    The content is complete when the name appears: it is written to a temporary file and linked (link fails if the name
    is taken). `mode` is as in `published`.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = _create_beside(path, path.parent, mode)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            sync_folder(path.parent)
            return True
        finally:
            os.unlink(temporary)
    except OSError as error:
        raise cannot_write(path, error) from None


def file_system_s(folder: Path) -> float:
    """Return Unix time by the clock that dates the files in a folder; this host's own may be minutes off."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"now")
            file.flush()
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()  # the folder is read-only


def remove_leftovers(folder: Path, *, deep: bool = False) -> None:
    """Delete temporary files and folders that dead processes left in a folder LEFTOVER_S ago or longer.

    Args:
        deep: in all folders below it, too.
    """
    now_s = file_system_s(folder)
    for root, folders, files in os.walk(folder):
        for name in (name for name in [*folders, *files] if name.startswith(".") and name.endswith(TEMPORARY)):
            path = Path(root, name)
            try:
                if now_s - path.lstat().st_mtime >= LEFTOVER_S:
                    shutil.rmtree(path) if name in folders else path.unlink()
            except FileNotFoundError:  # just published
                continue
            except OSError as error:
                note(f"warning: cannot delete the leftover file {path}: {error.strerror or error}")
        if not deep:
            break


def remove_folder(folder: Path) -> None:
    """Delete a folder in which processes of other hosts may still create and delete files for a moment.

    A folder that survives a few tries stays, and is deleted with the whole work folder when the run is finished.
    """
    for _ in range(REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(REMOVAL_PAUSE_S)


def sync_file(path: Path) -> None:
    """Force a file's content to disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Force a folder's names to disk, so that a rename survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _create_beside(target: Path, folder: Path, mode: int) -> tuple[int, Path]:
    """Create a temporary file for `target` in `folder`, with this mode restricted by the umask."""
    start = os.fsdecode(os.fsencode(target.name)[:NAME_BYTES])  # keeps the temporary name below the limit of names
    path = folder / f".{start}.{secrets.token_hex(4)}{TEMPORARY}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), path
