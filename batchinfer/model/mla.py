"""Multi-head latent attention (DeepSeek-V2 report section 2.1) over paged latents.

Per token and layer only a latent is kept: the normed key-value compression (C values) and one rotary key for all
heads (R values). Attention reads it back from the pages, also for the step's own tokens, so that a token's result
does not depend on where its prompt was cut. Two forms give the same numbers up to rounding, each the other's oracle:
the plain one builds keys and values per head (few large chunks: prefill), the absorbed one multiplies the query into
latent space instead (one query per request: decode).
"""

# T tokens of a step, B requests, P pages, D hidden, H heads, N query/key width without position, R rotary width
# A = N + R, C latent width, W = C + R, V value width, Z = N + V

import math
import mmap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

import torch

from batchinfer.config import PAGE_TOKENS
from batchinfer.model.config import ModelConfig
from batchinfer.model.ops import Ops, normed
from batchinfer.model.page_format import FP8, PageFormat
from batchinfer.model.rope_config import QueryScale, RopeConfig
from batchinfer.model.step import AttentionStep
from batchinfer.model.weights import AttentionWeights
from batchinfer.records import ConfigError
from batchinfer_kernels.reference import mla as reference_mla
from batchinfer_kernels.reference.fp8 import ScaledRows
from batchinfer_kernels.reference.rows import NewKeys

assert reference_mla.PAGE_TOKENS == PAGE_TOKENS, "the kernels read pages of another size"

# The norms inside MLA have an epsilon of their own, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6
_PAGE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, FP8: torch.uint8}
Rows = torch.Tensor | ScaledRows
_FIRST_POSITIONS = 1024  # whose angles are computed at once


