"""Expert exchange through DeepEP, a library for GPUs joined by NVLink and RDMA; mesh.py opens it here.

    deepep               normal.py        version 2, ElasticBuffer: rows arrive sorted by slot, on a GPU in whole tiles
    deepep-v1            normal.py        version 1, normal mode: tokens arrive once per rank, sorted here
    deepep-low-latency   low_latency.py   version 1, low-latency mode: one block of fixed size per slot

What DeepEP calls an expert is a slot here: it lays "experts" out rank by rank, as a placement does its slots. It adds
results up on their way back, in bfloat16 and in part before they leave a rank, so that (other than with the exchanges
written here) the last bits of a sum depend on where the experts are.
"""

# T tokens of this rank, K experts per token

import importlib
import importlib.util
import inspect
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from batchinfer.parallel.deepep.low_latency import LowLatencyBuffer, LowLatencyDispatcher
from batchinfer.parallel.deepep.normal import ElasticDispatcher, NormalDispatcher
from batchinfer.parallel.dispatch import Dispatcher
from batchinfer.parallel.exchange_rules import check_group, check_rows
from batchinfer.parallel.placement import Placement
from batchinfer.parallel.row_format import RowFormat
from batchinfer.records import ConfigError

# DeepGEMM writes whole tiles of 128 rows; a block of another size would let it write into the next one
_BLOCK_ROWS = 128
_DISPATCHERS: dict[str, Callable[..., Dispatcher]] = {
    "deepep": ElasticDispatcher,
    "deepep-v1": NormalDispatcher,
    "deepep-low-latency": LowLatencyDispatcher,
}


