"""Residual kinds: how a sublayer (attention, MLP) takes its input from the state between layers, and changes that."""

# T tokens, S of these rows, D hidden, N streams

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from batchinfer.model.config import ModelConfig
from batchinfer.model.ops import Ops
from batchinfer.model.weights import LayerWeights, ModelWeights, StreamWeights
from batchinfer_kernels.reference.hyper import StreamMix, StreamRule, end_mix


class Residual(Protocol):
    """The residual connection around one sublayer (attention or MLP).

    A sublayer adds its result to the tensor that `base` returns, in its last product.
    """

    def enter(self, state: Any) -> tuple[torch.Tensor, Any]:
        """Return a sublayer's input before its norm, and `past`, the part of the state that bypasses the sublayer."""
        ...

    def take(self, ops: Ops, past: Any, rows_S: torch.Tensor) -> Any:
        """Return the rows of `past` that belong to these tokens."""
        ...

    def base(self, past: Any) -> torch.Tensor:
        """Return the [T, D] tensor to which the sublayer adds its result."""
        ...

    def leave(self, past: Any, sum_TD: torch.Tensor) -> Any:
        """Return the state after the sublayer; `sum_TD` is the base plus the sublayer's result."""
        ...


class ResidualEnds(Protocol):
    """The state before the first layer and after the last one."""

    def open(self, embedded_TD: torch.Tensor) -> Any:
        """Return the state before the first layer."""
        ...

    def close(self, state: Any) -> torch.Tensor:
        """Return [T, D], the input of the last norm."""
        ...


class PlainResidual:
    """One row per token, to which each sublayer adds its result."""

    def open(self, embedded_TD: torch.Tensor) -> torch.Tensor:
        return embedded_TD

    def enter(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return state, state

    def take(self, ops: Ops, past: torch.Tensor, rows_S: torch.Tensor) -> torch.Tensor:
        taken: torch.Tensor = ops.gather_rows(past, rows_S)
        return taken

    def base(self, past: torch.Tensor) -> torch.Tensor:
        return past

    def leave(self, past: torch.Tensor, sum_TD: torch.Tensor) -> torch.Tensor:
        return sum_TD

    def close(self, state: torch.Tensor) -> torch.Tensor:
        return state


@dataclass(frozen=True, slots=True)
class PostNormResidual(PlainResidual):
    """One row per token, to which each sublayer adds its result after a norm."""

    ops: Ops
    norm_D: torch.Tensor
    eps: float

    def base(self, past: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(past)

    def leave(self, past: torch.Tensor, sum_TD: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.ops.rms_norm(sum_TD, self.norm_D, self.eps)
        return past + normed


@dataclass(frozen=True, slots=True)
class ScaledEmbedding(PlainResidual):
    """Rows that begin as the token's embedding times a factor."""

    factor: float

    def open(self, embedded_TD: torch.Tensor) -> torch.Tensor:
        return embedded_TD * self.factor


Past = tuple[torch.Tensor, StreamMix]  # the streams [T, N, D] before a sublayer, and its factors


@dataclass(frozen=True, slots=True)
class StreamResidual:
    """Several streams per token; by factors of the token a sublayer joins them, and they mix past it (mHC)."""

    ops: Ops
    weights: StreamWeights
    rule: StreamRule
    eps: float  # of the norm

    def enter(self, state: torch.Tensor) -> tuple[torch.Tensor, Past]:
        ops, weights = self.ops, self.weights
        mixed_TX = ops.stream_products(state, weights.mixing, self.eps)
        mix = ops.stream_mix(mixed_TX, weights.scale, weights.base, self.rule)
        return ops.join_streams(state, mix.before_TN), (state, mix)

    def take(self, ops: Ops, past: Past, rows_S: torch.Tensor) -> Past:
        streams, mix = past
        return streams[rows_S], StreamMix(*(factors[rows_S] for factors in mix))

    def base(self, past: Past) -> torch.Tensor:
        return torch.zeros_like(past[0][:, 0])

    def leave(self, past: Past, sum_TD: torch.Tensor) -> torch.Tensor:
        streams, mix = past
        after: torch.Tensor = self.ops.leave_streams(streams, mix, sum_TD)
        return after


@dataclass(frozen=True, slots=True)
class StreamEnds:
    """Streams that begin alike, and are joined before the last norm."""

    ops: Ops
    weights: StreamWeights
    rule: StreamRule
    eps: float
    num_streams: int

    def open(self, embedded_TD: torch.Tensor) -> torch.Tensor:
        return embedded_TD[:, None].expand(-1, self.num_streams, -1).contiguous()

    def close(self, state: torch.Tensor) -> torch.Tensor:
        mixed_TN = self.ops.stream_products(state, self.weights.mixing, self.eps)
        factors_TN = end_mix(mixed_TN, self.weights.scale, self.weights.base, self.rule)
        joined: torch.Tensor = self.ops.join_streams(state, factors_TN)
        return joined


def residuals_of(ops: Ops, config: ModelConfig, weights: LayerWeights) -> tuple[Residual, Residual]:
    """Return the residual connections around a layer's attention and around its MLP."""
    if config.has_post_norms:
        assert weights.attention_post_norm is not None
        assert weights.mlp_post_norm is not None
        return (
            PostNormResidual(ops, weights.attention_post_norm, config.rms_norm_eps),
            PostNormResidual(ops, weights.mlp_post_norm, config.rms_norm_eps),
        )
    if config.hyper is None:
        return PlainResidual(), PlainResidual()
    assert weights.attention_streams is not None
    assert weights.mlp_streams is not None
    rule = StreamRule(config.hyper.num_rounds, config.hyper.eps)
    attention, mlp = weights.attention_streams, weights.mlp_streams
    return (
        StreamResidual(ops, attention, rule, config.rms_norm_eps),
        StreamResidual(ops, mlp, rule, config.rms_norm_eps),
    )


def ends_of(ops: Ops, config: ModelConfig, weights: ModelWeights) -> ResidualEnds:
    """Return the entry and exit of the residual state, before the first layer and after the last one."""
    if config.family_row.scales_embedding:  # by a factor in the model's dtype
        return ScaledEmbedding(torch.tensor(config.hidden_size**0.5, dtype=weights.embedding.dtype).item())
    if config.embedding_scale != 1:
        return ScaledEmbedding(config.embedding_scale)
    if config.hyper is None:
        return PlainResidual()
    assert weights.streams is not None
    rule = StreamRule(config.hyper.num_rounds, config.hyper.eps)
    return StreamEnds(ops, weights.streams, rule, config.rms_norm_eps, config.hyper.num_streams)