@dataclass(frozen=True, slots=True)
class Attention:
    """Multi-head latent attention of one layer; `pages` are always this layer's, [num_pages, 64, C + R].

    In FP8 their rows are bytes instead, which the operations alone look into (page_format.py).
    """

    ops: Ops
    config: ModelConfig
    weights: AttentionWeights
    norm_D: torch.Tensor  # weight of the norm before it

    def project(
        self, hidden_TD: torch.Tensor, step: AttentionStep, pages: torch.Tensor, rows_S: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run all work before core attention: return the queries [T, H, N + R], rotary part last.

        The tokens' latents are written to the pages at the step's slots; then the step's copies are made, so that a
        prompt can take over latents which another one computes in this very step.

        Args:
            rows_S: the rows whose queries are wanted, [S, H, N + R] then; None: all.
        """
        weights, config = self.weights, self.config
        x_TD = normed(self.ops, hidden_TD, self.norm_D, config.rms_norm_eps, weights.kv_down.weight)
        q_latent, latents_TW = self._compressed(x_TD)
        q_THA = self._placed(self.ops.linear(q_latent, *weights.q), latents_TW, step, pages)
        copy_latents(self.ops, step, pages)
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
        x_TD = ops.rms_norm(hidden_TD, self.norm_D, self.config.rms_norm_eps)
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


def zeroed(num_bytes: int) -> mmap.mmap:
    """Return zeros that take no memory until their pages are touched; in large pages if the system has them.

    Raises:
        OSError: the address space does not suffice.
    """
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # a system without large pages, or without the choice
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def empty_pages(config: ModelConfig, num_pages: int, form: PageFormat, device: torch.device) -> torch.Tensor:
    """Return empty KV pages [L, num_pages, 64, row]; on a CPU they take memory when they are used.

    A row is kv_dim values, or bytes in FP8.

    Raises:
        ConfigError: the address space does not suffice.
    """
    dtype = _PAGE_DTYPES[form.dtype]
    shape = (config.num_hidden_layers, num_pages, PAGE_TOKENS, form.row_width(config))
    num_values = math.prod(shape)
    if device.type != "cpu" or num_values == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        memory = zeroed(num_values * dtype.itemsize)
    except OSError as error:
        size_gb = num_values * dtype.itemsize / 1e9
        raise ConfigError(
            f"no memory for KV pages of {size_gb:.1f} GB: {error.strerror}; lower cluster.page_bytes"
        ) from error
    return torch.frombuffer(memory, dtype=dtype, count=num_values).view(shape)


def copy_latents(ops: Ops, step: AttentionStep, pages: torch.Tensor) -> None:
    """Make a step's copies between slots of one layer's pages."""
    if step.copy_from is not None and step.copy_to is not None and len(step.copy_to):
        ops.copy_rows(pages.view(-1, pages.shape[-1]), step.copy_from, step.copy_to)


def rope_frequencies(rope: RopeConfig, rope_dim: int) -> torch.Tensor:
    """Return the angle per position of each rotary pair, [R / 2] float32; with YaRN (arXiv 2309.00071 section 3.2).

    YaRN leaves pairs that turn often within the original window as they are, slows those that turn rarely by
    `factor`, and goes from one to the other linearly in between.
    """
    steps = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    # powers rounded once: those of a library differ in their last bits between processors
    periods = torch.tensor([float(Decimal(rope.theta) ** Decimal(step)) for step in steps.tolist()])
    if rope.rope_type != "yarn":
        return 1.0 / periods
    first, last = (
        rope_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    slowed = ((torch.arange(rope_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return (1.0 / (rope.factor * periods)) * slowed + (1.0 / periods) * (1 - slowed)


def rope_cos_sin(
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    rope: RopeConfig,
    cos_sin: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of each position's angles, each [T, R / 2] float32; angles in float32 as in training."""
    return cos_sin(positions.float()[:, None] * frequencies, rope.cos_sin_scale)


def query_scales(scale: QueryScale) -> torch.Tensor:
    """Return the factor on the queries of each window of positions, float32; the first is 1.

    Logarithms rounded once: those of a library differ in their last bits between processors.
    """
    beta = Decimal(scale.beta)
    return torch.tensor([float(1 + beta * Decimal(1 + number).ln()) for number in range(scale.num_windows)])


class Angles(NamedTuple):
    """Factors of attention at some positions: cos and sin of their angles, each [T, R / 2] float32.

    query_scale: [T] float32, factor of queries; None: 1.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    query_scale: torch.Tensor | None


class RotaryAngles:
    """Angles of a model's positions; on a CPU the angles of each position are computed once and kept."""

    def __init__(
        self,
        rope: RopeConfig,
        rope_dim: int,
        device: torch.device,
        cos_sin: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self._rope = rope
        self._cos_sin = cos_sin
        self._frequencies = rope_frequencies(rope, rope_dim).to(device)
        self._cos, self._sin = self._of(torch.arange(0, device=device))
        self._query_scales = None if rope.query_scale is None else query_scales(rope.query_scale).to(device)

    def at(self, positions_T: torch.Tensor) -> Angles:
        """Return the factors of these positions, see Angles."""
        query_scale_T = self._query_scale(positions_T)
        if not positions_T.is_cpu:  # how far the table must reach is not known on the host
            return Angles(*self._of(positions_T), query_scale_T)
        cos, sin = self.table(int(positions_T.max()) + 1 if len(positions_T) else 0)
        return Angles(cos.index_select(0, positions_T), sin.index_select(0, positions_T), query_scale_T)

    def _query_scale(self, positions_T: torch.Tensor) -> torch.Tensor | None:
        if self._rope.query_scale is None or self._query_scales is None:
            return None
        # guesses may lie behind the model's window, by less than one more
        return self._query_scales.index_select(0, positions_T // self._rope.query_scale.window)

    def table(self, num_positions: int) -> list[torch.Tensor]:
        """Return cos and sin of positions 0 .. N - 1 on a CPU, each [N, R / 2] float32, N at least `num_positions`."""
        if num_positions > len(self._cos):
            known = torch.arange(max(2 * len(self._cos), num_positions, _FIRST_POSITIONS))
            self._cos, self._sin = self._of(known)
        return [self._cos, self._sin]

    def _of(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rope_cos_sin(positions, self._frequencies, self._rope, self._cos_sin)
