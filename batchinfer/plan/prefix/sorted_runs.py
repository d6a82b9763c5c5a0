"""Sorted runs of prompts on disk: of each prompt the length of the prefix shared with its predecessor, and the rest.

A run is an Arrow IPC file; its record batches are blocks that can be read one by one, because the first prompt of each
is stored whole.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.plan.prefix.prompt_parts import SortedPrompts, join_parts, num_that_fit, offsets_of
from batchinfer.plan.prefix.prompt_sort import join_heads, sort_prompts, take_tails

BLOCK_BYTES = 1 << 16  # most bytes of a block in memory, unless one prompt has more


def write_run(target: Path, token_ids: np.ndarray, offsets: np.ndarray, first_index: int) -> None:
    """Sort prompts and write them as one run.

    Args:
        token_ids: flat unsigned integers.
        offsets: [N + 1] int64.
        first_index: place of prompt 0 in the input; the others follow it.
    """
    order, shared = sort_prompts(token_ids, offsets, np.argsort(_first_tokens(token_ids, offsets), kind="stable"))
    lengths = np.diff(offsets)[order]
    # zstd's lowest level: half the size of plain integers at several hundred megabytes per second
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))
    tail = pa.list_(pa.from_numpy_dtype(token_ids.dtype))
    schema = pa.schema([("index", pa.int64()), ("shared", pa.int64()), ("tail", tail)])
    with pa.OSFile(str(target), "wb") as file, pa.ipc.new_file(file, schema, options=options) as writer:
        for first, end in _blocks(lengths, token_ids.itemsize):
            skipped = shared[first:end].copy()
            skipped[0] = 0
            tails = take_tails(token_ids, offsets, order[first:end], skipped)
            tail_offsets = np.concatenate([[0], np.cumsum(lengths[first:end] - skipped)]).astype(np.int32)
            columns = [
                pa.array(order[first:end] + first_index),
                pa.array(shared[first:end]),
                pa.ListArray.from_arrays(pa.array(tail_offsets), pa.array(tails)),
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))


def _first_tokens(token_ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return [N] uint64, the first tokens of each prompt packed so that the integers sort like these tokens."""
    found = np.zeros(len(offsets) - 1, dtype=np.uint64)
    for place in range(8 // token_ids.itemsize):
        found <<= np.uint64(8 * token_ids.itemsize)
        has_token = np.flatnonzero(np.diff(offsets) > place)
        found[has_token] |= token_ids[offsets[has_token] + place]
    return found


def read_run(source: Path, part_bytes: int) -> Iterator[SortedPrompts]:
    """Yield the prompts of a run in order, in parts of about `part_bytes`, at least one block each."""
    number = 0
    while blocks := _read_blocks(source, number, part_bytes):
        number += len(blocks)
        yield join_parts(blocks)


def _read_blocks(source: Path, first: int, num_bytes: int) -> list[SortedPrompts]:
    """Return the blocks from number `first` on that fit into `num_bytes`, at least one; [] at the end of the run."""
    blocks: list[SortedPrompts] = []
    # opened again each time, since a large job has more runs than a process may hold files open;
    # not memory-mapped, since pages of the file would count as memory of this process
    with pa.OSFile(str(source), "rb") as file:
        reader = pa.ipc.open_file(file)
        for number in range(first, reader.num_record_batches):
            block = _decoded(reader.get_batch(number))
            blocks.append(block)
            num_bytes -= block.num_bytes
            if num_bytes < block.num_bytes:  # the next one is about as large
                break
    return blocks


def _blocks(lengths: np.ndarray, token_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end), the range of prompts of each block."""
    offsets = offsets_of(lengths)
    first = 0
    while first < len(lengths):
        end = first + max(num_that_fit(offsets, first, BLOCK_BYTES, token_bytes), 1)
        yield first, end
        first = end


def _decoded(block: pa.RecordBatch) -> SortedPrompts:
    shared = block["shared"].to_numpy()
    heads = shared.copy()
    heads[0] = 0
    tail_lengths = pc.list_value_length(block["tail"]).to_numpy()
    offsets = offsets_of(heads + tail_lengths)
    token_ids = join_heads(block["tail"].flatten().to_numpy(), offsets, heads)
    return SortedPrompts(block["index"].to_numpy(), token_ids, offsets, shared)
