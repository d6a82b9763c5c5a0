"""The decoder: tokens of one step in, logits out; called by the engine once per step.

A layer is written once, as a generator that yields while rows travel between ranks. Running it to its end is the plain
schedule; parallel/overlap.py may instead run two of them in turn, one computing while the other's rows travel.
"""

# T tokens of a step, S rows whose logits are wanted, B requests, P pages, L layers, D hidden, E routed experts

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from batchinfer.model.config import ModelConfig, load_model_config
from batchinfer.model.fresh_memory import FreshMemory, zeroed
from batchinfer.model.fused.layers import FusedAttention, attention_of, mixture_of, stack_of
from batchinfer.model.mla import Attention, AttentionStep, PrefillSpan, RotaryAngles
from batchinfer.model.moe import DenseMlp, MoeMlp, Point
from batchinfer.model.ops import Ops
from batchinfer.model.plain_rows import plain_computations
from batchinfer.model.sampling import LogitOps
from batchinfer.model.step import StepInput, StepTensors
from batchinfer.model.weights import ModelWeights, MoeWeights, exchange_experts, load_weights
from batchinfer.parallel.dispatch import Dispatcher, LocalDispatcher
from batchinfer.parallel.overlap import run_to_end
from batchinfer.parallel.placement import Placement
from batchinfer.parallel.row_format import RowFormat
from batchinfer.parallel.spans import MicroBatchSpans, SpanLog
from batchinfer.records import ConfigError
from batchinfer_kernels.reference.mla import PAGE_TOKENS
from batchinfer_kernels.row_check import RowComputation

__all__ = ["PAGE_TOKENS", "Point", "PrefillSpan", "StepInput", "StepOutput", "Transformer"]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step computed."""

    logits: torch.Tensor  # [S, vocabulary] float32
    expert_counts: torch.Tensor  # [num_moe_layers, E] int64, tokens of this step per routed expert


@dataclass(frozen=True, slots=True)
class WantedRows:
    """Rows of a prefill step whose logits are wanted. To the last layer they are what decode is: a query per prompt.

    Of the other tokens it only makes latents; most of a prompt never meets its experts.
    """

    rows: torch.Tensor  # [S] int64
    step: AttentionStep  # of these rows alone, in the absorbed form


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention, then an MLP, each on normed input and added to the stream."""

    attention: Attention | FusedAttention
    mlp: DenseMlp | MoeMlp

    def points(
        self,
        hidden_TD: torch.Tensor,
        step: AttentionStep,
        pages: torch.Tensor,
        expert_counts_E: torch.Tensor | None,
        spans: MicroBatchSpans,
        wanted: WantedRows | None = None,
    ) -> Generator[Point, None, torch.Tensor]:
        """One layer over one step; returns the new hidden states.

        Args:
            hidden_TD: the stream.
            pages: [num_pages, 64, latent_dim] of this layer; the step's latents are written to them.
            expert_counts_E: [E] int64, receives the tokens per expert; None for a dense layer.
            wanted: the rows whose new hidden states are wanted; None: all.

        Yields:
            While rows travel, and in decode before core attention; a dense layer has nothing to yield for.
        """
        if isinstance(self.mlp, DenseMlp):
            with spans.compute("DENSE"):
                return self.mlp.add_to(self._attended(hidden_TD, step, pages, wanted))
        assert expert_counts_E is not None
        if step.is_decode:
            assert wanted is None, "in decode all rows are wanted"
            with spans.compute("ATTN-0"):
                q_THA = self.attention.project(hidden_TD, step, pages)
            yield Point.QUERIES
            with spans.compute("ATTN-1"):
                hidden_TD = self.attention.attend(hidden_TD, q_THA, step, pages)
                routing = self.mlp.route(hidden_TD, expert_counts_E, step.is_counted)
            return (yield from self.mlp.points(hidden_TD, routing, spans, shared_under=Point.DISPATCH))
        with spans.compute("ATTN"):
            hidden_TD = self._attended(hidden_TD, step, pages, wanted)
            routing = self.mlp.route(hidden_TD, expert_counts_E)
        return (yield from self.mlp.points(hidden_TD, routing, spans, shared_under=Point.COMBINE))

    def _attended(
        self, hidden_TD: torch.Tensor, step: AttentionStep, pages: torch.Tensor, wanted: WantedRows | None
    ) -> torch.Tensor:
        """The stream after attention, its wanted rows alone; all tokens' latents go to the pages."""
        if wanted is None:
            return self.attention.attend(hidden_TD, self.attention.project(hidden_TD, step, pages), step, pages)
        q_SHA = self.attention.project(hidden_TD, step, pages, wanted.rows)
        return self.attention.attend(hidden_TD[wanted.rows], q_SHA, wanted.step, pages)


