"""Files that are whole or absent: written beside their places, synced, and renamed.

What a process that was killed leaves has a name that nobody reads, and is deleted when it is old.
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

TEMPORARY = ".tmp"  # a file or folder that begins with a dot and ends so is nobody's result
NAME_BYTES = 100  # of what it is to become, in its name
REMOVALS, REMOVAL_PAUSE_S = 5, 0.1  # of a folder in which others are still busy
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)  # errors of a limit of open files: no fault of a file or a request
SYNCED_TOGETHER = 4  # files that a publisher syncs at the same time
MOST_WAITING = 64  # that are written and not in their places yet: what a kill may undo
LEFTOVER_S = 3600.0  # one that has not changed for so long was left by a process that has ended


class Publisher:
    """Puts files into their places while the next ones are written; a disk syncs several in the time of one.

    At the end of its `with` statement all are in their places.

    Args:
        then: called with each file that is in its place.
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
        """Take a file that is written; raises what an earlier one met."""
        self._waiting.append(self._pool.submit(self._publish, temporary, target))
        self.wait(MOST_WAITING)

    def wait(self, most_waiting: int = 0) -> None:
        """Return when no more than this many are not in their places.

        Raises:
            ConfigError: one could not be written.
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
    """A temporary path beside `target`; on success synced to disk and renamed, so that `target` is whole or absent.

    Args:
        scratch: folder for the temporary file instead, on the same file system (for folders that users list).
        mode: of the file from its first byte on, less what the umask takes.
        publisher: does that later.

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
        with suppress(OSError):  # a disk that fails: `remove_leftovers` comes later
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise cannot_write(target, error) from None
        raise


def _put_in_place(temporary: Path, target: Path) -> None:
    sync_file(temporary)
    temporary.rename(target)
    sync_folder(target.parent)


def cannot_write(path: Path, error: OSError) -> ConfigError:
    """What to tell a person when a file of the run folder cannot be written."""
    if error.errno in NO_DESCRIPTOR:
        return too_many_files(f"cannot write {path}")
    return ConfigError(f"cannot write {path}: {error.strerror or error}; free space or choose another folder")


def too_many_files(what: str) -> ConfigError:
    """What to tell a person when something cannot be done for NO_DESCRIPTOR."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ConfigError(f"{what}: no file descriptor is left (`ulimit -n` is {limit}); raise the limit of open files")


def publish_text(target: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a small text file atomically; `mode` as in `published`."""
    with published(target, mode=mode) as temporary:
        temporary.write_text(text, encoding="utf-8")


def create_exclusively(path: Path, text: str, *, mode: int = 0o666) -> bool:
    """Create `path` with `text` in it unless it exists; True for the one process that did.

    The content is complete when the name appears: it is written beside and linked (link fails when the name is taken).
    `mode` is as in `published`.

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
    """Unix time by the clock that dates the files in a folder; this host's own may be minutes off."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"now")
            file.flush()
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()  # the folder can only be read


def remove_leftovers(folder: Path, *, deep: bool = False) -> None:
    """Delete the temporary files and folders in a folder that dead processes left there, LEFTOVER_S ago or longer.

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
            except FileNotFoundError:  # it has just got its name
                continue
            except OSError as error:
                note(f"warning: cannot delete {path}, which nobody needs: {error.strerror or error}")
        if not deep:
            break


def remove_folder(folder: Path) -> None:
    """Delete a folder in which processes of other hosts may still create and delete files.

    They end soon; what cannot be deleted by then stays, and goes with the whole work folder when the run is finished.
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
    """A new file for what is to become `target`, with this mode less the umask."""
    start = os.fsdecode(os.fsencode(target.name)[:NAME_BYTES])  # the whole is no longer than a long name of a target
    path = folder / f".{start}.{secrets.token_hex(4)}{TEMPORARY}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), path
