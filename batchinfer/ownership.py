"""Trust in folders: only their owner, or the one group that the job names, may change what this program reads.

    private   drwx------  alice alice    made so from its first moment
    shared    drwxrws---  alice team     output.shared_group, kv.shared_group: the members trust each other

Files in a run folder follow the umask: a user who cannot enter the folder reaches none of them. A folder made by a
person may be readable by others. It is refused when others may write, since they could replace any file in it.
"""

import grp
import os
import pwd
import shlex
import stat
from pathlib import Path

from batchinfer.records import ConfigError

PRIVATE, SHARED = 0o700, 0o2770  # setgid: files made in a shared folder belong to the group, too
SHARED_UMASK = 0o007


def group_id(name: str | None, setting: str) -> int | None:
    """Return the number of a group by its name (or the number itself, for groups without a name); None for none.

    Args:
        setting: the key in the job file, for messages.

    Raises:
        ConfigError: there is no such group, or this user is not a member of it.
    """
    if name is None:
        return None
    try:
        gid = int(name) if name.isdecimal() and len(name) < 10 else grp.getgrnam(name).gr_gid
    except (KeyError, ValueError):  # ValueError: a NUL in it
        raise ConfigError(f"{setting} is {name!r}, but this machine knows no such group; see `id`") from None
    if os.geteuid() != 0 and gid not in (os.getegid(), *os.getgroups()):
        raise ConfigError(f"{setting} is {name!r}, but {user_name(os.geteuid())} is no member of it; see `id`")
    return gid


def make_folder(folder: Path, gid: int | None) -> None:
    """Make a private folder, or one shared with a group; leave an existing folder unchanged.

    Raises:
        OSError: it cannot be made.
    """
    try:
        folder.mkdir(PRIVATE)
    except FileExistsError:
        if not folder.is_dir():
            raise
    # an empty private folder may be one that another process of this user has just made
    if gid is not None and _is_private(os.stat(folder)) and not os.listdir(folder):
        os.chown(folder, -1, gid)  # first, so that no other group gets access meanwhile
        os.chmod(folder, SHARED)


def check_folder(folder: Path, gid: int | None, *, setting: str, also_root: bool = False) -> str | None:
    """Check that only users whom this user has to trust can write in a folder.

    Args:
        gid: the group that the folder is shared with, as the job says.
        setting: the key that names the folder, `output.dir` for example.
        also_root: refuse other users' folders even to root: code from the folder is run, or others could have been
            first.

    Returns:
        For root, a warning if the folder is another user's, which is usual in containers.

    Raises:
        ConfigError: it is another user's (neither this one's nor root's), others may write in it, or it is not shared
            with the group; the message has the command that repairs it.
        OSError: it does not exist, or cannot be examined.
    """
    found = os.stat(folder)
    mode, path = stat.S_IMODE(found.st_mode), shlex.quote(str(folder))
    if gid is not None:
        if found.st_gid == gid and mode & (SHARED | 0o007) == SHARED:
            return None
        raise ConfigError(
            f"{folder} is not shared with group {_group_name(gid)}: run "
            f"`chgrp -R {_group_name(gid)} {path} && chmod -R u=rwX,g=rwX,o= {path} && "
            f"find {path} -type d -exec chmod g+s {{}} +`, "
            f"or choose another {setting}"
        )
    is_foreign = found.st_uid not in (os.geteuid(), 0)
    if is_foreign and (os.geteuid() != 0 or also_root):
        part, _, is_key = setting.partition(".")
        sharing = f", or share it within a group by {part}.shared_group" if is_key else ""
        raise ConfigError(
            f"{folder} belongs to {user_name(found.st_uid)}, who could put anything into it; "
            f"choose another {setting}{sharing}"
        )
    if others := _other_writers(found):
        raise ConfigError(
            f"{folder} can be written by {others}, who could put anything into it: run `chmod go-w {path}`, "
            f"or choose another {setting}"
        )
    if is_foreign:
        return f"warning: {folder} belongs to {user_name(found.st_uid)}, who can change what root reads there"
    return None


def shared_with(folder: Path) -> int | None:
    """Return the group that a folder's mode shares it with, if this user is a member of the group, else None."""
    found = os.stat(folder)
    is_shared = stat.S_IMODE(found.st_mode) & (SHARED | 0o007) == SHARED
    is_member = os.geteuid() == 0 or found.st_gid in (os.getegid(), *os.getgroups())
    return found.st_gid if is_shared and is_member else None


def share_file(descriptor: int, gid: int | None) -> None:
    """Let the group of a shared folder read and write a new file in it, despite the umask."""
    if gid is not None:
        os.fchmod(descriptor, 0o660)


def user_name(uid: int) -> str:
    """Return a user's name for messages, or the number of a user without a name."""
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def _is_private(found: os.stat_result) -> bool:
    """Return whether a folder is this user's alone, even if its group was inherited from a folder above."""
    return found.st_uid == os.geteuid() and found.st_mode & 0o777 == PRIVATE


def _other_writers(found: os.stat_result) -> str | None:
    if found.st_mode & stat.S_IWOTH:
        return "every user"
    if found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_uid, found.st_gid):
        return f"group {_group_name(found.st_gid)}"
    return None


def _is_private_group(uid: int, gid: int) -> bool:
    """Return whether a group has a single member, as most systems create one per user; umask 002 is then harmless."""
    try:
        group = grp.getgrgid(gid)
        return uid == gid and group.gr_name == pwd.getpwuid(uid).pw_name and not group.gr_mem
    except KeyError:  # containers often have no names for their host's users
        return uid == gid


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
