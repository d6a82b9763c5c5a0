"""Grouped-query attention (arXiv 2305.13245) over paged keys and values.

    row of a page   [ keys of all KV heads | values of all KV heads ]

Attention reads them back from the pages, also those of the step's own tokens, so that a token's result does not depend
on where its prompt was cut. Layers with a window keep all pages of a prompt: a prompt can go on after any token.
"""

# T tokens of a step, S rows that are wanted, D hidden, H heads, KV key/value heads, A head width

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from batchinfer.model.attention_kind import LayerReader
from batchinfer.model.gqa_config import GqaConfig
from batchinfer.model.ops import Ops, normed
from batchinfer.model.page_memory import copy_in_pages, over_fp8_pages
from batchinfer.model.rotary_angles import Angles, RotaryAngles
from batchinfer.model.step import AttentionStep
from batchinfer.model.weights import GqaWeights
from batchinfer_kernels import row_check
from batchinfer_kernels.reference.gqa import GqaForm, NewHeads
from batchinfer_kernels.row_check import RowComputation

_WINDOW_ANGLES = "angles of layers with a window"  # in a step's schedule


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Grouped-query attention of one layer; `pages` are always this layer's, [num_pages, 64, 2 * KV * A]."""

    ops: Ops
    config: GqaConfig
    weights: GqaWeights
    norm_D: torch.Tensor | None  # weight of the norm before it
    eps: float  # of all norms
    layer: int
    angles: RotaryAngles | None  # of layers with a window, where they differ from the step's

    def project(
        self, hidden_TD: torch.Tensor, step: AttentionStep, pages: torch.Tensor, rows_S: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the queries [T, H, A], of `rows_S` alone if given; write keys and values to pages, and copy pages."""
        weights = self.weights
        x_TD = normed(self.ops, hidden_TD, self.norm_D, self.eps, weights.qkv.weight)
        heads = self.config.num_attention_heads, self.config.num_key_value_heads
        cos, sin, _ = self._angles(step)
        if self.layer in self.config.nope_layers:
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        new = NewHeads(*heads, weights.q_norm, weights.k_norm, self.eps, cos, sin, pages, step.slots)
        q_THA: torch.Tensor = self.ops.gqa_rope_and_cache(self.ops.linear(x_TD, *weights.qkv), new)
        copy_in_pages(self.ops, step, pages)
        return q_THA if rows_S is None else q_THA[rows_S]

    def attend(
        self, hidden_TD: torch.Tensor, q_THA: torch.Tensor, step: AttentionStep, pages: torch.Tensor
    ) -> torch.Tensor:
        """Return core attention and output projection, added to the residual: [T, D]."""
        if len(q_THA) == 0:
            return hidden_TD
        form = self.form
        if step.is_decode:
            out_THA = self.ops.gqa_decode(q_THA, step.keys(pages), form)
        else:
            out_THA = self.ops.gqa_prefill(q_THA, step.keys(pages), step.chunk_tokens, form)
        added: torch.Tensor = self.ops.linear(out_THA.flatten(1), *self.weights.out, residual=hidden_TD)
        return added

    @property
    def form(self) -> GqaForm:
        """The form of this layer's attention."""
        config = self.config
        return GqaForm(
            config.num_key_value_heads, config.softmax_scale, config.windows[self.layer], self.weights.sinks_H
        )

    def _angles(self, step: AttentionStep) -> Angles:
        """Return the angles of the step's tokens; all layers with a window use those of the first one."""
        if self.angles is None:
            return Angles(step.cos, step.sin, None)
        if _WINDOW_ANGLES not in step.schedule:
            step.schedule[_WINDOW_ANGLES] = self.angles.at(step.positions)
        found: Angles = step.schedule[_WINDOW_ANGLES]
        return found


def build(
    ops: Ops, config: GqaConfig, weights: GqaWeights, norm_D: torch.Tensor | None, eps: float, layer: int
) -> GroupedAttention:
    """Return the attention of a layer; those with a window may have angles of their own."""
    angles = None
    if config.window_rope is not None and config.windows[layer] is not None:
        norm = weights.q_norm if norm_D is None else norm_D
        assert norm is not None, "all models with such angles have norms"
        angles = RotaryAngles(config.window_rope, config.rotated, norm.device, ops.cos_sin)
    return GroupedAttention(ops, config, weights, norm_D, eps, layer, angles)


def load(reader: LayerReader, config: GqaConfig, prefix: str, layer: int) -> GqaWeights:
    """Read a layer's weights; queries, keys and values of a token are one product."""
    has_norms = config.qk_norm is not None
    return GqaWeights(
        qkv=reader.joined_projection(*(f"{prefix}.{name}" for name in config.qkv_widths), order=config.qkv_order),
        q_norm=reader.norm(f"{prefix}.q_norm.weight") if has_norms else None,
        k_norm=reader.norm(f"{prefix}.k_norm.weight") if has_norms else None,
        out=reader.projection(f"{prefix}.o_proj"),
        sinks_H=reader.tensor(f"{prefix}.sinks", torch.float32) if config.has_sinks else None,
    )


def products(weights: GqaWeights) -> Iterator[tuple[str, object]]:
    """Yield (kind, weight) of a layer's products; see AttentionKind."""
    yield "linear", weights.qkv.weight
    yield "linear", weights.out.weight


def computations(ops: Ops, config: GqaConfig, weights: GqaWeights, dtype: torch.dtype) -> Iterator[RowComputation]:
    """Yield attention to all keys, and to those of a window if some layers have one."""
    for window in dict.fromkeys(config.windows):
        form = GqaForm(config.num_key_value_heads, config.softmax_scale, window, weights.sinks_H)
        shape = config.num_attention_heads, config.head_dim
        decode, prefill = (
            over_fp8_pages(op, config.row_width) if ops.fp8_pages else op for op in (ops.gqa_decode, ops.gqa_prefill)
        )
        yield from row_check.grouped_attention(*shape, form, dtype, decode, prefill)
