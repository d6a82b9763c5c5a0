"""The reader of block files, which checks each block and moves damaged files to quarantine."""

import errno
import os
import time
from collections.abc import Callable, Sequence

import numpy as np

from batchinfer.kv_store.block_file import (
    DamagedBlocksError,
    FileName,
    Header,
    NameClashError,
    open_blocks,
    read_blocks,
)
from batchinfer.kv_store.index import BlockIndex, FileSpan, parsed_name
from batchinfer.kv_store.second_tier import SecondTier
from batchinfer.kv_store.session import StoreSession
from batchinfer.kv_store.store_dir import quarantine

WriteToDisk = Callable[[FileName, Sequence[bytes], np.ndarray, str], bool]

TOUCH_S = 10.0  # a file's last use is recorded at most this often


class FileReader:
    """Reads block files, for all threads of one process.

    Args:
        tier: has files that are not on disk; None: there is none.
        write_to_disk: puts a file from the second tier on disk.
    """

    def __init__(
        self, session: StoreSession, index: BlockIndex, tier: SecondTier | None, write_to_disk: WriteToDisk
    ) -> None:
        self._session, self._index, self._tier, self._write_to_disk = session, index, tier, write_to_disk

    def read_span(self, span: FileSpan, blocks: Sequence[bytes], out: np.ndarray) -> int:
        """Read blocks of one file; return how many of them, from the first on, were there and intact.

        Args:
            blocks: names of the span's blocks.
            out: [len(blocks), block_bytes] uint8, receives them.
        """
        started_s, num_intact = time.monotonic(), 0
        path = self._index.path(span.file)
        try:
            if self._session.is_readable:
                num_intact = self._read(path, span, blocks, out)
        except FileNotFoundError as error:
            self._index.remove(span.file)
            if not os.path.exists(self._session.store.marker):
                self._session.switch_off("read", error)
        except NameClashError:
            pass  # one in 2**48: counted below as missing, and then computed
        except DamagedBlocksError as error:
            num_intact = error.num_intact
            self._quarantine(span.file, path)
        except OSError as error:
            if error.errno == errno.ESTALE:  # NFS: evicted by another host while it was open
                self._index.remove(span.file)
            else:
                self._session.switch_off("read", error)
        self._session.counters.add(read_s=time.monotonic() - started_s, missing_blocks=len(blocks) - num_intact)
        return num_intact

    def _read(self, path: str, span: FileSpan, blocks: Sequence[bytes], out: np.ndarray) -> int:
        """Read from disk, or from the second tier; return how many blocks were there.

        Raises:
            FileNotFoundError: the file is in neither.
        """
        if self._tier is None or not self._index.is_far(span.file) or os.path.exists(path):
            self._read_file(path, span, blocks, out)
            return len(blocks)
        with self._tier.fetching(span.file):
            if os.path.exists(path):  # another thread has fetched it meanwhile
                self._read_file(path, span, blocks, out)
                return len(blocks)
            found = self._tier.fetch(span.file)
            if found is None:
                return 0
            header, content = found
            self._write_to_disk(parsed_name(span.file), header.blocks, content, header.run)
            self._note_run(span, header)
        stop = span.position + len(blocks)
        if header.blocks[span.position : stop] != list(blocks):
            raise NameClashError
        out[:] = content[span.position : stop]
        return len(blocks)

    def _read_file(self, path: str, span: FileSpan, blocks: Sequence[bytes], out: np.ndarray) -> None:
        descriptor = open_blocks(path)
        try:
            header = read_blocks(
                descriptor,
                parsed_name(span.file),
                key=self._session.key,
                identity=self._session.identity.digest,
                block_bytes=self._session.identity.block_bytes,
                wanted=blocks,
                position=span.position,
                out=out,
            )
            self._note_run(span, header)
            if time.time() - os.fstat(descriptor).st_mtime > TOUCH_S:
                self._touch(descriptor)
        finally:
            os.close(descriptor)

    def _note_run(self, span: FileSpan, header: Header) -> None:
        if header.run and header.run == self._session.run:
            self._session.own_files.add(span.file)

    def _touch(self, descriptor: int) -> None:
        try:
            os.utime(descriptor)
        except OSError:  # another user's file or a read-only folder; reading goes on
            self._session.counters.add(untouched_files=1)

    def _quarantine(self, file: str, path: str) -> None:
        """Move a damaged file aside, so that no process reads it again, and keep only the latest few."""
        self._index.remove(file)
        self._session.counters.add(damaged_files=1)
        try:
            quarantine(self._session.store, path)
        except OSError as error:
            self._session.switch_off("write", error)
