"""Multi-head latent attention (DeepSeek-V2 report section 2.1) over paged latents.

Per token and layer only a latent is kept: the normed key-value compression (C values) and one rotary key for all
heads (R values). Attention reads it back from the pages, also for the step's own tokens, so that a token's result
does not depend on where its prompt was cut. Two forms give the same numbers up to rounding, each the other's oracle:
the plain one builds keys and values per head (few large chunks: prefill), the absorbed one multiplies the query into
latent space instead (one query per request: decode).
"""

# T tokens of a step, B requests, P pages, D hidden, H heads, N query/key width without position, R rotary width
# A = N + R, C latent width, W = C + R, V value width, Z = N + V

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from batchinfer.config import PAGE_TOKENS
from batchinfer.model.attention_kind import LayerReader
from batchinfer.model.mla_config import MlaConfig
from batchinfer.model.ops import Ops, normed
from batchinfer.model.page_memory import copy_in_pages, over_fp8_pages
from batchinfer.model.step import AttentionStep
from batchinfer.model.weights import IndexerWeights, MlaWeights
from batchinfer_kernels import row_check
from batchinfer_kernels.reference import mla as reference_mla
from batchinfer_kernels.reference.fp8 import ScaledRows
from batchinfer_kernels.reference.rows import NewKeys
from batchinfer_kernels.row_check import RowComputation

assert reference_mla.PAGE_TOKENS == PAGE_TOKENS, "the kernels read pages of another size"

# The norms inside MLA have an epsilon of their own, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6
Rows = torch.Tensor | ScaledRows


