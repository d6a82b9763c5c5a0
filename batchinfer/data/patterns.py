"""Paths that match a glob pattern, as in the standard library, but a folder that cannot be listed is an error.

The library's glob silently leaves out such folders, and never ends if links form a loop.
"""

import errno
import os
from collections.abc import Callable, Iterator
from fnmatch import filter as names_like

from batchinfer.data.stores import WILDCARDS
from batchinfer.records import ConfigError

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)  # errors of a path that does not exist


class UnreadableFolderError(ConfigError):
    """A folder that a pattern looks in cannot be listed."""


def matching_paths(pattern: str) -> list[str]:
    """Return the paths that match: `*`, `?` and `[..]` match characters of a name, `**` any number of folders.

    No wildcard matches a dot at the beginning of a name.

    Raises:
        UnreadableFolderError: a folder that the pattern looks in cannot be listed.
    """
    top = os.sep if pattern.startswith(os.sep) else ""
    return sorted({path for path in _matching(top, pattern.split(os.sep)) if path})


def walk_folders(top: str, is_left_out: Callable[[str], bool]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield (path, names of folders in it, names of files in it) for a folder and all folders below.

    The caller may remove names from the list of folders, which are then not entered. A folder that is reached twice
    comes once. Links come last, so that the folder `day=5` is found by its own name and not by a link `latest`.

    Args:
        is_left_out: whether not to enter a folder, given its name.

    Raises:
        UnreadableFolderError: a folder cannot be listed.
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
    """Yield the paths below a folder that match `parts`, one part per level.

    Args:
        folder: ends with a slash; "" is the working directory.
    """
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
    for place, _, names in walk_folders(folder or os.curdir, _has_dot):
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
    """Return whether a path exists; with a slash at its end, whether it is a folder."""
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
    """Raise UnreadableFolderError unless the path does not exist: other jobs may delete folders meanwhile."""
    if error.errno not in _ABSENT:
        raise UnreadableFolderError(
            f"cannot list the folder {folder or error.filename} for its data: {error.strerror}; make it readable, or "
            "name only others"
        ) from None
