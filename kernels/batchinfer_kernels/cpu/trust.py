"""Trust in compiled code: it is loaded only from files and folders that only this user and root can write."""

import grp
import os
import pwd
import stat
from pathlib import Path

from batchinfer_kernels.cpu.instructions import BuildError


def check_private(folder: Path) -> None:
    """Check that only this user and root can put code into a cache folder.

    Raises:
        BuildError: the folder belongs to another user, or others may write in it; the message says how to repair it.
    """
    reason = why_not_trusted(folder)
    if reason is not None:
        raise BuildError(
            f"the cache folder {folder} {reason}, so anybody's code could be in it: run `chmod go-w {folder}` if it is "
            "yours, or set XDG_CACHE_HOME to a folder of your own"
        )


def why_not_trusted(path: Path) -> str | None:
    """Return why another user than this one and root may have changed a file or folder, or None."""
    found = os.stat(path)
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {found.st_uid}"
    is_writable = found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_uid, found.st_gid)
    return "can be written by others" if found.st_mode & stat.S_IWOTH or is_writable else None


def _is_private_group(uid: int, gid: int) -> bool:
    """Return whether a group has a single member, as most systems create one per user."""
    try:
        group = grp.getgrgid(gid)
        return uid == gid and group.gr_name == pwd.getpwuid(uid).pw_name and not group.gr_mem
    except KeyError:  # containers often have no names for their host's users
        return uid == gid
