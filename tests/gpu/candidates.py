"""The implementations that the GPU scripts check and time, and their single FP8 products.

The products are what `linear`, `grouped_mlp` and `masked_mlp` do with rows that are in FP8 already, one at a time: so
they can stand beside published figures.
"""

# G groups (experts), M rows of a group, N columns of the result, K depth, J scales of a row

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from batchinfer_kernels import registry
from batchinfer_kernels.hopper import invariant, libraries
from batchinfer_kernels.reference.block_scaled import BlockScaled
from batchinfer_kernels.triton import probe

NAMES = (registry.INVARIANT, "hopper", "triton")
# Not in the registry: timed beside the candidates that jobs take, until a GPU has shown which is faster.
DESCRIPTORS, AHEAD, PIECES = "triton-descriptors", "triton-ahead", "hopper-pieces"
_SHORT_PIECE_PAGES = 40
# A few values per token, or rows moved: plain PyTorch on GPUs, too.
PLAIN = {"apply_token_bitmask", "cos_sin", "copy_rows", "gather_rows", "log_sum_exp", "most_likely"}
DENSE, CONTIGUOUS, MASKED = "product, dense", "product, contiguous", "product, masked"
_HOPPER_PROBES = {
    "linear": libraries.why_not_deep_gemm,
    "grouped_mlp": libraries.why_not_deep_gemm,
    "masked_mlp": libraries.why_not_deep_gemm,
    "mla_decode": libraries.why_not_flash_mla,
    "mla_decode_fp8": libraries.why_not_flash_mla,
    "choose_keys": libraries.why_not_deep_gemm,
    "mla_sparse": libraries.why_not_flash_mla,
    DENSE: libraries.why_not_deep_gemm,
    CONTIGUOUS: libraries.why_not_deep_gemm,
    MASKED: libraries.why_not_deep_gemm,
}


def has(name: str, op: str) -> bool:
    """Whether the candidate has a version of this operation at all."""
    if op in PLAIN:
        return False
    only = {
        registry.SDPA: ("mla_prefill",),
        registry.INVARIANT: ("mla_decode",),
        DESCRIPTORS: ("mla_prefill", "masked_mlp"),
        AHEAD: ("mla_prefill",),
        PIECES: ("mla_decode",),
        "hopper": _HOPPER_PROBES,
    }
    return op in only.get(name, (op,))


def why_not(name: str, op: str) -> str | None:
    """Return why the candidate's version cannot run here, or None."""
    if name == registry.SDPA:
        return None
    if name in (registry.INVARIANT, PIECES):
        return invariant.why_not()
    return probe.why_not() if name in ("triton", DESCRIPTORS, AHEAD) else _HOPPER_PROBES[op]()


def function(name: str, op: str) -> Callable[..., Any]:
    """The candidate's version; signatures as in `reference`, those of products as below."""
    if (name, op) in _OWN:
        return _OWN[name, op]
    behind = NAMES[NAMES.index(name) :] if name in NAMES else (name,)
    return registry.bind(op, (*behind, registry.REFERENCE))


def takes_blocks_of_scales(run: Callable[..., Any]) -> bool:
    """Whether a product takes scales as [G, M, J], each group's by column, instead of [G * M, J] by column."""
    return run is _hopper_masked


def _by_descriptors(name: str, *args: Any, **options: Any) -> torch.Tensor:
    """Prefill attention over tiles that are read by tensor descriptors."""
    import prefill_tma

    result: torch.Tensor = getattr(prefill_tma, name)(*args, **options)
    return result


def _experts_by_descriptors(*args: Any, **options: Any) -> torch.Tensor:
    """Experts whose tiles are read by tensor descriptors, with the activation in the first product."""
    import experts_tma

    return experts_tma.masked_mlp(*args, **options)


def _pieces(*args: Any, **options: Any) -> torch.Tensor:
    """Decode attention with cuts between requests and every 40 pages, dealt to the parts of the GPU by size."""
    names = ("spread_queries", "merge_pieces")
    uses: dict[str, Any] = {op: registry.bind(op, ("triton", registry.REFERENCE)) for op in names}
    return invariant.decode_in_pieces(*args, **options, **uses, piece_pages=_SHORT_PIECE_PAGES)


