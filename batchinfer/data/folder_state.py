"""A folder's state by its files' metadata, to notice that files changed after they were read."""

from pathlib import Path

FolderState = frozenset[tuple[str, int, int, int]]  # name, number, size in bytes and time of change in ns of each file


def folder_state(folder: Path) -> FolderState:
    """Return the metadata of a folder's files; the value changes if a file is written, added or removed."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        status = path.stat() if path.exists() else path.lstat()  # a link to nothing
        found.append((path.name, status.st_ino, status.st_size, status.st_mtime_ns))
    return frozenset(found)
