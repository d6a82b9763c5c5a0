"""Paths that match a pattern: as the standard library's glob finds them, but that none is passed over in silence.

glob leaves out folders that it cannot list, and goes round for ever where links lead back to where they are.
"""

import errno
import os
from collections.abc import Callable, Iterator
from fnmatch import filter as names_like

from batchinfer.data.stores import WILDCARDS
from batchinfer.records import ConfigError

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)  # what errors of a name that nothing has say


class UnreadableFolderError(ConfigError):
    """Nobody knows what is in it."""


def matching_paths(pattern: str) -> list[str]:
    """What matches: *, ? and [..] stand for letters of a name, ** for any folders; none for a dot at its beginning.

    Raises:
        UnreadableFolderError: the pattern looks in one.
    """
    top = os.sep if pattern.startswith(os.sep) else ""
    return sorted({path for path in _matching(top, pattern.split(os.sep)) if path})


def each_folder(top: str, is_left_out: Callable[[str], bool]) -> Iterator[tuple[str, list[str], list[str]]]:
    """(place, its folders, its files) of a folder and of those below, whose list the caller may shorten.

    One that is reached twice counts once. Links come last: `latest` does not hide the key of `day=5`.

    Args:
        is_left_out: by the name of a folder.

    Raises:
        UnreadableFolderError: one of them.
    """
    seen: set[str] = set()
    tops = [top]
    for start in tops:
        for place, folders, names in os.walk(start, onerror=_refuse_unless_gone):
            real = os.path.realpath(place)
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(name for name in folders if not is_left_out(name))
            yield place, folders, names
            tops += (path for path in (os.path.join(place, name) for name in folders) if os.path.islink(path))


def _matching(folder: str, parts: list[str]) -> Iterator[str]:
    """Paths below a folder, which ends with a slash or is empty (where we are), that match these names."""
    part, *rest = parts
    if part == "**":
        yield from _below(folder, rest)
        return
    if not part:  # two slashes, or one at the end
        yield from _matching(folder, rest) if rest else [folder]
        return
    is_listed = WILDCARDS.search(part) is not None
    for path in (folder + name for name in (_names(folder, part) if is_listed else [part])):
        if rest and _is_there(f"{path}{os.sep}", folder):
            yield from _matching(f"{path}{os.sep}", rest)
        elif not rest and (is_listed or _is_there(path, folder)):
            yield path


def _below(folder: str, rest: list[str]) -> Iterator[str]:
    for place, _, names in each_folder(folder or os.curdir, _has_dot):
        inside = "" if place == os.curdir else os.path.join(place, "")
        if rest:
            yield from _matching(inside, rest)
            continue
        yield inside
        yield from (inside + name for name in names if not _has_dot(name))


def _names(folder: str, part: str) -> list[str]:
    try:
        found = names_like(os.listdir(folder or os.curdir), part)
    except OSError as error:
        _refuse_unless_gone(error, folder)
        return []
    return found if _has_dot(part) else [name for name in found if not _has_dot(name)]


def _is_there(path: str, folder: str) -> bool:
    """Whether there is something of this name, with a slash at its end a folder."""
    try:
        os.lstat(path)
    except ValueError:  # no name at all
        return False
    except OSError as error:
        _refuse_unless_gone(error, folder)
        return False
    return True


def _has_dot(name: str) -> bool:
    return name.startswith(".")


def _refuse_unless_gone(error: OSError, folder: str | None = None) -> None:
    """Where nothing is, nothing is passed over: another job's run folder may lose folders while we look."""
    if error.errno not in _ABSENT:
        raise UnreadableFolderError(
            f"cannot list the folder {folder or error.filename} for its data: {error.strerror}; make it readable, or "
            "name only others"
        ) from None