@dataclass(frozen=True, slots=True)
class Attention:
    """Multi-head latent attention of one layer; `pages` are always this layer's, [num_pages, 64, C + R].

    In FP8 their rows are bytes instead, which the operations alone look into (page_format.py).
    """

    ops: Ops
    config: MlaConfig
    weights: MlaWeights
    norm_D: torch.Tensor  # weight of the norm before it
    eps: float  # of that norm

    def project(
        self, hidden_TD: torch.Tensor, step: AttentionStep, pages: torch.Tensor, rows_S: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run all work before core attention: return the queries [T, H, N + R], rotary part last.

        The tokens' latents are written to the pages at the step's slots; then the step's copies are made, so that a
        prompt can take over latents which another one computes in this very step.

        Args:
            rows_S: the rows whose queries are wanted, [S, H, N + R] then; None: all.
        """
        weights = self.weights
        x_TD = normed(self.ops, hidden_TD, self.norm_D, self.eps, weights.kv_down.weight)
        q_latent, latents_TW = self._compressed(x_TD)
        q_THA = self._placed(self.ops.linear(q_latent, *weights.q), latents_TW, step, pages)
        copy_in_pages(self.ops, step, pages)
        return q_THA if rows_S is None else q_THA[rows_S]

    def attend(
        self, hidden_TD: torch.Tensor, q_THA: torch.Tensor, step: AttentionStep, pages: torch.Tensor
    ) -> torch.Tensor:
        """Return core attention and output projection, added to the residual: [T, D]."""
        if len(q_THA) == 0:
            return hidden_TD
        return self.add_output(hidden_TD, self.core(q_THA, step, pages))

    def inputs(self, hidden_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normed residual [T, D], and the input of the queries: the residual, or its compression."""
        ops, weights = self.ops, self.weights
        x_TD = ops.rms_norm(hidden_TD, self.norm_D, self.eps)
        if weights.q_down is None:
            return x_TD, x_TD
        return x_TD, ops.rms_norm(ops.linear(x_TD, *weights.q_down), weights.q_norm, LATENT_NORM_EPS)

    def queries(
        self, x_TD: torch.Tensor, q_latent: torch.Tensor, step: AttentionStep, pages: torch.Tensor
    ) -> torch.Tensor:
        """Return the queries [T, H, N + R] of all tokens, scaled by position; write the latents to the pages."""
        latents_TW = self.ops.linear(x_TD, *self.weights.kv_down)
        return self._placed(self.ops.linear(q_latent, *self.weights.q), latents_TW, step, pages)

    def _compressed(self, x_TD: Rows) -> tuple[Rows, torch.Tensor]:
        """Return the normed input of the queries and the latents [T, C + R]; one product if the weights are joined."""
        ops, weights = self.ops, self.weights
        if weights.down is not None:
            widths = [self.config.q_lora_rank, self.config.latent_dim]
            q_TL, latents_TW = ops.linear(x_TD, *weights.down).split(widths, dim=-1)
        else:
            latents_TW = ops.linear(x_TD, *weights.kv_down)
            if weights.q_down is None:
                return x_TD, latents_TW
            q_TL = ops.linear(x_TD, *weights.q_down)
        assert weights.q_norm is not None, "queries that are compressed have a norm"
        return normed(ops, q_TL, weights.q_norm, LATENT_NORM_EPS, weights.q.weight), latents_TW

    def _placed(
        self, q_TA: torch.Tensor, latents_TW: torch.Tensor, step: AttentionStep, pages: torch.Tensor
    ) -> torch.Tensor:
        """Return the queries [T, H, N + R] with rotary part, scaled by position; write the latents to the pages."""
        config, places = self.config, (step.cos, step.sin, pages, step.slots)
        q_THA = q_TA.unflatten(-1, (config.num_attention_heads, config.qk_head_dim))
        new = NewKeys(latents_TW, self.weights.kv_norm, LATENT_NORM_EPS, *places, config.rope_interleave)
        q_THA = self.ops.rope_and_cache(q_THA, new)
        # in float32 and rounded once, in any dtype of the queries
        return q_THA if step.query_scale is None else q_THA.mul_(step.query_scale[:, None, None])

    def core(self, q_THA: torch.Tensor, step: AttentionStep, pages: torch.Tensor) -> torch.Tensor:
        """Return core attention alone, [T, H, V]: prefill chunks in the plain form, decode in the absorbed form."""
        if step.is_decode:
            options = {"latent_dim": self.config.kv_lora_rank, "scale": self.config.softmax_scale}
            return self.values(self.ops.mla_decode(self.absorbed(q_THA), step.keys(pages), **options))
        plain = {"v_dim": self.config.v_head_dim, "scale": self.config.softmax_scale}
        return self.ops.mla_prefill(q_THA, step.keys(pages), self.weights.kv_up_HZC, step.chunk_tokens, **plain)

    def absorbed(self, q_THA: torch.Tensor) -> torch.Tensor:
        """Return the queries in latent space, [T, H, C + R].

        q · (U c) = (Uᵀ q) · c moves the key up-projection U to the query.
        """
        q_nope_THN, q_rope_THR = q_THA.split([self.config.qk_nope_head_dim, self.config.qk_rope_head_dim], dim=-1)
        q_THW = q_THA.new_empty(*q_THA.shape[:2], self.config.latent_dim)
        q_latent_THC, q_rotary_THR = q_THW.split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
        self.ops.batched_linear(q_nope_THN.transpose(0, 1), self.weights.key_up_HCN, q_latent_THC.transpose(0, 1))
        q_rotary_THR.copy_(q_rope_THR)
        return q_THW

    def values(self, out_THC: torch.Tensor) -> torch.Tensor:
        """Return [T, H, V] of sums of latents: the value up-projection follows the sum."""
        return self.ops.batched_linear(out_THC.transpose(0, 1), self.weights.value_up_HVC).transpose(0, 1)

    def add_output(self, hidden_TD: torch.Tensor, out_THV: torch.Tensor) -> torch.Tensor:
        """Return the residual with the output projection of all heads added, [T, D]."""
        return self.ops.linear(out_THV.flatten(1), *self.weights.out, residual=hidden_TD)


def load(
    reader: LayerReader, config: MlaConfig, prefix: str, layer: int, indexer: IndexerWeights | None = None
) -> MlaWeights:
    """Read a layer's weights; on GPUs the two compressions of a token are one product."""
    compressed = config.q_lora_rank is not None
    kv_up = reader.source(f"{prefix}.kv_b_proj.weight")
    kv_up_HZC = kv_up.unflatten(0, (config.num_attention_heads, -1))
    key_up_HNC, value_up_HVC = kv_up_HZC.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    weights = MlaWeights(
        q_down=reader.projection(f"{prefix}.q_a_proj") if compressed else None,
        q_norm=reader.tensor(f"{prefix}.q_a_layernorm.weight") if compressed else None,
        q=reader.projection(f"{prefix}.q_b_proj" if compressed else f"{prefix}.q_proj"),
        kv_down=reader.projection(f"{prefix}.kv_a_proj_with_mqa"),
        kv_norm=reader.tensor(f"{prefix}.kv_a_layernorm.weight"),
        kv_up_HZC=reader.pack(kv_up_HZC),
        key_up_HCN=reader.pack(key_up_HNC.transpose(1, 2)),
        value_up_HVC=reader.pack(value_up_HVC),
        out=reader.projection(f"{prefix}.o_proj"),
        indexer=indexer,
    )
    return weights.joined() if reader.joins_products else weights


def products(weights: MlaWeights) -> Iterator[tuple[str, object]]:
    """Yield (kind, weight) of a layer's products; see AttentionKind."""
    yield "batched", weights.key_up_HCN
    yield "batched", weights.value_up_HVC
    for projection in (weights.q_down, weights.q, weights.kv_down, weights.out):
        if projection is not None:
            yield "linear", projection.weight


def computations(ops: Ops, config: MlaConfig, weights: MlaWeights, dtype: torch.dtype) -> Iterator[RowComputation]:
    """Yield both forms of attention, if their weights are plain."""
    if not isinstance(weights.kv_up_HZC, torch.Tensor):
        return
    shape = attention_shape(config)
    decode, prefill = (
        over_fp8_pages(op, shape.latent_dim) if ops.fp8_pages else op for op in (ops.mla_decode, ops.mla_prefill)
    )
    yield row_check.decode_attention(shape, dtype, decode)
    yield row_check.prefill_attention(shape, weights.kv_up_HZC, prefill)


def attention_shape(config: MlaConfig) -> row_check.AttentionShape:
    """Return the widths of attention for its check."""
    return row_check.AttentionShape(
        num_heads=config.num_attention_heads,
        nope_dim=config.qk_nope_head_dim,
        rotary_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        latent_dim=config.kv_lora_rank,
    )
