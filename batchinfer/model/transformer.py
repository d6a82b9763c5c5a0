"""The decoder: tokens of one step in, logits out.

Layers are generators that yield while rows travel between ranks (layer.py); schedules.py says in which ways a step of
them can run.
"""

# T tokens of a step, S rows whose logits are wanted, P pages, L layers, D hidden, E routed experts

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchinfer.model.attention_kinds import kind_of
from batchinfer.model.config import ModelConfig, load_model_config
from batchinfer.model.fused.layers import moe_of
from batchinfer.model.layer import DecoderLayer
from batchinfer.model.layer_pieces import layers_of_rank
from batchinfer.model.memory_split import MemorySplit
from batchinfer.model.moe import DenseMlp, MoeMlp, YieldPoint
from batchinfer.model.mtp import Mtp
from batchinfer.model.ops import Ops
from batchinfer.model.packed_files import PackedExperts, map_weights
from batchinfer.model.packed_folder import read_packed
from batchinfer.model.page_memory import empty_pages
from batchinfer.model.residual import ends_of, residuals_of
from batchinfer.model.rotary_angles import RotaryAngles
from batchinfer.model.sampling import LogitOps
from batchinfer.model.schedules import PLAIN, Schedule
from batchinfer.model.scores import score
from batchinfer.model.step import AttentionStep, StepHalves, StepInput, StepOutput, StepTensors
from batchinfer.model.streamed_weights import DeviceMemory, stream_to_device
from batchinfer.model.sweeps import run_sweep
from batchinfer.model.weight_loading import exchange_experts, load_weights
from batchinfer.model.weight_stream import LayerStream, WeightStream
from batchinfer.model.weights import LayerWeights, ModelWeights, MoeWeights
from batchinfer.parallel.dispatch import Dispatcher, LocalDispatcher
from batchinfer.parallel.placement import Placement
from batchinfer.parallel.row_format import RowFormat
from batchinfer.parallel.spans import MicroBatchSpans, SpanLog
from batchinfer_kernels.transfer import to_host


