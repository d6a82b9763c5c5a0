"""Compiled code is loaded only from where nobody but this user and root can have put it."""

import grp
import os
import pwd
import stat
from pathlib import Path

from batchinfer_kernels.cpu.instructions import BuildError


def refuse_shared(folder: Path) -> None:
    """Refuse a cache folder in which others may have put code.

    Raises:
        BuildError: it is another user's, or others may write in it; the message says how to repair it.
    """
    reason = why_not_trusted(folder)
    if reason is not None:
        raise BuildError(
            f"the cache folder {folder} {reason}, so anybody's code could be in it: run `chmod go-w {folder}` if it is "
            "yours, or set XDG_CACHE_HOME to a folder of your own"
        )


def why_not_trusted(path: Path) -> str | None:
    """Why others than this user and root may have changed a file or folder, or None."""
    found = os.stat(path)
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {found.st_uid}"
    is_writable = found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_uid, found.st_gid)
    return "can be written by others" if found.st_mode & stat.S_IWOTH or is_writable else None


def _is_private_group(uid: int, gid: int) -> bool:
    """Whether a group is there for one user alone, as most systems make them."""
    try:
        group = grp.getgrgid(gid)
        return uid == gid and group.gr_name == pwd.getpwuid(uid).pw_name and not group.gr_mem
    except KeyError:  # containers often have no names for their host's users
        return uid == gid
