"""Prefill attention whose tiles are read by tensor descriptors: Hopper's copy engine brings them, no thread does.

Two variants of batchinfer_kernels.triton.prefill that no GPU has run; `tests/gpu/check.py` times all three. One takes
tiles of 128 keys. The other takes tiles of 64 and computes a tile's scores in the iteration before their use, so that
the matrix unit works on them while the multiprocessor's other units compute the softmax. Of the two products behind a
score the one over the keys' part without position comes last: Triton lets only the last one run on in the background,
and it is twice as long. Keys come in tiles from the first one on, cut as in prefill_cut.py, so a row has the same bits
in any cut and company; they are those of its variant alone.
"""

# T tokens, H heads, N query/key width without position, R rotary width, V value width, Z = N + V, X made keys

import functools

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from batchinfer_kernels.reference.mla import PAGE_TOKENS, PagedKeys
from batchinfer_kernels.triton import prefill
from batchinfer_kernels.triton.numbers import dot, to_bfloat16
from batchinfer_kernels.triton.prefill import hide, num_unmasked, rows_of_tile, weigh
from batchinfer_kernels.triton.prefill_cut import Work

_WIDE_KEYS = 128
_TILE_ROWS = 128


def why_not(q_THA: torch.Tensor, v_dim: int, rotary: int) -> str | None:
    """Return why the kernel does not take these widths, or None."""
    widths = q_THA.shape[-1] - rotary, rotary, v_dim
    if all(width >= 16 and width == triton.next_power_of_2(width) for width in widths):
        return None
    return f"widths of heads {widths} are not powers of two from 16 on"


def mla_prefill(
    q_THA: torch.Tensor,
    keys: PagedKeys,
    kv_b_HZC: torch.Tensor,
    num_tokens_B: torch.Tensor,
    *,
    v_dim: int,
    scale: float,
) -> torch.Tensor:
    """Compute what prefill.mla_prefill does, with tiles of 128 keys.

    Raises:
        ValueError: the widths are not powers of two.
    """
    return _prefill(_WIDE_KEYS, q_THA, keys, kv_b_HZC, num_tokens_B, v_dim, scale)


def mla_prefill_ahead(
    q_THA: torch.Tensor,
    keys: PagedKeys,
    kv_b_HZC: torch.Tensor,
    num_tokens_B: torch.Tensor,
    *,
    v_dim: int,
    scale: float,
) -> torch.Tensor:
    """Compute what prefill.mla_prefill does, with scores a tile ahead.

    Raises:
        ValueError: the widths are not powers of two.
    """
    return _prefill(PAGE_TOKENS, q_THA, keys, kv_b_HZC, num_tokens_B, v_dim, scale)


def _prefill(
    tile_keys: int,
    q_THA: torch.Tensor,
    keys: PagedKeys,
    kv_b_HZC: torch.Tensor,
    num_tokens_B: torch.Tensor,
    v_dim: int,
    scale: float,
) -> torch.Tensor:
    reason = why_not(q_THA, v_dim, keys.pages.shape[-1] - kv_b_HZC.shape[-1])
    if reason is not None:
        raise ValueError(reason)
    attend = functools.partial(_attend, tile_keys)
    return prefill.attend_with(attend, tile_keys, q_THA, keys, kv_b_HZC, num_tokens_B, v_dim, scale)


def _attend(
    tile_keys: int,
    q_THA: torch.Tensor,
    kv_XHZ: torch.Tensor,
    rotary_XR: torch.Tensor,
    work: Work,
    positions_T: torch.Tensor,
    out_THV: torch.Tensor,
    first_head: int,
    scale: float,
) -> None:
    """Attend with heads [first_head, first_head + heads of kv_XHZ) and write to their part of `out_THV`."""
    (_, num_heads, q_dim), v_dim, rotary = q_THA.shape, out_THV.shape[-1], rotary_XR.shape[-1]
    nope = q_dim - rotary
    q, kv = q_THA.flatten(1), kv_XHZ.flatten(1)
    _attend_tiles[(len(work.tiles_N5), kv_XHZ.shape[1])](
        TensorDescriptor.from_tensor(q, [_TILE_ROWS, nope]),
        TensorDescriptor.from_tensor(q, [_TILE_ROWS, rotary]),
        TensorDescriptor.from_tensor(kv, [tile_keys, nope]),
        TensorDescriptor.from_tensor(rotary_XR, [tile_keys, rotary]),
        TensorDescriptor.from_tensor(kv, [tile_keys, v_dim]),
        work.tiles_N5,
        work.own_key_T,
        positions_T,
        out_THV,
        first_head,
        num_heads,
        scale * prefill.LOG2_E,
        NOPE=nope,
        ROTARY=rotary,
        VALUE=v_dim,
        ROWS=_TILE_ROWS,
        KEYS=tile_keys,
        IS_AHEAD=tile_keys < _WIDE_KEYS,
        num_warps=8,
        num_stages=2 if tile_keys == _WIDE_KEYS else 3,  # as many as fit into shared memory
    )


