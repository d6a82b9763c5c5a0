"""Whether the file system of a run folder can hold a run.

Claims, results and plans rely on four things: a name is created by one process only (a hard link fails when the name is
taken), a rename puts a file in the place of another at once, a folder cannot be renamed onto one that is not empty, and
what was written is read back. Folders that show an object store (s3fs, gcsfuse, mountpoint-s3) often lack some of them.
"""

import errno
import os
import shutil
import tempfile
from pathlib import Path

from batchinfer.records import ConfigError
from batchinfer.rundir import RunDir
from batchinfer.whole_files import TEMPORARY, cannot_write, remove_leftovers

REMEDY = (
    "choose a folder on a local disk or a shared file system (NFS, Lustre, CephFS), and use output.publish for s3://"
)
_NO_FAULT_OF_IT = {errno.ENOSPC, errno.EDQUOT, errno.EIO}


def check_file_system(run: RunDir) -> None:
    """Check the operations that a run folder needs in a temporary folder; delete stale ones of killed processes.

    Raises:
        ConfigError: the folder cannot be written, or something is missing; the message says what.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=".probe-", suffix=TEMPORARY, dir=run.root))
    except OSError as error:
        raise ConfigError(
            f"cannot write output.dir {run.root}: {error.strerror or error}; choose another folder"
        ) from None
    remove_leftovers(run.root)
    try:
        _create_once(folder)
        _rename_over(folder)
        _refuse_full_folder(folder)
    except _MissingError as missing:
        raise ConfigError(f"the file system of output.dir {run.root} {missing}; {REMEDY}") from None
    except OSError as error:
        raise cannot_write(run.root, error) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _MissingError(Exception):
    pass


def _missing(what: str, error: OSError) -> Exception:
    """Return the error to raise: a missing operation, or the error itself if the disk is full or failing."""
    return error if error.errno in _NO_FAULT_OF_IT else _MissingError(f"{what} ({error.strerror or error})")


def _create_once(folder: Path) -> None:
    made, name = folder / "first", folder / "once"
    try:
        made.write_text("first")
        os.link(made, name)
    except OSError as error:
        raise _missing("has no exclusive create: hard links", error) from None
    try:
        os.link(made, name)
    except OSError:
        _read_back(name, "first")
        return
    raise _MissingError("lets two processes create one name")


def _rename_over(folder: Path) -> None:
    name = folder / "renamed"
    try:
        for text in ("old", "new"):
            (folder / text).write_text(text)
            (folder / text).rename(name)
    except OSError as error:
        raise _missing("has no rename", error) from None
    _read_back(name, "new")


def _refuse_full_folder(folder: Path) -> None:
    made, taken = folder / "made", folder / "taken"
    try:
        for path in (made, taken):
            path.mkdir()
            (path / "file").write_text(path.name)
        made.rename(folder / "free")
    except OSError as error:
        raise _missing("has no rename of folders", error) from None
    try:
        (folder / "free").rename(taken)
    except OSError:
        _read_back(taken / "file", "taken")
        return
    raise _MissingError("renames a folder onto one that is not empty")


def _read_back(path: Path, text: str) -> None:
    try:
        found = path.read_text()
    except OSError as error:
        raise _missing("does not show what was written to it", error) from None
    if found != text:
        raise _MissingError("does not show what was written to it last")
