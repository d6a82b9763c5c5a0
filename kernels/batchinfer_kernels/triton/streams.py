"""Hyper-connections in Triton (DeepSeek-V4 report section 2.2): several streams of a token, all sums in float32."""

# T tokens, N streams, D hidden, X = N * (2 + N) mixed values

import torch
import triton
import triton.language as tl

from batchinfer_kernels.reference.hyper import StreamMix, StreamRule, num_streams_of
from batchinfer_kernels.triton.numbers import to_bfloat16
from batchinfer_kernels.triton.router import router

_TILE_VALUES = 1024
_MIXED_TOKENS = 32  # of one program


def stream_products(streams_TND: torch.Tensor, mixing: torch.Tensor, eps: float) -> torch.Tensor:
    """Multiply the streams as they are; the norm's factor comes last."""
    flat_TW = streams_TND.contiguous().flatten(1)
    products_TX = router(flat_TW, mixing)
    if products_TX.numel():
        _norm_products[(len(flat_TW),)](
            flat_TW, products_TX, eps, flat_TW.shape[1], products_TX.shape[1],
            TILE=_TILE_VALUES, PRODUCTS=triton.next_power_of_2(products_TX.shape[1]),
        )  # fmt: skip
    return products_TX


def stream_mix(mixed_TX: torch.Tensor, scale: torch.Tensor, base_X: torch.Tensor, rule: StreamRule) -> StreamMix:
    """Compute exp in float32."""
    num_rows, count = len(mixed_TX), num_streams_of(base_X)
    before, after = torch.empty(2, num_rows, count, dtype=torch.float32, device=mixed_TX.device)
    past = torch.empty(num_rows, count, count, dtype=torch.float32, device=mixed_TX.device)
    if num_rows:
        _stream_mix[(triton.cdiv(num_rows, _MIXED_TOKENS),)](
            mixed_TX.contiguous(), scale.contiguous(), base_X.contiguous(), before, after, past,
            num_rows, rule.num_rounds, rule.eps,
            STREAMS=count, TILE=triton.next_power_of_2(count), TOKENS=_MIXED_TOKENS,
        )  # fmt: skip
    return StreamMix(before, after, past)


def join_streams(streams_TND: torch.Tensor, factors_TN: torch.Tensor) -> torch.Tensor:
    num_rows, count, hidden = streams_TND.shape
    out_TD = torch.empty(num_rows, hidden, dtype=streams_TND.dtype, device=streams_TND.device)
    if out_TD.numel():
        _join_streams[(num_rows, triton.cdiv(hidden, _TILE_VALUES))](
            streams_TND.contiguous(), factors_TN.contiguous(), out_TD, hidden, STREAMS=count, TILE=_TILE_VALUES
        )
    return out_TD


def leave_streams(streams_TND: torch.Tensor, mix: StreamMix, y_TD: torch.Tensor) -> torch.Tensor:
    num_rows, count, hidden = streams_TND.shape
    streams_TND = streams_TND.contiguous()
    out_TND = torch.empty_like(streams_TND)
    if out_TND.numel():
        _leave_streams[(num_rows, triton.cdiv(hidden, _TILE_VALUES))](
            streams_TND, mix.after_TN.contiguous(), mix.past_TNN.contiguous(), y_TD.contiguous(), out_TND, hidden,
            STREAMS=count, TILE=_TILE_VALUES,
        )  # fmt: skip
    return out_TND


