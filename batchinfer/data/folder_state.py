"""Whether the files of a folder are still those that were read."""

from pathlib import Path

FolderState = frozenset[tuple[str, int, int, int]]  # name, number, size in bytes and time of change in ns of each file


def folder_state(folder: Path) -> FolderState:
    """What the file system says of a folder's files; it changes when one of them is written, put or taken away."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        status = path.stat() if path.exists() else path.lstat()  # a link to nothing
        found.append((path.name, status.st_ino, status.st_size, status.st_mtime_ns))
    return frozenset(found)