@triton.jit
def _attend_tiles(
    q_nope_tiles, q_rotary_tiles, k_tiles, rotary_tiles, v_tiles,
    tiles_ptr, own_key_ptr, positions_ptr, out_ptr, first_head, num_heads, scale,
    NOPE: tl.constexpr, ROTARY: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    IS_AHEAD: tl.constexpr,
):  # fmt: skip
    """Attend with one head of ROWS queries of a run to all keys that they see; scores in powers of two.

    Reads behind the made keys give zeros, which no row sees.
    """
    row, is_row, low, high, prefix, stop, prefix_key, own_key = rows_of_tile(
        tiles_ptr, own_key_ptr, positions_ptr, ROWS
    )
    first_masked = num_unmasked(low, high, prefix, KEYS)
    head = tl.program_id(1)
    start = tl.load(tiles_ptr + tl.program_id(0) * 5).to(tl.int32)
    q_column = (first_head + head) * (NOPE + ROTARY)
    k_column = head * (NOPE + VALUE)
    q_nope = q_nope_tiles.load([start, q_column])
    q_rotary = q_rotary_tiles.load([start, q_column + NOPE])

    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, VALUE), tl.float32)
    if IS_AHEAD:
        first = tl.where(prefix > 0, prefix_key, own_key)
        scores = _scores(k_tiles, rotary_tiles, q_nope, q_rotary, first, k_column, ROWS, KEYS)
    for first_key in range(0, first_masked, KEYS):
        made_key = first_key + tl.where(first_key < prefix, prefix_key, own_key)
        if IS_AHEAD:
            behind = first_key + KEYS
            next_key = behind + tl.where(behind < prefix, prefix_key, own_key)
            ahead = _scores(k_tiles, rotary_tiles, q_nope, q_rotary, next_key, k_column, ROWS, KEYS)
        else:
            scores = _scores(k_tiles, rotary_tiles, q_nope, q_rotary, made_key, k_column, ROWS, KEYS)
        peak, total, weights, shrink = weigh(scores, peak, total, scale, False)
        v = v_tiles.load([made_key, k_column + NOPE])
        sums = dot(to_bfloat16(weights), v, sums * shrink[:, None])
        if IS_AHEAD:
            scores = ahead
    for first_key in tl.range(first_masked, stop, KEYS, num_stages=1):
        made_key = first_key + own_key
        scores = _scores(k_tiles, rotary_tiles, q_nope, q_rotary, made_key, k_column, ROWS, KEYS)
        scores = hide(scores, first_key, low, high, KEYS)
        peak, total, weights, shrink = weigh(scores, peak, total, scale, True)
        v = v_tiles.load([made_key, k_column + NOPE])
        sums = dot(to_bfloat16(weights), v, sums * shrink[:, None])

    value = tl.arange(0, VALUE)
    out_at = out_ptr + (row * num_heads + first_head + head)[:, None] * VALUE + value[None, :]
    tl.store(out_at, to_bfloat16(sums / total[:, None]), mask=is_row[:, None])


@triton.jit
def _scores(
    k_tiles, rotary_tiles, q_nope, q_rotary, made_key, column, ROWS: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """Return the products of the queries with the keys from `made_key` on, the rotary part first."""
    scores = dot(q_rotary, tl.trans(rotary_tiles.load([made_key, 0])), tl.zeros((ROWS, KEYS), tl.float32))
    return dot(q_nope, tl.trans(k_tiles.load([made_key, column])), scores)