@triton.jit
def _norm_products(streams_ptr, products_ptr, eps, width, num_products, TILE: tl.constexpr, PRODUCTS: tl.constexpr):
    """Multiply one row's products by the factor of its norm."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    squares = tl.zeros((TILE,), tl.float32)
    for start in range(0, width, TILE):
        x = tl.load(streams_ptr + row * width + start + column, mask=start + column < width, other=0.0).to(tl.float32)
        squares += x * x
    factor = 1.0 / tl.sqrt_rn(tl.sum(squares, 0) / width + eps)
    product = tl.arange(0, PRODUCTS)
    at = products_ptr + row * num_products + product
    is_inside = product < num_products
    tl.store(at, tl.load(at, mask=is_inside, other=0.0) * factor, mask=is_inside)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _stream_mix(
    mixed_ptr, scale_ptr, base_ptr, before_ptr, after_ptr, past_ptr, num_rows, num_rounds, eps,
    STREAMS: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute the factors of some tokens; the last ones are divided by sums of rows and of columns in turn."""
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    stream = tl.arange(0, TILE)
    is_stream = stream < STREAMS
    is_inside = (row < num_rows)[:, None] & is_stream[None, :]
    mixed_at = mixed_ptr + row[:, None] * (STREAMS * (2 + STREAMS)) + stream[None, :]
    base_at = base_ptr + stream
    x = tl.load(mixed_at, mask=is_inside, other=0.0) * tl.load(scale_ptr)
    x = x + tl.load(base_at, mask=is_stream, other=0.0)[None, :]
    tl.store(before_ptr + row[:, None] * STREAMS + stream[None, :], _sigmoid(x) + eps, mask=is_inside)
    x = tl.load(mixed_at + STREAMS, mask=is_inside, other=0.0) * tl.load(scale_ptr + 1)
    x = x + tl.load(base_at + STREAMS, mask=is_stream, other=0.0)[None, :]
    tl.store(after_ptr + row[:, None] * STREAMS + stream[None, :], 2.0 * _sigmoid(x), mask=is_inside)

    square = stream[:, None] * STREAMS + stream[None, :]
    is_square = is_stream[:, None] & is_stream[None, :]
    is_past = (row < num_rows)[:, None, None] & is_square[None, :, :]
    past_at = mixed_ptr + row[:, None, None] * (STREAMS * (2 + STREAMS)) + 2 * STREAMS + square[None, :, :]
    x = tl.load(past_at, mask=is_past, other=0.0) * tl.load(scale_ptr + 2)
    x = x + tl.load(base_ptr + 2 * STREAMS + square, mask=is_square, other=0.0)[None, :, :]
    x = tl.where(is_square[None, :, :], x, -float("inf"))
    peak = tl.max(x, 2)
    x = tl.exp(x - tl.where(peak == -float("inf"), 0.0, peak)[:, :, None])
    total = tl.sum(x, 2)
    x = x / tl.where(is_stream[None, :], total, 1.0)[:, :, None] + eps
    x = tl.where(is_square[None, :, :], x, 0.0)
    x = x / (tl.sum(x, 1) + tl.where(is_stream, eps, 1.0)[None, :])[:, None, :]
    for _ in range(1, num_rounds):
        x = x / (tl.sum(x, 2) + tl.where(is_stream, eps, 1.0)[None, :])[:, :, None]
        x = x / (tl.sum(x, 1) + tl.where(is_stream, eps, 1.0)[None, :])[:, None, :]
    tl.store(past_ptr + row[:, None, None] * (STREAMS * STREAMS) + square[None, :, :], x, mask=is_past)


@triton.jit
def _join_streams(streams_ptr, factors_ptr, out_ptr, hidden, STREAMS: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_inside = column < hidden
    total = tl.zeros((TILE,), tl.float32)
    for stream in tl.static_range(STREAMS):
        at = streams_ptr + (row * STREAMS + stream) * hidden + column
        x = tl.load(at, mask=is_inside, other=0.0).to(tl.float32)
        total += x * tl.load(factors_ptr + row * STREAMS + stream)
    tl.store(out_ptr + row * hidden + column, to_bfloat16(total), mask=is_inside)


@triton.jit
def _leave_streams(streams_ptr, after_ptr, past_ptr, y_ptr, out_ptr, hidden, STREAMS: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_inside = column < hidden
    y = tl.load(y_ptr + row * hidden + column, mask=is_inside, other=0.0).to(tl.float32)
    for new in tl.static_range(STREAMS):
        total = tl.zeros((TILE,), tl.float32)
        for old in tl.static_range(STREAMS):
            at = streams_ptr + (row * STREAMS + old) * hidden + column
            x = tl.load(at, mask=is_inside, other=0.0).to(tl.float32)
            total += x * tl.load(past_ptr + (row * STREAMS + old) * STREAMS + new)
        total = y * tl.load(after_ptr + row * STREAMS + new) + total
        tl.store(out_ptr + (row * STREAMS + new) * hidden + column, to_bfloat16(total), mask=is_inside)
