"""The decoder: tokens of one step in, logits out; called by the engine once per step.

A layer is written once, as a generator that yields at each communication point. Running it to its end is the plain
schedule; a scheduler may instead run two of them in turn, one computing while the other's rows travel.
"""

# T tokens of a step, S rows whose logits are wanted, B requests, P pages, L layers, D hidden, E routed experts

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from batchinfer_kernels.reference_mla import PAGE_TOKENS

from batchinfer.model.config import ModelConfig, load_model_config
from batchinfer.model.mla import Attention, AttentionStep, PrefillSpan, rope_cos_sin, rope_frequencies
from batchinfer.model.moe import DenseMlp, MoeMlp, Point
from batchinfer.model.ops import Ops
from batchinfer.model.weights import ModelWeights, MoeWeights, load_weights
from batchinfer.parallel.dispatch import Dispatcher, LocalDispatcher

__all__ = ["PAGE_TOKENS", "Point", "PrefillSpan", "StepInput", "StepOutput", "Transformer", "run_to_end"]

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step: either prefill chunks (`prefill`), or the next tokens of many requests (`page_table`, `kv_tokens`).

    All tensors are on the model's device.
    """

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64, page id * 64 + offset: where this token's latent goes, all different
    logit_rows: torch.Tensor  # [S] int64, rows whose logits are wanted; may be empty
    prefill: tuple[PrefillSpan, ...] = ()  # covers all rows in order
    page_table: torch.Tensor | None = None  # [B, P] int64, pages of each request in order; padding: any valid page
    kv_tokens: torch.Tensor | None = None  # [B] int64, tokens in the pages, the new ones included; T = B * q
    copy_from: torch.Tensor | None = None  # [N] int64 slots to copy latents from, this step's own among them
    copy_to: torch.Tensor | None = None  # [N] int64 slots to copy them to, before attention reads the pages


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step computed."""

    logits: torch.Tensor  # [S, vocabulary] float32
    expert_counts: torch.Tensor  # [num_moe_layers, E] int64, tokens of this step per routed expert


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention, then an MLP, each on normed input and added to the stream."""

    attention_norm: Callable[[torch.Tensor], torch.Tensor]
    attention: Attention
    mlp_norm: Callable[[torch.Tensor], torch.Tensor]
    mlp: DenseMlp | MoeMlp

    def points(
        self, hidden_TD: torch.Tensor, step: AttentionStep, pages: torch.Tensor, expert_counts_E: torch.Tensor | None
    ) -> Generator[Point, None, torch.Tensor]:
        """One layer over one step: yields after starting a dispatch or a combine, returns the new hidden states.

        Args:
            hidden_TD: the stream.
            pages: [num_pages, 64, latent_dim] of this layer; the step's latents are written to them.
            expert_counts_E: [E] int64, receives the tokens per expert; None for a dense layer.
        """
        q_THA = self.attention.project(self.attention_norm(hidden_TD), step, pages)
        hidden_TD = hidden_TD + self.attention.attend(q_THA, step, pages)

        x_TD = self.mlp_norm(hidden_TD)
        if isinstance(self.mlp, DenseMlp):
            return hidden_TD + self.mlp.forward(x_TD)
        assert expert_counts_E is not None
        shared_under = Point.COMBINE if step.page_table is None else Point.DISPATCH
        return hidden_TD + (yield from self.mlp.points(x_TD, expert_counts_E, shared_under=shared_under))


class Transformer:
    """Weights, operations and a way to exchange expert rows; holds no state between steps (that is in the pages).

    Args:
        weights: of this rank; with fewer than all experts the dispatcher must know where the others are.
        backend: implementation of the operations, "auto" or a name.

    Raises:
        ModelError: the backend cannot run here.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, dispatcher: Dispatcher, *, backend: str = "auto"):
        self.config = config
        self.weights = weights
        self.dispatcher = dispatcher
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self.num_moe_layers = config.num_moe_layers
        self._ops = Ops.select(backend)
        self._layers = tuple(self._build_layer(layer) for layer in range(config.num_hidden_layers))
        self._frequencies = rope_frequencies(config.rope, config.qk_rope_head_dim).to(self.device)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: torch.dtype,
        dispatcher: Dispatcher | None = None,
        expert_ids: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        backend: str = "auto",
    ) -> Transformer:
        """Read a model folder (config.json and *.safetensors).

        Args:
            dtype: of weights, activations and pages.
            dispatcher: the expert exchange; None keeps all rows here and needs all experts.
            expert_ids: the routed experts this rank holds, None for all.

        Raises:
            ModelError: config.json or the tensors cannot be used.
        """
        config = load_model_config(folder)
        if dispatcher is None:
            assert expert_ids is None, "a part of the experts needs a dispatcher that knows where the others are"
            dispatcher = LocalDispatcher(config.n_routed_experts)
        weights = load_weights(folder, config, dtype=dtype, expert_ids=expert_ids, device=device)
        return cls(config, weights, dispatcher, backend=backend)

    def new_pages(self, num_pages: int) -> torch.Tensor:
        """Empty pages, [L, num_pages, 64, latent_dim] in the model's dtype."""
        shape = (self.config.num_hidden_layers, num_pages, PAGE_TOKENS, self.config.latent_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def forward(self, step: StepInput, pages: torch.Tensor) -> StepOutput:
        """Run one step to its end; `pages` (from `new_pages`) get the latents of its tokens."""
        return run_to_end(self.forward_points(step, pages))

    def forward_points(self, step: StepInput, pages: torch.Tensor) -> Generator[Point, None, StepOutput]:
        """One step as a generator over the communication points of all its layers."""
        config = self.config
        assert bool(step.prefill) != (step.page_table is not None), "a step is either prefill or decode"
        attention_step = self._attention_step(step)
        expert_counts = torch.zeros(self.num_moe_layers, config.n_routed_experts, dtype=torch.int64, device=self.device)
        rows_of_counts = iter(expert_counts)
        hidden_TD = self.weights.embedding[step.tokens]
        for layer, layer_pages in zip(self._layers, pages, strict=True):
            counts_E = next(rows_of_counts) if isinstance(layer.mlp, MoeMlp) else None
            hidden_TD = yield from layer.points(hidden_TD, attention_step, layer_pages, counts_E)
        hidden_SD = self._ops.rms_norm(hidden_TD[step.logit_rows], self.weights.norm, config.rms_norm_eps)
        return StepOutput(self._ops.linear(hidden_SD, self.weights.lm_head).float(), expert_counts)

    def _build_layer(self, layer: int) -> DecoderLayer:
        weights = self.weights.layers[layer]
        if isinstance(weights.mlp, MoeWeights):
            mlp: DenseMlp | MoeMlp = MoeMlp(self._ops, self.config, weights.mlp, self.dispatcher)
        else:
            mlp = DenseMlp(self._ops, weights.mlp)
        norm = partial(self._ops.rms_norm, eps=self.config.rms_norm_eps)
        return DecoderLayer(
            attention_norm=partial(norm, weight=weights.input_norm),
            attention=Attention(self._ops, self.config, weights.attention),
            mlp_norm=partial(norm, weight=weights.mlp_norm),
            mlp=mlp,
        )

    def _attention_step(self, step: StepInput) -> AttentionStep:
        """The parts of a step that attention uses, with the rotary angles all layers share."""
        cos, sin = rope_cos_sin(step.positions, self._frequencies, self.config.rope)
        return AttentionStep(
            cos,
            sin,
            step.positions,
            step.slots,
            step.prefill,
            step.page_table,
            step.kv_tokens,
            step.copy_from,
            step.copy_to,
        )


def run_to_end(points: Generator[Point, None, ResultT]) -> ResultT:
    """The plain schedule: go on at every communication point at once; returns what the generator returns."""
    while True:
        try:
            next(points)
        except StopIteration as end:
            return end.value