class Transformer:
    """Weights, operations and a way to exchange expert rows; holds no state between steps (that is in the pages).

    Args:
        weights: of this rank; with fewer than all experts the dispatchers must know where the others are.
        dispatchers: the expert exchange of each mixture-of-experts layer.
        ops: the operations, those that `weights` were packed for.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, dispatchers: Sequence[Dispatcher], ops: Ops):
        self.config = config
        self.weights = weights
        self._dispatchers = iter(dispatchers)
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self.num_moe_layers = config.num_moe_layers
        self._ops = ops
        self._layers = tuple(self._build_layer(layer) for layer in range(config.num_hidden_layers))
        self._angles = RotaryAngles(config.rope, config.qk_rope_head_dim, self.device, ops.cos_sin)
        parts = [(layer.attention, layer.mlp) for layer in self._layers]
        self._stack = stack_of(parts, weights.embedding, weights.norm, weights.lm_head, config.rms_norm_eps)
        self._num_stack_rows = 0

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: torch.dtype,
        eight_bit: bool = False,
        dispatchers: Sequence[Dispatcher] | None = None,
        expert_ids: Sequence[Sequence[int]] | None = None,
        device: torch.device | str = "cpu",
        backend: str = "auto",
        memory: FreshMemory | None = None,
    ) -> Transformer:
        """Read a model folder (config.json and *.safetensors).

        Args:
            dtype: of weights, activations and pages.
            eight_bit: hold projections and experts in 8 bits with a scale per block, and multiply them so.
            dispatchers: the expert exchange of each mixture-of-experts layer; None keeps all rows here.
            expert_ids: per mixture-of-experts layer the experts in this rank's slots, None for all in order.
            backend: implementation of the operations, "auto" or a name.
            memory: where weights go as long as there is room.

        Raises:
            ModelError: config.json or the tensors cannot be used, or the backend cannot run here.
        """
        config = load_model_config(folder)
        ops = Ops.select(backend, dtype, eight_bit=eight_bit, device=device)
        if dispatchers is None:
            assert expert_ids is None, "a part of the experts needs dispatchers that know where the others are"
            # a row is rounded once, not once per expert
            row_format = RowFormat("fp8") if ops.holds_fp8(device) else None
            dispatchers = [LocalDispatcher(config.n_routed_experts, row_format, gathers=False)] * config.num_moe_layers
        weights = load_weights(
            folder,
            config,
            dtype=dtype,
            expert_ids=expert_ids,
            device=device,
            ops=ops,
            memory=memory,
        )
        return cls(config, weights, dispatchers, ops)

    def place_experts(self, folder: Path, placements: Sequence[Placement], rank: int) -> None:
        """Between steps: hold the experts that these placements give to `rank`; all ranks do this together.

        Args:
            folder: the model's, for experts that this rank does not hold yet.
            placements: one per mixture-of-experts layer.

        Raises:
            ModelError: a file cannot be read.
        """
        expert_ids = [placement.experts_of_rank(rank) for placement in placements]
        self.weights = exchange_experts(self.weights, folder, self.config, expert_ids)
        mixtures = [layer.mlp for layer in self._layers if isinstance(layer.mlp, MoeMlp)]
        for mlp, placement in zip(mixtures, placements, strict=True):
            mlp.dispatcher.place(placement)

    @property
    def logit_ops(self) -> LogitOps:
        """What `sample` asks about logits."""
        return LogitOps(self._ops.argmax, self._ops.draw, self._ops.log_sum_exp)

    @property
    def kernels(self) -> str:
        """Where the operations' implementations come from, and how they multiply."""
        return self._ops.names(self.dtype) + (", 8-bit products" if self._ops.eight_bit else "")

    @property
    def has_fixed_sums(self) -> bool:
        """Whether all operations are those in C++, whose results do not depend on the processor or on a library."""
        return self._ops.has_fixed_sums

    @property
    def plain_computations(self) -> Iterator[RowComputation]:
        """What plain PyTorch computes of rows here, each shape once; nothing where everything runs in C++."""
        return plain_computations(self._ops, self.config, self.weights)

    def new_pages(self, num_pages: int) -> torch.Tensor:
        """Empty pages, [L, num_pages, 64, latent_dim] in the model's dtype; on a CPU they take memory when used.

        Raises:
            ConfigError: there is not so much address space.
        """
        shape = (self.config.num_hidden_layers, num_pages, PAGE_TOKENS, self.config.latent_dim)
        num_values = torch.Size(shape).numel()
        if self.device.type == "cpu" and num_values:
            try:
                memory = zeroed(num_values * self.dtype.itemsize)
            except OSError as error:
                size_gb = num_values * self.dtype.itemsize / 1e9
                raise ConfigError(
                    f"no memory for KV pages of {size_gb:.1f} GB: {error.strerror}; lower cluster.page_bytes"
                ) from error
            return torch.frombuffer(memory, dtype=self.dtype, count=num_values).view(shape)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def forward(self, step: StepInput, pages: torch.Tensor) -> StepOutput:
        """Run one step to its end; `pages` (from `new_pages`) get the latents of its tokens."""
        return self.run(StepTensors.of(step, self.device), pages)

    def run(self, step: StepTensors, pages: torch.Tensor) -> StepOutput:
        """As `forward`; the step is on the device already, where nothing but these tensors decides what happens."""
        return run_to_end(self.points(step, pages))

    @property
    def can_be_recorded(self) -> bool:
        """Whether a CUDA graph can hold a decode step: on a GPU, with nothing in it that the host has to look at."""
        dispatchers = [layer.mlp.dispatcher for layer in self._layers if isinstance(layer.mlp, MoeMlp)]
        stays_here = all(isinstance(dispatcher, LocalDispatcher) for dispatcher in dispatchers)
        return self.device.type == "cuda" and stays_here and not self._ops.reads_on_host

    @property
    def decodes_at_once(self) -> bool:
        """Whether `decode` can run: a step of this model is a single call on the CPU."""
        return self._stack is not None

    def decode(self, step: StepInput, pages: torch.Tensor) -> StepOutput:
        """As `forward` of a decode step, all layers in one call."""
        assert self._stack is not None
        assert step.page_table is not None
        cos, sin = self._angles.at(step.positions)
        logits_SV, counts = self._stack.decode(
            *(step.tokens, cos, sin, step.positions, step.slots),
            *(step.page_table.contiguous(), step.kv_tokens, step.logit_rows, pages),
        )
        self._num_stack_rows += len(counts) * len(step.tokens) * self.config.num_experts_per_tok
        no_counts = torch.zeros(0, self.config.n_routed_experts, dtype=torch.int64)
        return StepOutput(logits_SV, torch.stack(counts) if counts else no_counts)

    def forward_points(
        self, step: StepInput, pages: torch.Tensor, spans: MicroBatchSpans | None = None
    ) -> Generator[Point, None, StepOutput]:
        """One step as a generator over the points of all its layers.

        Args:
            spans: receives what was done when.
        """
        return (yield from self.points(StepTensors.of(step, self.device), pages, spans))

    def points(
        self, step: StepTensors, pages: torch.Tensor, spans: MicroBatchSpans | None = None
    ) -> Generator[Point, None, StepOutput]:
        """See `forward_points`; the step is on the device already."""
        config = self.config
        spans = spans or MicroBatchSpans(SpanLog())
        attention_step = self._attention_step(step)
        expert_counts = torch.zeros(self.num_moe_layers, config.n_routed_experts, dtype=torch.int64, device=self.device)
        rows_of_counts = iter(expert_counts)
        hidden_TD = self.weights.embedding[step.tokens]
        wanted = None if step.chunk_of_row is None else _wanted_rows(step.logit_rows, step.chunk_of_row, attention_step)
        for layer, layer_pages in zip(self._layers, pages, strict=True):
            counts_E = next(rows_of_counts) if isinstance(layer.mlp, MoeMlp) else None
            of_layer = wanted if layer is self._layers[-1] else None
            hidden_TD = yield from layer.points(hidden_TD, attention_step, layer_pages, counts_E, spans, of_layer)
        with spans.compute("LOGITS"):
            hidden_SD = hidden_TD if wanted is not None else hidden_TD[step.logit_rows]
            hidden_SD = self._ops.rms_norm(hidden_SD, self.weights.norm, config.rms_norm_eps)
            logits_SV = self._ops.linear(hidden_SD, self.weights.lm_head, float32_out=True)
        return StepOutput(logits_SV, expert_counts)

    @property
    def num_expert_rows(self) -> int:
        """(token, expert) rows that this rank's experts have computed so far."""
        mixtures = [layer.mlp for layer in self._layers if isinstance(layer.mlp, MoeMlp)]
        on_device = [mlp.num_device_rows for mlp in mixtures if mlp.counts_on_device]
        of_device = int(torch.stack(on_device).sum()) if on_device else 0
        return of_device + self._num_stack_rows + sum(mlp.num_local_rows for mlp in mixtures)

    def _build_layer(self, layer: int) -> DecoderLayer:
        weights = self.weights.layers[layer]
        if isinstance(weights.mlp, MoeWeights):
            dispatcher = next(self._dispatchers)
            mlp: DenseMlp | MoeMlp = mixture_of(self._ops, self.config, weights.mlp, weights.mlp_norm, dispatcher)
        else:
            mlp = DenseMlp(self._ops, self.config, weights.mlp, weights.mlp_norm)
        return DecoderLayer(attention_of(self._ops, self.config, weights.attention, weights.input_norm), mlp)

    def _attention_step(self, step: StepTensors) -> AttentionStep:
        """The parts of a step that layers use, with the rotary angles all of them share."""
        cos, sin = self._angles.at(step.positions)
        return AttentionStep(
            cos,
            sin,
            step.positions,
            step.slots,
            step.page_table,
            step.kv_tokens,
            step.chunk_tokens,
            step.copy_from,
            step.copy_to,
            step.is_counted,
        )


def _wanted_rows(rows_S: torch.Tensor, chunk_of_row_S: torch.Tensor, step: AttentionStep) -> WantedRows:
    """The part of a prefill step that its last layer has to finish."""
    assert step.page_table is not None
    positions_S = step.positions[rows_S]
    own_step = replace(
        step,
        cos=step.cos[rows_S],
        sin=step.sin[rows_S],
        positions=positions_S,
        slots=step.slots[rows_S],
        page_table=step.page_table[chunk_of_row_S],
        kv_tokens=positions_S + 1,
        chunk_tokens=None,
        schedule={},
    )
    return WantedRows(rows_S, own_step)