class Transformer:
    """A model: weights, operations and dispatchers of expert rows; its only state between steps is in the pages.

    Args:
        weights: of this rank; with fewer than all experts the dispatchers must know where the others are.
        dispatchers: the expert exchange of each MoE layer.
        ops: the operations, those that `weights` were packed for.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, dispatchers: Sequence[Dispatcher], ops: Ops):
        self.config = config
        self.weights = weights
        self.ops = ops
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self.num_moe_layers = config.num_moe_layers
        self.residual = ends_of(ops, config, weights)
        of_layers = iter(dispatchers)
        self.layers = tuple(
            _build_layer(config, ops, each, layer, of_layers) for layer, each in enumerate(weights.layers)
        )
        self.moe_mlps = [layer.mlp for layer in self.layers if isinstance(layer.mlp, MoeMlp)]
        rope, width = config.attention.rope, config.attention.rotary_dim
        self.angles = RotaryAngles(rope, width, self.device, ops.cos_sin)
        self.mtp = None
        if weights.mtp is not None:
            own = iter([local_dispatcher(config, ops, self.device)])
            layer = _build_layer(config, ops, weights.mtp.layer, config.num_hidden_layers, own)
            self.mtp = Mtp(weights.mtp, layer)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: torch.dtype,
        eight_bit: bool = False,
        four_bit: bool = False,
        fp4_experts: bool = False,
        fp8_pages: bool = False,
        dispatchers: Sequence[Dispatcher] | None = None,
        expert_ids: Sequence[Sequence[int]] | None = None,
        device: torch.device | str = "cpu",
        backend: str = "auto",
        mtp: bool = False,
        on_read: Callable[[int, int], None] | None = None,
        memory: MemorySplit | DeviceMemory | None = None,
    ) -> Transformer:
        """Read a model folder (config.json and *.safetensors), or map a converted one.

        Args:
            dtype: of weights, activations and pages.
            eight_bit, four_bit, fp4_experts, fp8_pages: see Ops.
            dispatchers: the expert exchange of each MoE layer; None keeps all rows here.
            expert_ids: per MoE layer the experts in this rank's slots, None for all in order.
            backend: implementation of the operations, "auto" or a name.
            mtp, on_read: as of load_weights.
            memory: stream the layers of a converted folder through these slots, or the layers of any folder to the
                device; None: all weights stay in memory.

        Raises:
            ModelError: config.json or the tensors cannot be used, or the model or the backend cannot run here.
        """
        config = load_model_config(folder)
        ops = Ops.select(
            backend,
            dtype,
            eight_bit=eight_bit,
            four_bit=four_bit,
            fp4_experts=fp4_experts,
            fp8_pages=fp8_pages,
            device=device,
            unused=kind_of(config.attention).unused_ops,
        )
        if dispatchers is None:
            assert expert_ids is None, "a part of the experts needs dispatchers that know where the others are"
            dispatchers = [local_dispatcher(config, ops, device)] * config.num_moe_layers
        wanted: dict[str, Any] = {"dtype": dtype, "device": device, "expert_ids": expert_ids, "mtp": mtp}
        packed = read_packed(folder)
        if callable(memory):
            weights = stream_to_device(
                folder, packed, config, ops, memory, dtype=dtype, device=torch.device(device), mtp=mtp, on_read=on_read
            )
        elif packed is not None:
            stream = None
            if memory is not None:
                files = [packed.layer(number) for number in range(config.num_hidden_layers)]
                stream = WeightStream(files, memory, layers=layers_of_rank(packed, config, expert_ids))
            weights = map_weights(packed, config, ops, stream=stream, **wanted)
        else:
            weights = load_weights(folder, config, ops=ops, on_read=on_read, **wanted)
        return cls(config, weights, dispatchers, ops)

    def place_experts(self, folder: Path, placements: Sequence[Placement], rank: int) -> None:
        """Take over the experts that these placements give to `rank`, between steps; all ranks do this together.

        Args:
            folder: the model's, for experts that this rank does not hold yet.
            placements: one per MoE layer.

        Raises:
            ModelError: a file cannot be read.
        """
        expert_ids = [placement.experts_of_rank(rank) for placement in placements]
        source = None if (packed := read_packed(folder)) is None else PackedExperts(packed)
        self.weights = exchange_experts(self.weights, folder, self.config, expert_ids, source)
        for mlp, placement in zip(self.moe_mlps, placements, strict=True):
            mlp.dispatcher.place(placement)

    def reaches(self, first: int, last: int) -> tuple[bool, bool]:
        """Return whether rows between these positions attend to all keys before them, and whether rows choose keys."""
        most_keys = self.config.attention.most_keys
        return first < most_keys, last >= most_keys

    @property
    def logit_ops(self) -> LogitOps:
        """Operations on logits for `sample`."""
        ops = self.ops
        return LogitOps(ops.argmax, ops.draw, ops.log_sum_exp, ops.most_likely, ops.apply_token_bitmask)

    @property
    def kernels(self) -> str:
        """Origins of the operations' implementations, and the bits of their products."""
        return self.ops.names(self.dtype) + self.ops.bits

    def new_pages(self, num_pages: int, num_slots: int = 0, *, one_layer: bool = False) -> Any:
        """Return empty pages, see page_memory.empty_pages, or what the attention kind has as the memory of each layer.

        Args:
            num_slots: of requests' states, for a kind that has them.
            one_layer: see page_memory.empty_pages; only for sweeps.
        """
        memory = kind_of(self.config.attention).memory
        if memory is not None:
            return memory(self.config.attention, len(self.layers), num_pages, num_slots, self.dtype, self.device)
        form = self.ops.page_format(self.dtype)
        return empty_pages(self.config, num_pages, form, self.device, one_layer=one_layer)

    def forward(
        self,
        step: StepInput | StepHalves,
        pages: torch.Tensor,
        schedule: Schedule = PLAIN,
        log: SpanLog | None = None,
    ) -> StepOutput:
        """Run one step; `pages` (from `new_pages`) get the latents of its tokens.

        Args:
            log: receives the spans of the step.
        """
        log = SpanLog() if log is None else log
        if self.stream is not None:
            assert isinstance(step, StepInput), "streamed weights run on one rank, whose rows do not travel"
            (swept,) = run_sweep(self, self.stream, [step], pages, [log])
            return swept.output
        return schedule.run(self, step, pages, log)

    @property
    def stream(self) -> LayerStream | None:
        """The stream of the layers' weights; None if all weights are in memory."""
        return self.weights.stream

    def points(
        self, step: StepTensors, pages: torch.Tensor, spans: MicroBatchSpans, *, by_layer: bool = False
    ) -> Generator[YieldPoint, None, StepOutput]:
        """Run one step operation by operation, as a generator over the yield points of all layers.

        Args:
            by_layer: yield YieldPoint.LAYER before each layer and after the last one, too.
        """
        attention_step = AttentionStep.with_angles(step, *self.angles.at(step.positions))
        wanted = attention_step.of_wanted_rows()
        expert_counts = torch.zeros(
            len(self.moe_mlps), self.config.n_routed_experts, dtype=torch.int64, device=self.device
        )
        rows_of_counts = iter(expert_counts)
        state = self.residual.open(self.ops.gather_rows(self.weights.embedding, step.tokens))
        for layer, layer_pages in zip(self.layers, pages, strict=True):
            counts_E = next(rows_of_counts) if isinstance(layer.mlp, MoeMlp) else None
            of_layer = wanted if layer is self.layers[-1] else None
            if by_layer:
                yield YieldPoint.LAYER
            state = yield from layer.points(state, attention_step, layer_pages, counts_E, spans, of_layer)
        if by_layer:
            yield YieldPoint.LAYER
        with spans.compute("LOGITS"):
            hidden_TD = self.residual.close(state)
            hidden_SD = hidden_TD if wanted is not None else self.ops.gather_rows(hidden_TD, step.logit_rows)
            hidden_SD = self.ops.rms_norm(hidden_SD, self.weights.norm, self.config.rms_norm_eps)
            return _output(self, hidden_SD, step, expert_counts)

    @property
    def expert_rows(self) -> np.ndarray:
        """[L] int64, (token, expert) rows that this rank's experts of each MoE layer have computed so far."""
        return self.read_rows()[0]

    def read_rows(self, *others: torch.Tensor) -> list[np.ndarray]:
        """Return `expert_rows`, then these tensors; all are read from the device in one wait."""
        rows_L = np.array([mlp.num_local_rows for mlp in self.moe_mlps], dtype=np.int64)
        on_device = any(mlp.counts_on_device for mlp in self.moe_mlps)
        device_rows = [torch.stack([mlp.num_device_rows for mlp in self.moe_mlps])] if on_device else []
        arrays = [tensor.numpy() for tensor in to_host(*device_rows, *others)]
        return [rows_L + arrays[0], *arrays[1:]] if on_device else [rows_L, *arrays]