def _hopper_dense(x_GMK: torch.Tensor, scales: torch.Tensor, weight: BlockScaled) -> torch.Tensor:
    """[M, N] bfloat16 of the only group."""
    out = _room(x_GMK, weight)
    _gemm(libraries.FP8_GEMM)((x_GMK[0], scales), (weight.values[0], weight.scales[0]), out, compiled_dims="nk")
    return out


def _hopper_contiguous(x_GMK: torch.Tensor, scales: torch.Tensor, weight: BlockScaled) -> torch.Tensor:
    """[G * M, N] bfloat16; M a multiple of 128."""
    out, group = _room(x_GMK, weight), _group_of_row(*x_GMK.shape[:2], x_GMK.device)
    _gemm(libraries.FP8_CONTIGUOUS)((x_GMK.flatten(0, 1), scales), (weight.values, weight.scales), out, group)
    return out


def _hopper_masked(x_GMK: torch.Tensor, scales: torch.Tensor, weight: BlockScaled) -> torch.Tensor:
    """[G * M, N] bfloat16, all rows filled; M a multiple of 128."""
    num_groups, num_rows, _ = x_GMK.shape
    out = _room(x_GMK, weight)
    counts = _counts(num_groups, num_rows, torch.int32, x_GMK.device)
    out_GMN = out.unflatten(0, (num_groups, -1))
    _gemm(libraries.FP8_MASKED)((x_GMK, scales), (weight.values, weight.scales), out_GMN, counts, num_rows)
    return out


def _triton_dense(x_GMK: torch.Tensor, scales: torch.Tensor, weight: BlockScaled) -> torch.Tensor:
    from batchinfer_kernels.triton import gemm

    return gemm.product(x_GMK[0], weight[0], scales, out=_room(x_GMK, weight))


def _triton_contiguous(x_GMK: torch.Tensor, scales: torch.Tensor, weight: BlockScaled) -> torch.Tensor:
    from batchinfer_kernels.triton import gemm, tiles

    num_groups, num_rows, _ = x_GMK.shape
    counts = _counts(num_groups, num_rows, torch.int64, x_GMK.device)
    row_tiles = tiles.contiguous_tiles(counts, num_groups * num_rows)
    return gemm.product(x_GMK.flatten(0, 1), weight, scales, out=_room(x_GMK, weight), tiles=row_tiles)


def _triton_masked(x_GMK: torch.Tensor, scales: torch.Tensor, weight: BlockScaled) -> torch.Tensor:
    from batchinfer_kernels.triton import gemm, tiles

    num_groups, num_rows, _ = x_GMK.shape
    row_tiles = tiles.masked_tiles(_counts(num_groups, num_rows, torch.int64, x_GMK.device), num_rows)
    return gemm.product(x_GMK.flatten(0, 1), weight, scales, out=_room(x_GMK, weight), tiles=row_tiles)


_OWN: dict[tuple[str, str], Callable[..., torch.Tensor]] = {
    (DESCRIPTORS, "masked_mlp"): _experts_by_descriptors,
    (DESCRIPTORS, "mla_prefill"): functools.partial(_by_descriptors, "mla_prefill"),
    (AHEAD, "mla_prefill"): functools.partial(_by_descriptors, "mla_prefill_ahead"),
    (PIECES, "mla_decode"): _pieces,
    ("hopper", DENSE): _hopper_dense,
    ("hopper", CONTIGUOUS): _hopper_contiguous,
    ("hopper", MASKED): _hopper_masked,
    ("triton", DENSE): _triton_dense,
    ("triton", CONTIGUOUS): _triton_contiguous,
    ("triton", MASKED): _triton_masked,
}


def _room(x_GMK: torch.Tensor, weight: BlockScaled) -> torch.Tensor:
    num_groups, num_rows, _ = x_GMK.shape
    return torch.empty(num_groups * num_rows, weight.values.shape[1], dtype=torch.bfloat16, device=x_GMK.device)


def _gemm(names: tuple[str, ...]) -> Callable[..., None]:
    gemm = libraries.deep_gemm(names)
    assert gemm is not None, f"the probe has found no {names[0]}"
    return gemm


@functools.cache
def _group_of_row(num_groups: int, num_rows: int, device: torch.device) -> torch.Tensor:
    """Made once, so that it is not timed."""
    return torch.arange(num_groups, dtype=torch.int32, device=device).repeat_interleave(num_rows)


@functools.cache
def _counts(num_groups: int, num_rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((num_groups,), num_rows, dtype=dtype, device=device)
