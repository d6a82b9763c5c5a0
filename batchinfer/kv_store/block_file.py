"""One file of the KV store: a header that describes its content, then consecutive blocks of one chain.

    name     <index of the first block in its chain>.<block before it>.<blocks …>.kv     8 letters for each block
    content  | magic, version, length and checksum of the header | JSON, zeros up to 4096 bytes | block | block | …
    block    [pages of a block, layers, 64 tokens, latent width]

The name alone lists the blocks, so that a store opens by listing folders; one block is read without the rest of its
file. Checksums are BLAKE3 with the store's own key (store_dir.py): a user who cannot read the key cannot write a file
that is accepted, and damage by disks and crashes is found, too. BLAKE3 is fast and leaves the interpreter free for
other
threads: 5-8 GB/s on one core, while the standard library's keyed hashes reach 1-2 GB/s.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from hmac import compare_digest

import numpy as np
from blake3 import blake3

from batchinfer.kv_store.blocks import LAYOUT_VERSION, NAME_BYTES, SHORT_BYTES, KvIdentity

MAGIC = b"BIKVBLK\n"
HEADER_BYTES = 4096
MAX_BLOCKS = 29  # their names must fit into a file name of 255 letters, and into a header
TARGET_BYTES = 16 << 20  # of a file: from some 9 MB on, writing many files is as quick as writing one
CHECKSUM_BYTES = 16
KEY_BYTES = 32

_PREFIX = struct.Struct(f"<8sII{CHECKSUM_BYTES}s")
_ZEROS = bytes(CHECKSUM_BYTES)
_NAME = re.compile(rf"([0-9]{{7}})\.([\w-]{{8}})\.((?:[\w-]{{8}}){{1,{MAX_BLOCKS}}})\.kv", re.ASCII)


class NameClashError(Exception):
    """A sound file holds another block of the same short name."""


class DamagedBlocksError(Exception):
    """A file of blocks does not match its name; the first `num_intact` of the requested blocks are intact."""

    def __init__(self, reason: str, num_intact: int = 0) -> None:
        super().__init__(reason)
        self.num_intact = num_intact


@dataclass(frozen=True, slots=True)
class FileName:
    """The content of a file's name; blocks by their short names."""

    first: int  # index of the first block in its chain
    parent: bytes  # the block before it; zeros at the start of a chain
    blocks: tuple[bytes, ...]

    @classmethod
    def of(cls, chain: Sequence[bytes], start: int, stop: int) -> FileName:
        parent = chain[start - 1][:SHORT_BYTES] if start else bytes(SHORT_BYTES)
        return cls(start, parent, tuple(block[:SHORT_BYTES] for block in chain[start:stop]))

    @classmethod
    def parse(cls, name: str) -> FileName | None:
        """Parse a file's name; return None for other files than those of blocks."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        data = urlsafe_b64decode(match[2] + match[3])
        parent, *blocks = (data[at : at + SHORT_BYTES] for at in range(0, len(data), SHORT_BYTES))
        return cls(int(match[1]), parent, tuple(blocks))

    @property
    def folder(self) -> str:
        """The folder of the file: one of 64, by the first block."""
        return f"{self.blocks[0][0] % 64:02d}"

    def __str__(self) -> str:
        letters = urlsafe_b64encode(self.parent + b"".join(self.blocks)).decode()
        return f"{self.first:07d}.{letters[:8]}.{letters[8:]}.kv"


def file_bytes(num_blocks: int, block_bytes: int) -> int:
    """Return the size of a file with this many blocks."""
    return HEADER_BYTES + num_blocks * block_bytes


def checksum(data: bytes | memoryview, key: bytes) -> bytes:
    """Return a checksum, [CHECKSUM_BYTES], that cannot be made without the key."""
    return blake3(data, key=key).digest(length=CHECKSUM_BYTES)


def make_header(
    identity: KvIdentity, blocks: Sequence[bytes], first: int, content: np.ndarray, key: bytes, run: str = ""
) -> bytes:
    """Return the header of a file with `content`, the blocks [n, block_bytes] of a chain from index `first` on.

    Args:
        run: id of the run that has computed them; "": none.
    """
    document = {
        "identity": identity.digest.hex(),
        "made_by": identity.describe(),
        "shape": identity.block_shape,
        "first": first,
        "run": run,
        "blocks": [block.hex() for block in blocks],
        "checksums": [checksum(block.data, key).hex() for block in content],
    }
    data = json.dumps(document, separators=(",", ":")).encode()
    unsigned = _PREFIX.pack(MAGIC, LAYOUT_VERSION, len(data), _ZEROS) + data
    assert len(unsigned) <= HEADER_BYTES, f"a header of {len(unsigned)} bytes"
    unsigned = unsigned.ljust(HEADER_BYTES, b"\0")
    return _PREFIX.pack(MAGIC, LAYOUT_VERSION, len(data), _sign(unsigned, key)) + unsigned[_PREFIX.size :]


def _sign(unsigned: bytes, key: bytes) -> bytes:
    """Return the checksum of a header, by a derived key: a block with the same bytes has another checksum."""
    return checksum(unsigned, blake3(b"header", key=key).digest())


@dataclass(frozen=True, slots=True)
class Header:
    """The parts of a header that readers need."""

    identity: bytes
    blocks: list[bytes]
    checksums: list[bytes]
    run: str  # id of the run that has computed the blocks; "": not known

    def __post_init__(self) -> None:
        lengths = {len(self.identity), *map(len, self.blocks)}, set(map(len, self.checksums))
        if lengths != ({NAME_BYTES}, {CHECKSUM_BYTES}) or len(self.blocks) != len(self.checksums):
            raise ValueError("names or checksums of another length or number")


def parse_header(header: bytes, key: bytes) -> Header:
    """Check a header's checksum by the store's key and return its content.

    Raises:
        DamagedBlocksError: cut short, not a block file, damaged or forged, or of another version.
    """
    if len(header) < HEADER_BYTES:
        raise DamagedBlocksError(f"only {len(header)} bytes long")
    magic, version, length, signature = _PREFIX.unpack_from(header)
    if magic != MAGIC:
        raise DamagedBlocksError("not a block file")
    unsigned = _PREFIX.pack(magic, version, length, _ZEROS) + header[_PREFIX.size :]
    if not compare_digest(_sign(unsigned, key), signature):
        raise DamagedBlocksError("the header's checksum does not match: damaged, or not written by this store's users")
    if version != LAYOUT_VERSION:
        raise DamagedBlocksError(f"written in version {version} of the layout; this program knows {LAYOUT_VERSION}")
    try:
        document = json.loads(header[_PREFIX.size : _PREFIX.size + length])
        names, checksums = (list(map(bytes.fromhex, document[part])) for part in ("blocks", "checksums"))
        return Header(bytes.fromhex(document["identity"]), names, checksums, str(document.get("run", "")))
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedBlocksError(f"its header cannot be understood: {error}") from None


def open_blocks(path: str) -> int:
    """Open a file of blocks and return the descriptor.

    Raises:
        DamagedBlocksError: a folder, a link or something else has its name.
        OSError: it cannot be opened.
    """
    try:
        # not blocking: a pipe would wait for its other end
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DamagedBlocksError("a link instead of a file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedBlocksError("not a file")
    return descriptor


def read_blocks(
    descriptor: int,
    name: FileName,
    *,
    key: bytes,
    identity: bytes,
    block_bytes: int,
    wanted: Sequence[bytes],
    position: int,
    out: np.ndarray,
) -> Header:
    """Read consecutive blocks of one file and check each; return the file's header.

    Args:
        descriptor: of the file, whose name is `name`.
        key: of the store.
        identity: digest that the header must have.
        wanted: names of the blocks; the first is at `position` in the file.
        out: [len(wanted), block_bytes] uint8, receives them.

    Raises:
        DamagedBlocksError: the file is damaged or malformed; only the first `num_intact` blocks in `out` may be used.
        NameClashError: the file is sound, but holds other blocks than the wanted ones.
        OSError: it cannot be read.
    """
    header = bytearray(HEADER_BYTES)
    offset = file_bytes(position, block_bytes)
    content = out.data.cast("B")
    # one call reads header and blocks if the blocks follow the header
    parts = [memoryview(header), content] if position == 0 else [memoryview(header)]
    num_read = os.preadv(descriptor, parts, 0)
    found = parse_header(bytes(header[:num_read]), key)
    if found.identity != identity:
        raise DamagedBlocksError("it belongs to another model, dtype, backend or salt")
    stop = position + len(wanted)
    if tuple(block[:SHORT_BYTES] for block in found.blocks) != name.blocks:
        raise DamagedBlocksError("it holds other blocks than its name says")
    if found.blocks[position:stop] != list(wanted):
        raise NameClashError
    if os.fstat(descriptor).st_size != file_bytes(len(found.blocks), block_bytes):
        raise DamagedBlocksError("it does not have the size that its header says")
    num_read = max(num_read - HEADER_BYTES, 0)
    while num_read < len(content):
        num_more = os.preadv(descriptor, [content[num_read:]], offset + num_read)
        if num_more == 0:
            raise DamagedBlocksError("it became shorter while it was read")
        num_read += num_more
    for index, expected in enumerate(found.checksums[position:stop]):
        if not compare_digest(checksum(out[index].data, key), expected):
            raise DamagedBlocksError(f"the checksum of block {position + index} does not match", num_intact=index)
    return found


def check_file(path: str, name: FileName, *, key: bytes, identity_start: str, block_bytes: int) -> None:
    """Read a whole file and check it against its name.

    Raises:
        DamagedBlocksError: with the first defect found.
        OSError: it cannot be read.
    """
    descriptor = open_blocks(path)
    try:
        header, _ = read_whole(descriptor, name, key=key, identity=None, block_bytes=block_bytes)
        if not header.identity.hex().startswith(identity_start):
            raise DamagedBlocksError("it belongs to another model, dtype, backend or salt")
    finally:
        os.close(descriptor)


def read_whole(
    descriptor: int, name: FileName, *, key: bytes, identity: bytes | None, block_bytes: int
) -> tuple[Header, np.ndarray]:
    """Read a whole file and check it against its name.

    Args:
        identity: digest that the header must have; None: any.

    Returns:
        Its header, and its blocks: [n, block_bytes] uint8.

    Raises:
        DamagedBlocksError, OSError: as in `read_blocks`.
    """
    header = parse_header(os.pread(descriptor, HEADER_BYTES, 0), key)
    if os.fstat(descriptor).st_size != file_bytes(len(header.blocks), block_bytes):
        raise DamagedBlocksError("it does not have the size that its header and folder say")
    out = np.empty((len(header.blocks), block_bytes), np.uint8)
    read_blocks(
        descriptor,
        name,
        key=key,
        identity=header.identity if identity is None else identity,
        block_bytes=block_bytes,
        wanted=header.blocks,
        position=0,
        out=out,
    )
    return header, out


def write_blocks(descriptor: int, header: bytes, content: np.ndarray) -> None:
    """Write a whole file through an empty file's descriptor.

    The file is not synced: a block torn by a power cut is found by its checksum and costs one computation, while a sync
    per file would cost each block more than it saves. The operating system writes its buffers later.

    Raises:
        OSError: no room, or the disk fails.
    """
    parts = [memoryview(header), content.data.cast("B")]
    while parts:
        num_written = os.writev(descriptor, parts)
        while parts and num_written >= len(parts[0]):
            num_written -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][num_written:]