def _build_layer(
    config: ModelConfig,
    ops: Ops,
    weights: LayerWeights,
    layer: int,
    dispatchers: Iterator[Dispatcher],
) -> DecoderLayer:
    if isinstance(weights.mlp, MoeWeights):
        assert weights.mlp_norm is not None, "experts are chosen by normed rows"
        mlp: DenseMlp | MoeMlp = moe_of(ops, config, weights.mlp, weights.mlp_norm, next(dispatchers))
    else:
        mlp = DenseMlp(ops, config, weights.mlp, weights.mlp_norm)
    kind = kind_of(config.attention)
    norm = weights.input_norm, config.rms_norm_eps
    attention = kind.build(ops, config.attention, weights.attention, *norm, layer)
    return DecoderLayer(attention, mlp, residuals_of(ops, config, weights))


def local_dispatcher(config: ModelConfig, ops: Ops, device: torch.device | str) -> Dispatcher:
    """Return the exchange of a rank that holds all experts; a row is rounded once, not once per expert."""
    row_format = RowFormat("fp8") if ops.holds_fp8(device) else None
    return LocalDispatcher(config.n_routed_experts, row_format, gathers=False)


def _output(model: Transformer, hidden_SD: torch.Tensor, step: StepTensors, expert_counts: torch.Tensor) -> StepOutput:
    """Return the logits of the sampled rows, the scores of the scored rows after them, and the states of all rows."""

    def logits_of(rows: slice) -> torch.Tensor:
        return model.ops.linear(hidden_SD[rows], model.weights.lm_head, float32_out=True)

    end = len(hidden_SD) - step.num_states
    if step.scored is None:
        return StepOutput(logits_of(slice(end if step.wants_logits else 0)), expert_counts, states=hidden_SD)
    first = end - len(step.scored)
    most = min(step.num_alternatives, model.config.vocab_size)
    scores = score(logits_of, first, step.scored, most, model.logit_ops)
    return StepOutput(logits_of(slice(first)), expert_counts, scores, hidden_SD)
