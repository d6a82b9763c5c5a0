"""An index of the blocks of one model in the store, made from the names of its files.

Opening lists 64 folders and reads no file. Afterwards only folders that changed are listed again, so finding other
processes' changes costs 64 `stat` calls. A store with a second tier (second_tier.py) also knows files that are not on
disk: far ones.
"""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from batchinfer.kv_store.block_file import FileName
from batchinfer.kv_store.blocks import SHORT_BYTES
from batchinfer.kv_store.store_dir import list_folder

_CLOCK_TICK_S = 2.0  # a folder changed so shortly before it was listed may have changed once more within one tick


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Consecutive blocks of one chain in one file."""

    file: str  # its name
    position: int  # of the first of them in the file
    start: int  # of the first of them among the requested blocks
    stop: int


@dataclass(slots=True)
class _Folder:
    names: set[str] = field(default_factory=set)
    changed_ns: int = -1  # time of the last change when the folder was listed
    is_settled: bool = False  # the folder was listed some time after its last change


class BlockIndex:
    """The blocks below models/<model>/; look-ups need no lock, changes take one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file_of_block: dict[bytes, str] = {}  # short name -> file name
        self._also_in: dict[bytes, set[str]] = {}  # more files with a block: two processes had written it at once
        self._folders: dict[str, _Folder] = {}
        self._far: set[str] = set()
        self._lock = threading.Lock()

    def count_leading(self, blocks: Sequence[bytes]) -> int:
        """Count how many blocks from the start of `blocks` on are in the store."""
        files = self.file_of_block
        for count, block in enumerate(blocks):
            if block[:SHORT_BYTES] not in files:
                return count
        return len(blocks)

    def spans(self, blocks: Sequence[bytes]) -> list[FileSpan]:
        """Return the files and positions of the leading blocks."""
        found: list[FileSpan] = []
        for at, block in enumerate(blocks):
            short = block[:SHORT_BYTES]
            name = self.file_of_block.get(short)
            if name is None:
                break
            if found and found[-1].file == name:
                last = found[-1]
                found[-1] = FileSpan(name, last.position, last.start, at + 1)
            else:
                found.append(FileSpan(name, parsed_name(name).blocks.index(short), at, at + 1))
        return found

    def path(self, name: str) -> str:
        return f"{self.folder}/{parsed_name(name).folder}/{name}"

    def ancestors(self, parent: bytes) -> set[str]:
        """Return the names of the files that hold a block (by its short name) and the blocks before it in its chain."""
        found: set[str] = set()
        name = self.file_of_block.get(parent)
        while name is not None and name not in found:
            found.add(name)
            name = self.file_of_block.get(parsed_name(name).parent)
        return found

    def add(self, name: str) -> None:
        parsed = parsed_name(name)
        with self._lock:
            self._folders.setdefault(parsed.folder, _Folder()).names.add(name)
            self._enter(name, parsed)

    def remove(self, name: str) -> None:
        with self._lock:
            folder = self._folders.get(parsed_name(name).folder)
            if folder is not None:
                folder.names.discard(name)
            self._drop(name)

    def is_far(self, name: str) -> bool:
        """Return whether the second tier is known to have a file."""
        return name in self._far

    def add_far(self, name: str) -> None:
        """Record that the second tier has a file."""
        with self._lock:
            self._enter_far(name)

    def set_far(self, names: set[str]) -> None:
        """Record that the second tier has exactly these files."""
        with self._lock:
            for name in self._far - names:
                self._remove_far(name)
            for name in names - self._far:
                self._enter_far(name)

    def remove_far(self, name: str) -> None:
        """Record that the second tier has lost a file."""
        with self._lock:
            self._remove_far(name)

    def refresh(self) -> None:
        """Read the changes on disk.

        Raises:
            OSError: the store cannot be listed, or is gone.
        """
        parts = {part for part in os.listdir(self.folder) if part.isdecimal()}
        for part in sorted(parts | self._folders.keys()):
            with self._lock:
                self._refresh_folder(part)

    def _refresh_folder(self, part: str) -> None:
        folder = self._folders.setdefault(part, _Folder())
        try:
            changed_ns = os.stat(self.folder / part).st_mtime_ns
        except FileNotFoundError:
            changed_ns = 0
        if changed_ns == folder.changed_ns and folder.is_settled:
            return
        folder.changed_ns, folder.is_settled = changed_ns, time.time() - changed_ns / 1e9 > _CLOCK_TICK_S
        names = set(list_folder(self.folder / part))
        for name in folder.names - names:
            folder.names.discard(name)
            self._drop(name)
        for name in names - folder.names:
            parsed = FileName.parse(name)
            if parsed is not None:
                folder.names.add(name)
                self._enter(name, parsed)

    def _enter(self, name: str, parsed: FileName) -> None:
        for block in parsed.blocks:
            before = self.file_of_block.get(block, name)
            if before != name:
                self._also_in.setdefault(block, set()).add(before)
            self.file_of_block[block] = name

    def _enter_far(self, name: str) -> None:
        """Add a file of the second tier; blocks that are on disk, too, are read from disk."""
        self._far.add(name)
        for block in parsed_name(name).blocks:
            if self.file_of_block.setdefault(block, name) != name:
                self._also_in.setdefault(block, set()).add(name)

    def _remove_far(self, name: str) -> None:
        self._far.discard(name)
        folder = self._folders.get(parsed_name(name).folder)
        if folder is None or name not in folder.names:
            self._drop(name)

    def _drop(self, name: str) -> None:
        if name in self._far:
            return  # the file can still be fetched
        for block in parsed_name(name).blocks:
            others = self._also_in.get(block, set())
            others.discard(name)
            if self.file_of_block.get(block) == name:
                if others:
                    self.file_of_block[block] = others.pop()
                else:
                    del self.file_of_block[block]
            if not others:
                self._also_in.pop(block, None)


def parsed_name(name: str) -> FileName:
    """Parse the name of a file in an index."""
    parsed = FileName.parse(name)
    assert parsed is not None, f"{name} is no file of blocks"
    return parsed
