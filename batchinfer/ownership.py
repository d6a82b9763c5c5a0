"""Who may change what this program believes: the owner of a folder alone, or the one group that the job names.

    private   drwx------  alice alice    made so from its first moment
    shared    drwxrws---  alice team     output.shared_group, kv.shared_group: the members trust each other

Files in a run folder follow the umask: who cannot enter the folder reaches none of them. A folder that a person has
made may be read by others; it is refused when others may write, since they could put anything in the place of anything.
"""

import grp
import os
import pwd
import shlex
import stat
from pathlib import Path

from batchinfer.records import ConfigError

PRIVATE, SHARED = 0o700, 0o2770  # setgid: what is made in a shared folder belongs to the group, too
SHARED_UMASK = 0o007


def group_id(name: str | None, setting: str) -> int | None:
    """The number of a group by its name (or the number itself, for groups without a name); None for none.

    Args:
        setting: the key in the job file, for messages.

    Raises:
        ConfigError: there is no such group, or this user is no member of it.
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
    """A private folder, or one shared with a group; one that exists stays as it is.

    Raises:
        OSError: it cannot be made.
    """
    try:
        folder.mkdir(PRIVATE)
    except FileExistsError:
        if not folder.is_dir():
            raise
    # also where another process of this user has only just made it
    if gid is not None and _is_private(os.stat(folder)) and not os.listdir(folder):
        os.chown(folder, -1, gid)  # first, so that no other group is let in meanwhile
        os.chmod(folder, SHARED)


def check_folder(folder: Path, gid: int | None, *, setting: str, also_root: bool = False) -> str | None:
    """Refuse a folder into which somebody could have put something whom this user has no reason to trust.

    Args:
        gid: the group that it is shared with, as the job says.
        setting: what names the folder, `output.dir` for example.
        also_root: whether root, too, uses no other user's: what is in it is run, or others could have been first.

    Returns:
        For root, a warning where the folder is another user's, which is usual in containers.

    Raises:
        ConfigError: it is another user's (neither this one's nor root's), others may write in it, or it is not shared
            with the group; the message has the command that repairs it.
        OSError: it is not there, or cannot be looked at.
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
    """The group that a folder is shared with, by its owner's choice of its mode, if this user is a member of it."""
    found = os.stat(folder)
    is_shared = stat.S_IMODE(found.st_mode) & (SHARED | 0o007) == SHARED
    is_member = os.geteuid() == 0 or found.st_gid in (os.getegid(), *os.getgroups())
    return found.st_gid if is_shared and is_member else None


def share_file(descriptor: int, gid: int | None) -> None:
    """Let the group of a shared folder read and write a new file in it, whatever the umask."""
    if gid is not None:
        os.fchmod(descriptor, 0o660)


def user_name(uid: int) -> str:
    """For messages: a user's name where it has one."""
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def _is_private(found: os.stat_result) -> bool:
    """Also where a folder above has handed down its group."""
    return found.st_uid == os.geteuid() and found.st_mode & 0o777 == PRIVATE


def _other_writers(found: os.stat_result) -> str | None:
    if found.st_mode & stat.S_IWOTH:
        return "every user"
    if found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_uid, found.st_gid):
        return f"group {_group_name(found.st_gid)}"
    return None


def _is_private_group(uid: int, gid: int) -> bool:
    """Whether a group is there for one user alone, as most systems make them: then umask 002 lets nobody else in."""
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