def open_dispatchers(
    kind: str,
    group: dist.ProcessGroup,
    placements: Sequence[Placement],
    row_format: RowFormat,
    *,
    max_tokens: int,
    hidden: int,
    topk: int,
    device: torch.device,
) -> list[Dispatcher]:
    """Open one buffer for the group and return the exchange of each MoE layer over it.

    All ranks of the group call this together, with the same arguments but for the device.

    Args:
        kind: one of exchange_rules.DEEPEP.
        group: the ranks that share the experts; has NCCL for tensors on GPUs.
        placements: one per layer, with the same number of slots each.
        row_format: of the rows on their way to the experts; results come back as bfloat16.
        max_tokens: most tokens that a rank dispatches at once (one micro-batch).
        hidden: values per row.
        topk: experts per token.
        device: the GPU of this rank; becomes the current one.

    Raises:
        ConfigError: the library is missing or cannot run here, or does not carry such rows.
    """
    if not placements:
        return []
    num_slots, use_fp8 = placements[0].num_slots, row_format.dtype == "fp8"
    assert all(placement.num_slots == num_slots for placement in placements), "layers differ in their number of slots"
    check_rows(kind, row_format.dtype, hidden)
    check_group(kind, num_ranks=group.size(), slots_per_rank=num_slots // group.size(), topk=topk, hidden=hidden)
    if kind == "deepep-low-latency":
        max_tokens = _low_latency_tokens(max_tokens, group.size())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with _refusal_as_config_error(kind):
        library = _library(kind)
        if kind == "deepep":
            buffer = _open_elastic(library.ElasticBuffer, group, max_tokens, hidden, topk, use_fp8, device)
        elif kind == "deepep-v1":
            buffer = _open_normal(library.Buffer, group, hidden)
        else:
            buffer = LowLatencyBuffer(
                _open_low_latency(library.Buffer, group, max_tokens, hidden, num_slots), max_tokens
            )
    ids_dtype = getattr(library, "topk_idx_t", torch.int64)
    make = _DISPATCHERS[kind]
    if kind == "deepep" and device.type != "cpu":
        make = partial(ElasticDispatcher, tile_rows=_BLOCK_ROWS)
    return [make(buffer, placement, group.rank(), ids_dtype, use_fp8) for placement in placements]


def why_not(kind: str) -> str | None:
    """Return why this process cannot exchange rows by DeepEP; None if nothing is known to be missing."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if importlib.util.find_spec("deep_ep") is None:
        return "deep_ep is not installed (github.com/deepseek-ai/DeepEP)"
    if not torch.cuda.is_available():
        return "no GPU that this torch can use"
    try:
        _library(kind)
    except Exception as error:  # whatever the library's own import raises, too
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


def _library(kind: str) -> Any:
    """Import and return the module deep_ep.

    Raises:
        AttributeError: its version lacks the classes of this kind, as deep_ep 1.0.0 does.
        Exception: any error of its import.
    """
    library = importlib.import_module("deep_ep")
    if kind == "deepep":
        _ = library.ElasticBuffer
    elif "use_fp8" not in inspect.signature(library.Buffer.low_latency_dispatch).parameters:
        raise AttributeError("deep_ep.Buffer is of a version before use_fp8")
    return library


def _open_elastic(
    buffer_class: Any,
    group: dist.ProcessGroup,
    max_tokens: int,
    hidden: int,
    topk: int,
    use_fp8: bool,
    device: torch.device,
) -> Any:
    """Open version 2's buffer, which takes over the communicator of the group's first NCCL collective."""
    group.allreduce([torch.zeros(1, device=device)]).wait()
    return buffer_class(
        group, num_max_tokens_per_rank=max_tokens, hidden=hidden, num_topk=topk, use_fp8_dispatch=use_fp8
    )


def _open_normal(buffer_class: Any, group: dist.ProcessGroup, hidden: int) -> Any:
    """Open version 1's buffer for its normal mode; its size does not depend on the number of tokens."""
    num_ranks = group.size()
    configs = buffer_class.get_dispatch_config(num_ranks), buffer_class.get_combine_config(num_ranks)
    row_bytes = 2 * hidden  # bfloat16 on the way back, whatever goes out
    num_nvl_bytes = max(config.get_nvl_buffer_size_hint(row_bytes, num_ranks) for config in configs)
    num_rdma_bytes = max(config.get_rdma_buffer_size_hint(row_bytes, num_ranks) for config in configs)
    return buffer_class(group, num_nvl_bytes, num_rdma_bytes)


def _open_low_latency(buffer_class: Any, group: dist.ProcessGroup, max_tokens: int, hidden: int, num_slots: int) -> Any:
    """Open version 1's buffer for its low-latency mode, with one queue pair per slot of a rank."""
    num_bytes = buffer_class.get_low_latency_rdma_size_hint(max_tokens, hidden, group.size(), num_slots)
    return buffer_class(
        group, num_rdma_bytes=num_bytes, low_latency_mode=True, num_qps_per_rank=num_slots // group.size()
    )


def _low_latency_tokens(max_tokens: int, num_ranks: int) -> int:
    """Round `max_tokens` up so that a slot's block, with this number of rows from each rank, is whole tiles.

    Raises:
        ConfigError: more tokens than the queues of the network card are deep.
    """
    step = _BLOCK_ROWS // math.gcd(_BLOCK_ROWS, num_ranks)
    max_tokens = -(-max_tokens // step) * step
    depth, needed = int(os.environ.get("NVSHMEM_QP_DEPTH", "1024")), 2 * (max_tokens + 1)
    if needed > depth:
        raise ConfigError(
            f"cluster.exchange is 'deepep-low-latency' with {max_tokens} tokens per rank at once, more than its queues "
            f"take: {depth // 2 - 1}; lower cluster.decode_requests (and cluster.prefill_tokens, unless prefill has "
            f"ranks of its own), or set the environment variable NVSHMEM_QP_DEPTH = {1 << (needed - 1).bit_length()}"
        )
    return max_tokens


@contextmanager
def _refusal_as_config_error(kind: str) -> Iterator[None]:
    """Convert any error of importing or opening the library, assertions included, to a ConfigError with its reason."""
    try:
        yield
    except Exception as error:
        raise ConfigError(
            f"cluster.exchange is {kind!r}, but DeepEP cannot be used here ({type(error).__name__}: {error}); "
            "use cluster.exchange = 'nccl'"
        ) from error
