"""Hyper-connections in plain PyTorch (DeepSeek-V4 report section 2.2): several streams between sublayers.

All is in float32. exp runs in float64 and is rounded once; sums over streams go from the first to the last.
"""

# T tokens, N streams, D hidden, X = N * (2 + N) mixed values

from typing import Any, NamedTuple

import torch

from batchinfer_kernels.reference.pointwise import rms_norm, sigmoid
from batchinfer_kernels.reference.products import router


class StreamRule(NamedTuple):
    """Settings of the factors of a token's streams: rounds of Sinkhorn, and `eps`, added to sums and factors."""

    num_rounds: int
    eps: float


class StreamMix(NamedTuple):
    """Factors of a sublayer, by stream: of its input, of its result, and from old to new streams."""

    before_TN: torch.Tensor
    after_TN: torch.Tensor
    past_TNN: torch.Tensor  # from the old stream (row) to the new one (column)


def stream_products(streams_TND: torch.Tensor, mixing: Any, eps: float) -> torch.Tensor:
    """Return the products [T, X] in float32 of a token's streams, normed together in float32 without a weight.

    Args:
        mixing: [X, N * D], a router's weight as `pack_router` gives it.
    """
    flat = streams_TND.flatten(1).float()
    return router(rms_norm(flat, flat.new_ones(flat.shape[1]), eps), mixing)


def stream_mix(mixed_TX: torch.Tensor, scale: torch.Tensor, base_X: torch.Tensor, rule: StreamRule) -> StreamMix:
    """Return the factors of a sublayer; rows and columns of the last ones add up to nearly 1.

    Args:
        mixed_TX: float32, products of the normed streams: N values before, N after, N x N past the sublayer.
        scale: [3] float32, of each of these groups.
    """
    num_streams = num_streams_of(base_X)
    sizes = [num_streams, num_streams, num_streams * num_streams]
    before, after, past = (
        part_TX * scale[number] + part_X
        for number, (part_TX, part_X) in enumerate(zip(mixed_TX.split(sizes, dim=-1), base_X.split(sizes), strict=True))
    )
    past_TNN = past.unflatten(-1, (num_streams, num_streams)).double()
    past_TNN = (past_TNN - past_TNN.amax(-1, keepdim=True)).exp().float()
    past_TNN = past_TNN / _summed(past_TNN, -1) + rule.eps
    past_TNN = past_TNN / (_summed(past_TNN, -2) + rule.eps)
    for _ in range(rule.num_rounds - 1):
        past_TNN = past_TNN / (_summed(past_TNN, -1) + rule.eps)
        past_TNN = past_TNN / (_summed(past_TNN, -2) + rule.eps)
    return StreamMix(_share(before, rule.eps), 2 * sigmoid(after.double()).float(), past_TNN)


def end_mix(mixed_TN: torch.Tensor, scale: torch.Tensor, base_N: torch.Tensor, rule: StreamRule) -> torch.Tensor:
    """Return the factors [T, N] by which the streams are joined before the output head; `scale` is [1] float32."""
    return _share(mixed_TN * scale + base_N, rule.eps)


def join_streams(streams_TND: torch.Tensor, factors_TN: torch.Tensor) -> torch.Tensor:
    """Return the sum of the streams times their factors, [T, D] in the streams' dtype."""
    return _weighted(streams_TND.float(), factors_TN).to(streams_TND.dtype)


def leave_streams(streams_TND: torch.Tensor, mix: StreamMix, y_TD: torch.Tensor) -> torch.Tensor:
    """Return the streams after a sublayer with the result y, [T, N, D] in the streams' dtype."""
    wide, y = streams_TND.float(), y_TD.float()
    after = [
        mix.after_TN[:, stream, None] * y + _weighted(wide, mix.past_TNN[:, :, stream])
        for stream in range(wide.shape[1])
    ]
    return torch.stack(after, dim=1).to(streams_TND.dtype)


def num_streams_of(base_X: torch.Tensor) -> int:
    """Return the number of streams that have this number of mixed values."""
    return next(count for count in range(1, len(base_X) + 1) if count * (2 + count) == len(base_X))


def _share(x: torch.Tensor, eps: float) -> torch.Tensor:
    return sigmoid(x.double()).float() + eps


def _weighted(wide_TND: torch.Tensor, factors_TN: torch.Tensor) -> torch.Tensor:
    total = factors_TN[:, 0, None] * wide_TND[:, 0]
    for stream in range(1, wide_TND.shape[1]):
        total = total + factors_TN[:, stream, None] * wide_TND[:, stream]
    return total


def _summed(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the sum over a dim of streams, in their order, with the dim kept."""
    first, *others = x.split(1, dim=dim)
    for other in others:
        first = first + other
    return first
