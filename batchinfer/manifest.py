"""A run's manifest: files by size and checksums, taken as they are written and compared whenever they are read.

The checksums are xxh3-128, one for each block of a file, so that a part of a large file is read as safely as all of it.
They find damage, not forgery: a user who may write in a run folder may also write a manifest (see ownership.py for
that).
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from batchinfer.records import DamagedFileError
from batchinfer.rundir import RunDir, refinish_remedy, replan_remedy

BLOCK_BYTES = 4 << 20
KEPT_BLOCKS = 8  # of a file that is being read: columns of a row group are read side by side


@dataclass(frozen=True, slots=True)
class Checksums:
    """The size and block checksums of a file."""

    num_bytes: int
    blocks: tuple[str, ...]  # in hex, of each BLOCK_BYTES from the start

    @property
    def digest(self) -> str:
        """One checksum for the whole file, in hex."""
        return self.blocks[0] if len(self.blocks) == 1 else _hash("".join(self.blocks).encode())

    def as_json(self) -> dict[str, Any]:
        """Return the form of run.json."""
        return {"bytes": self.num_bytes, "xxh3": list(self.blocks)}


class Manifest:
    """The files that a run vouches for, by their path below its folder.

    Args:
        files: in the form of run.json; None: no file yet.
    """

    def __init__(self, root: Path, files: dict[str, Any] | None = None) -> None:
        self._root = root
        self._files = {name: Checksums(entry["bytes"], tuple(entry["xxh3"])) for name, entry in (files or {}).items()}

    def __contains__(self, path: Path) -> bool:
        return self._name(path) in self._files

    def __iter__(self) -> Iterator[Path]:
        return iter([self._root / name for name in self._files])

    def __getitem__(self, path: Path) -> Checksums:
        """Return the size and checksums of a file.

        Raises:
            DamagedFileError: the manifest has no entry for it.
        """
        try:
            return self._files[self._name(path)]
        except KeyError:
            raise DamagedFileError(path, "run.json does not vouch for it", remedy=self.remedy(path)) from None

    def add(self, path: Path, checksums: Checksums) -> None:
        """Add a file of the run folder."""
        self._files[self._name(path)] = checksums

    def remove(self, path: Path) -> None:
        """Remove a file's entry, if there is one."""
        self._files.pop(self._name(path), None)

    def open(self, path: Path) -> VerifiedFile:
        """Open a file of which every block is compared before a byte of it is returned.

        Raises:
            DamagedFileError: it is missing, of another size, or has no entry; reading raises it, too.
        """
        return VerifiedFile(path, self[path], remedy=self.remedy(path))

    def check(self, *paths: Path) -> None:
        """Read whole files and compare them.

        Raises:
            DamagedFileError: names the first that is missing or damaged.
        """
        for path in paths:
            with self.open(path) as file:
                file.check()

    def remedy(self, path: Path) -> str:
        """Return what to do when a file is damaged."""
        run = RunDir(self._root)
        of_finish = any(path.is_relative_to(folder) for folder in (run.outputs, run.dataset, run.stats))
        return refinish_remedy(self._root) if of_finish else replan_remedy(self._root)

    def as_json(self) -> dict[str, Any]:
        """Return the form of run.json."""
        return {name: checksums.as_json() for name, checksums in self._files.items()}

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()


class VerifiedFile(io.RawIOBase):
    """A file for reading whose blocks are compared with their checksums as they are read.

    Args:
        remedy: what to do when one differs.

    Raises:
        DamagedFileError: it is missing or of another size; reading raises it when a block differs.
    """

    def __init__(self, path: Path, checksums: Checksums, *, remedy: str) -> None:
        super().__init__()
        self._path, self._checksums, self._remedy = path, checksums, remedy
        self._position = 0
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115  (closed by close)
        except OSError as error:
            super().close()  # else the destructor closes a file that was never opened, with an error message
            raise self._damage(error.strerror or str(error)) from None
        num_bytes = self._file.seek(0, io.SEEK_END)
        if num_bytes != checksums.num_bytes:
            self._file.close()
            raise self._damage(f"it has {num_bytes} bytes instead of {checksums.num_bytes}")

    def check(self) -> None:
        """Compare all blocks.

        Raises:
            DamagedFileError: one differs.
        """
        for index in range(len(self._checksums.blocks)):
            self._read_block(index)

    def read(self, size: int | None = -1) -> bytes:
        """Return up to `size` bytes, fewer only at the end."""
        left = self._checksums.num_bytes - self._position
        end = self._position + (left if size is None or size < 0 else max(0, min(size, left)))
        parts = []
        while self._position < end:
            index, first = divmod(self._position, BLOCK_BYTES)
            part = self._block(index)[first : first + end - self._position]
            parts.append(part)
            self._position += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._checksums.num_bytes}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def _block(self, index: int) -> bytes:
        if index not in self._blocks:
            self._blocks[index] = self._read_block(index)
            if len(self._blocks) > KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(index)
        return self._blocks[index]

    def _read_block(self, index: int) -> bytes:
        first = index * BLOCK_BYTES
        try:
            self._file.seek(first)
            block = self._file.read(min(BLOCK_BYTES, self._checksums.num_bytes - first))
        except OSError as error:
            raise self._damage(error.strerror or str(error)) from None
        if _hash(block) != self._checksums.blocks[index]:
            raise self._damage(f"bytes {first} to {first + len(block)} are not those that were written")
        return block

    def _damage(self, reason: str) -> DamagedFileError:
        return DamagedFileError(self._path, reason, remedy=self._remedy)


class ChecksummedWriter(io.RawIOBase):
    """A writer that passes bytes on to a file and computes checksums of the bytes given, whatever the disk stores.

    Closing it leaves the file open.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self._num_bytes = 0
        self._blocks: list[str] = []
        self._hasher = xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        while len(rest):
            part = rest[: BLOCK_BYTES - self._num_bytes % BLOCK_BYTES]
            self._file.write(part)
            self._hasher.update(part)
            self._num_bytes += len(part)
            if self._num_bytes % BLOCK_BYTES == 0:
                self._blocks.append(self._hasher.hexdigest())
                self._hasher.reset()
            rest = rest[len(part) :]
        return size

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._num_bytes

    @property
    def checksums(self) -> Checksums:
        """The checksums of all bytes written so far."""
        last = [self._hasher.hexdigest()] if self._num_bytes % BLOCK_BYTES or not self._blocks else []
        return Checksums(self._num_bytes, (*self._blocks, *last))


def file_checksums(path: Path) -> Checksums:
    """Return the checksums of a file on disk.

    Raises:
        DamagedFileError: it cannot be read.
    """
    blocks, num_bytes = [], 0
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(BLOCK_BYTES):
                blocks.append(_hash(block))
                num_bytes += len(block)
    except OSError as error:
        raise DamagedFileError(path, error.strerror or str(error)) from None
    return Checksums(num_bytes, tuple(blocks or [_hash(b"")]))


def content_checksums(content: memoryview) -> Checksums:
    """Return the checksums of bytes in memory."""
    firsts = range(0, max(len(content), 1), BLOCK_BYTES)
    return Checksums(len(content), tuple(_hash(content[first : first + BLOCK_BYTES]) for first in firsts))


def _hash(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)
