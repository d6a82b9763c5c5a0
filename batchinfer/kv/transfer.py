"""The KV of one prompt on its way from a prefill rank to a decode rank: written once, read once, whole pages.

If the model's requests have a state, the prompt's state follows the pages.

On one host a transfer is anonymous memory that the receiver opens through the sender's process: it has no name to
collide with and is freed when the sender ends. Between hosts it is a file in a shared folder, or the sender's memory
is sent through an object store (rank/bucket_transfer.py). The header then has a checksum of each page and of the state.

    | header length, 8 bytes | header, JSON | page 0: all layers | page 1: all layers | … | state
"""

import json
import os
import resource
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import xxhash

from batchinfer.kv.memory import KvMemory
from batchinfer.records import PeerLostError
from batchinfer.whole_files import NO_DESCRIPTOR, cannot_write, too_many_files
from batchinfer_kernels.transfer import host_buffer

_LENGTH = struct.Struct("=q")


@dataclass(slots=True)
class KvTransfer:
    """A transfer at its sender, which calls `close` after the receiver has read it."""

    path: str
    num_bytes: int
    close: Callable[[], None]  # frees the memory, or deletes the file


def most_in_memory() -> int:
    """Return how many transfers a rank may hold in memory: half of its file descriptors, one per transfer."""
    return max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def write_transfer(
    memory: KvMemory, page_ids: list[int], slot: int | None = None, *, file: Path | None, leaves_host: bool = False
) -> KvTransfer:
    """Copy pages and the state out of a rank's memory.

    Args:
        page_ids: the prompt's pages in order.
        slot: of its state; None: the model's requests have none.
        file: destination; None for anonymous memory.
        leaves_host: whether anonymous memory is sent to another host, as a file is.

    Raises:
        ConfigError: the file cannot be written, or too many are open: no fault of the prompt.
        OSError: no room in memory.
    """
    content = memory.take_pages(page_ids)
    state = torch.empty(0, dtype=torch.uint8) if slot is None else memory.take_state(slot)
    try:
        return _write(content, state, file, has_checksums=leaves_host or file is not None)
    except OSError as error:
        if file is not None:
            raise cannot_write(file, error) from None
        if error.errno in NO_DESCRIPTOR:
            raise too_many_files("a rank cannot hand over KV") from None
        raise


def _write(content: torch.Tensor, state: torch.Tensor, file: Path | None, *, has_checksums: bool) -> KvTransfer:
    pages = content.view(torch.uint8).flatten(1)
    about = {"shape": list(content.shape), "dtype": str(content.dtype), "state": len(state)}
    header = json.dumps({**about, "checksums": _checksums(pages, state) if has_checksums else []}).encode()
    if file is None:
        descriptor = os.memfd_create("batchinfer-kv")
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        path = str(file)
    with open(descriptor, "wb", closefd=file is not None) as target:
        target.write(_LENGTH.pack(len(header)) + header)
        target.write(pages.numpy().reshape(-1).data)
        target.write(state.numpy().data)
    num_bytes = content.numel() * content.element_size() + len(state)
    return KvTransfer(path, num_bytes, partial(_close, None if file is not None else descriptor, file))


def _checksums(pages: torch.Tensor, state: torch.Tensor) -> list[str]:
    """Return the checksum of each page, [pages, page_bytes] uint8, and of the state."""
    return [xxhash.xxh3_64_hexdigest(part.numpy().data) for part in (*pages, state)]


def _close(descriptor: int | None, file: Path | None) -> None:
    if descriptor is not None:
        os.close(descriptor)
    if file is not None:
        file.unlink(missing_ok=True)


def read_transfer(
    path: str, memory: KvMemory, page_ids: list[int], slot: int | None = None, *, first_page: int
) -> None:
    """Copy a transfer's pages from `first_page` on, and its state, into a rank's memory.

    Args:
        page_ids: destinations of all pages of the transfer; the first `first_page` hold their content already.
        slot: destination of the state; None: the model's requests have none.

    Raises:
        PeerLostError: the transfer is gone, since its sender has ended, or it is damaged.
        ConfigError: too many files are open.
    """
    page_bytes, state_bytes = memory.page_bytes, 0 if slot is None else memory.state_bytes
    shape, dtype = (len(page_ids), *memory.page_shape), str(memory.dtype)
    try:
        with open(path, "rb") as source:
            (length,) = _LENGTH.unpack(source.read(_LENGTH.size))
            header = json.loads(source.read(min(length, os.fstat(source.fileno()).st_size)))
            if (tuple(header["shape"]), header["dtype"], header["state"]) != (shape, dtype, state_bytes):
                wanted = f"{shape} of {dtype} and a state of {state_bytes} bytes"
                raise PeerLostError(f"the KV transfer {path} holds {header}, not {wanted}")
            source.seek(first_page * page_bytes, os.SEEK_CUR)
            content = host_buffer((len(page_ids) - first_page) * page_bytes + state_bytes, memory.device)
            if source.readinto(content.numpy().data) != len(content):
                raise PeerLostError(f"the KV transfer {path} is cut short")
            checksums = header["checksums"]
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        if isinstance(error, OSError) and error.errno in NO_DESCRIPTOR:
            raise too_many_files("a rank cannot take over KV") from None
        raise PeerLostError(f"cannot read the KV transfer {path}: {error}") from None
    pages, state = content.split([len(content) - state_bytes, state_bytes])
    if checksums and checksums[first_page:] != _checksums(pages.view(-1, page_bytes), state):
        raise PeerLostError(f"the KV transfer {path} is damaged: its checksums do not match")
    if len(pages):
        memory.put_pages(page_ids[first_page:], pages.view(memory.dtype).view(-1, *shape[1:]))
    if slot is not None:
        memory.put_state(slot, state)
