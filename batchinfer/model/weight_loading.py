"""The model's tensors, read from a checkpoint in the form in which the layers use them.

The whole checkpoint is checked against config.json before any data is read. FP8 weights (one scale per 128 × 128
block) and packed 4-bit ones are widened to the run's dtype here, unless the operations hold projections and experts in
FP8, or experts in 4 bits: then weights that are stored so go through as they are, bit for bit, and others are rounded
once. Either way the rest (latent up-projections, embedding, head, norms, router) is in the run's dtype or wider.

In FP8 no block may have rows of both the gate and the up projection, which are above each other. So there the
intermediate width of an MLP is a whole number of blocks: where a model's is not, zeros follow the rows of gate and of
up, and the columns of down, which changes no result.
"""

# D hidden, F intermediate, E experts

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from batchinfer.model.attention_kinds import kind_of
from batchinfer.model.checkpoint import Checkpoint, open_checkpoint
from batchinfer.model.config import ModelConfig
from batchinfer.model.ops import Ops
from batchinfer.model.stored_weights import StoredWeights
from batchinfer.model.tensor_names import HEAD, check_tensors, num_bytes_to_read, spare_biases
from batchinfer.model.weights import (
    Ends,
    LayerWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
    MtpWeights,
    Projection,
    StreamWeights,
)
from batchinfer.records import ModelError
from batchinfer_kernels.reference.block_scaled import BLOCK, BlockScaled, stack
from batchinfer_kernels.reference.fp4 import Fp4Scaled
from batchinfer_kernels.reference.group_scaled import GroupScaled
from batchinfer_kernels.weight_format import Weight, WeightFormat, format_of

_BIASES = ("e_score_correction_bias", "bias")  # of the router


def load_weights(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    expert_ids: Sequence[Sequence[int]] | None = None,
    device: torch.device | str = "cpu",
    ops: Ops | None = None,
    mtp: bool = False,
    on_read: Callable[[int, int], None] | None = None,
) -> ModelWeights:
    """Check the checkpoint in `folder` against `config`, then read it.

    Args:
        dtype: of everything but the router, which stays float32.
        ops: the operations to pack the weights for, chosen for `device`; None: the reference, with plain weights.
        expert_ids: per MoE layer the routed experts to read, in the order of its E dim (an expert may be there twice);
            None for all of them.
        mtp: read the layer for multi-token prediction, too, which is there (`why_no_mtp`).
        on_read: called with the bytes that were read so far, and with all bytes to read.

    Raises:
        ModelError: a tensor is missing, unknown, of the wrong shape or format, or a file cannot be read.
    """
    ops, device = ops or Ops.select("reference"), torch.device(device)
    loader = open_loader(
        folder, config, dtype=dtype, expert_ids=expert_ids, device=device, ops=ops, mtp=mtp, on_read=on_read
    )
    ends = read_ends(loader)
    layers = tuple(loader.layer(layer) for layer in range(config.num_hidden_layers))
    of_mtp = read_mtp(loader) if mtp else None
    return ModelWeights(ends.embedding, layers, ends.norm, ends.lm_head, loader.expert_ids, of_mtp, ends.streams)


def open_loader(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    ops: Ops,
    expert_ids: Sequence[Sequence[int]] | None = None,
    device: torch.device | str = "cpu",
    mtp: bool = False,
    on_read: Callable[[int, int], None] | None = None,
) -> WeightLoader:
    """Check the checkpoint in `folder` against `config`; arguments and errors as of `load_weights`."""
    total_bytes = 0
    tell = None if on_read is None else lambda num_bytes: on_read(num_bytes, total_bytes)
    checkpoint = open_checkpoint(folder, config.carrier, tell)
    check_tensors(checkpoint, config)
    _forget_spare_biases(checkpoint, config)
    if expert_ids is None:
        expert_ids = [range(config.n_routed_experts)] * config.num_moe_layers
    held = tuple(tuple(ids) for ids in expert_ids)
    for ids in held:
        if ids and not 0 <= min(ids) <= max(ids) < config.n_routed_experts:
            raise ModelError(f"expert_ids {ids} are not all below n_routed_experts = {config.n_routed_experts}.")
    total_bytes = num_bytes_to_read(checkpoint, config, held, mtp=mtp)
    return WeightLoader(checkpoint, config, dtype, torch.device(device), held, ops)


def _forget_spare_biases(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Remove biases that the model does not have from the checkpoint's names; they must be zeros."""
    spare = spare_biases(checkpoint, config)
    values = Checkpoint(checkpoint)  # whose reads do not count
    for name in spare:
        if values.read(name).any():
            raise ModelError(
                f"{checkpoint.info(name).path}: {name} is a bias that the model does not have by config.json, and "
                "it is not zero; use a checkpoint of this model_type"
            )
    for name in spare:
        del checkpoint.infos[name]


def read_ends(loader: WeightLoader) -> Ends:
    """Read the weights before and after the layers: embedding, last norm, head, and streams of the head."""
    embedding = loader.tensor("model.embed_tokens.weight")
    is_tied = loader.config.tie_word_embeddings
    if is_tied and HEAD in loader.checkpoint and not torch.equal(loader.tensor(HEAD), embedding):
        raise ModelError(
            f"{loader.checkpoint.info(HEAD).path}: {HEAD} differs from the embedding, but tie_word_embeddings in "
            "config.json is true; set it to false if the model has this head of its own, else remove the tensor"
        )
    lm_head = loader.pack(embedding if is_tied else loader.source(HEAD))
    norm = loader.norm("model.norm.weight")
    if loader.config.logit_scale != 1:
        norm = norm * loader.config.logit_scale
    return Ends(embedding, norm, lm_head, loader.streams("model.hc_head"))


def read_mtp(loader: WeightLoader) -> MtpWeights:
    """Read the layer for multi-token prediction, which follows all other layers."""
    prefix = f"model.layers.{loader.config.num_hidden_layers}"
    return MtpWeights(
        token_norm=loader.tensor(f"{prefix}.enorm.weight"),
        hidden_norm=loader.tensor(f"{prefix}.hnorm.weight"),
        joined=loader.projection(f"{prefix}.eh_proj"),
        layer=loader.layer(loader.config.num_hidden_layers),
        norm=loader.tensor(f"{prefix}.shared_head.norm.weight"),
    )


class ExpertSource(Protocol):
    """A source of routed experts."""

    def expert(self, prefix: str, expert: int, mlp: MoeWeights, slot: int) -> None:
        """Put one routed expert of the layer `prefix` into a slot."""
        ...


def exchange_experts(
    weights: ModelWeights,
    folder: Path,
    config: ModelConfig,
    expert_ids: Sequence[Sequence[int]],
    source: ExpertSource | None = None,
) -> ModelWeights:
    """Replace the routed experts in the E dims of the MoE layers in place; their number per layer stays.

    Those that this rank holds already are copied, the others are read from `source`, or the checkpoint in `folder`.

    Raises:
        ModelError: a file cannot be read.
    """
    if source is None:
        checkpoint = open_checkpoint(folder, config.carrier)
        of_rows = weights.embedding
        source = WeightLoader(checkpoint, config, of_rows.dtype, of_rows.device, (), Ops.select("reference"))
    for layer, held, wanted in zip(config.moe_layers, weights.expert_ids, expert_ids, strict=True):
        mlp = weights.layers[layer].mlp
        assert isinstance(mlp, MoeWeights)
        assert len(held) == len(wanted), "a layer keeps its number of slots"
        changed = [slot for slot, (old, new) in enumerate(zip(held, wanted, strict=True)) if old != new]
        # where copies come from may itself be overwritten
        here = {wanted[slot]: held.index(wanted[slot]) for slot in changed if wanted[slot] in held}
        slots_of = [slots for weight in (mlp.gate_up_EFD, mlp.down_EDF) for slots in format_of(weight).slots(weight)]
        slots_of += [bias for bias in (mlp.gate_up_bias_EF, mlp.down_bias_ED) if bias is not None]
        kept = {expert: [slots[slot].clone() for slots in slots_of] for expert, slot in here.items()}
        for slot in changed:
            expert = wanted[slot]
            if expert in kept:
                for slots, weight in zip(slots_of, kept[expert], strict=True):
                    slots[slot] = weight
            else:
                source.expert(f"model.layers.{layer}.mlp", expert, mlp, slot)
    return replace(weights, expert_ids=tuple(tuple(ids) for ids in expert_ids))


class WeightLoader:
    """Reader of one rank's tensors, each copied into separate memory, so that nothing refers to the mapped files."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        expert_ids: tuple[tuple[int, ...], ...],
        ops: Ops,
    ):
        self.checkpoint = checkpoint
        self._ops = ops
        self.config = config
        self.dtype = dtype
        self.device = device
        self.expert_ids = expert_ids
        # the layer for multi-token prediction comes last, with all experts
        self._next_expert_ids = iter((*expert_ids, tuple(range(config.n_routed_experts))))
        self._stored = StoredWeights(checkpoint, config)
        self._format = ops.weight_format(dtype, device)  # of the head and the per-head maps; the other: of the rest
        self._narrow_format = ops.weight_format(dtype, device, eight_bit=True) if ops.eight_bit else self._format
        self._expert_format = ops.expert_format(dtype, device)

    @property
    def joins_products(self) -> bool:
        """Whether products of the same rows are one; on CPUs the order of sums may depend on the number of columns."""
        return self._ops.on_gpus

    def tensor(self, name: str, dtype: torch.dtype | None = None, *, finite: bool = False) -> torch.Tensor:
        """Return one tensor in the run's dtype or the one given; `finite` as StoredWeights.read has it."""
        out = self._empty(self._stored.shape(name), dtype or self.dtype)
        return out.copy_(self._stored.read(name, out.dtype, finite=finite))

    def norm(self, name: str) -> torch.Tensor:
        """Return the weight of a norm, in float32 if the family says so: 1 + a stored one has no room in bfloat16."""
        if not self.config.family_row.wide_norms:
            return self.tensor(name)
        weight = self.tensor(name, torch.float32)
        return weight.add_(1) if self.config.family_row.norms_from_one else weight

    def source(self, name: str, dtype: torch.dtype | None = None, *, finite: bool = False) -> torch.Tensor:
        """Return a tensor to pack; a view of the mapped file if packing makes a copy anyway."""
        read = self._stored.read if self._format.copies else self.tensor
        return read(name, dtype or self.dtype, finite=finite)

    def pack(self, weight: torch.Tensor) -> Weight:
        """Return a weight [N, M], or several [B, N, M], in the run's dtype, packed for the products."""
        if not self._format.copies:
            return self._ops.pack(weight)
        weight_BNM = weight if weight.dim() == 3 else weight[None]
        held = self._format.empty(*weight_BNM.shape, memory=self._empty)
        for slot, one in enumerate(weight_BNM):
            self._format.put(held, slot, one)
        return held

    def router(self, name: str, *, finite: bool = False) -> Any:
        """Return a weight whose products are in float32, packed."""
        return self._ops.pack_router(self.source(name, torch.float32, finite=finite))

    def layer(self, layer: int) -> LayerWeights:
        """Read the next layer; layers are read in order."""
        self.checkpoint.unmap()
        prefix, attention = f"model.layers.{layer}", self.config.attention
        return LayerWeights(
            **{field: self.norm(f"{prefix}.{name}.weight") for field, name in self.config.family_row.norms.items()},
            attention=kind_of(attention).load(self, attention, f"{prefix}.self_attn", layer),
            mlp=self._moe(f"{prefix}.mlp") if self.config.is_moe_layer(layer) else self._mlp(f"{prefix}.mlp"),
            attention_streams=self.streams(f"{prefix}.hc_attn"),
            mlp_streams=self.streams(f"{prefix}.hc_ffn"),
        )

    def streams(self, prefix: str) -> StreamWeights | None:
        """Read the weights of hyper-connections; None if the model has none."""
        if self.config.hyper is None:
            return None
        scale, base = (self.tensor(f"{prefix}_{name}", torch.float32) for name in ("scale", "base"))
        return StreamWeights(self.router(f"{prefix}_fn"), scale, base)

    def _moe(self, prefix: str) -> MoeWeights:
        """Read a layer's experts; routed ones are packed one by one, so that each is in memory once."""
        row, expert_ids = self.config.family_row, next(self._next_expert_ids)  # layers are read in order
        num_held, hidden, form = len(expert_ids), self.config.hidden_size, self._expert_format
        width = _filled(self.config.moe_intermediate_size, form)
        bias = next((name for name in (f"{prefix}.gate.{one}" for one in _BIASES) if name in self.checkpoint), None)
        has_biases = self.config.has_expert_biases
        mlp = MoeWeights(
            router_ED=self.router(f"{prefix}.gate.weight"),
            router_bias_E=None if bias is None else self.tensor(bias, torch.float32),
            gate_up_EFD=form.empty(num_held, 2 * width, hidden, is_paired=True, memory=self._empty),
            down_EDF=form.empty(num_held, hidden, width, memory=self._empty),
            shared=self._mlp(f"{prefix}.shared_experts") if self.config.n_shared_experts else None,
            shared_gate_1D=self.router(f"{prefix}.shared_expert_gate.weight") if row.has_shared_gate else None,
            gate_up_bias_EF=self._empty((num_held, 2 * width), self.dtype).zero_() if has_biases else None,
            down_bias_ED=self._empty((num_held, hidden), self.dtype) if has_biases else None,
            experts_VK=self._experts_by_token(f"{prefix}.gate.tid2eid"),
        )
        for slot, expert in enumerate(expert_ids):
            self.expert(prefix, expert, mlp, slot)
        return mlp

    def _experts_by_token(self, name: str) -> torch.Tensor | None:
        """Read a layer's table of experts by token; None if the layer has none.

        Raises:
            ModelError: a number is of no expert.
        """
        if name not in self.checkpoint:
            return None
        experts_VK = self.tensor(name, torch.int64)
        lowest, highest = (bound.item() for bound in experts_VK.aminmax())
        if lowest < 0 or highest >= self.config.n_routed_experts:
            raise ModelError(
                f"{self.checkpoint.info(name).path}: {name} is from {lowest} to {highest}, "
                f"but there are {self.config.n_routed_experts} experts"
            )
        return experts_VK

    def expert(self, prefix: str, expert: int, mlp: MoeWeights, slot: int) -> None:
        """Read one routed expert of the layer `prefix` into a slot."""
        up, down = ("gate_proj", "up_proj"), ("down_proj",)
        for weight, bias, names in (
            (mlp.gate_up_EFD, mlp.gate_up_bias_EF, up),
            (mlp.down_EDF, mlp.down_bias_ED, down),
        ):
            form = format_of(weight)
            parts = [self._part(f"{prefix}.experts.{expert}.{name}.weight", form) for name in names]
            form.put(weight, slot, *parts)
            if bias is not None:
                for room, name in zip(bias[slot].chunk(len(names)), names, strict=True):
                    stored = self._stored.read(f"{prefix}.experts.{expert}.{name}.bias", bias.dtype)
                    room[: len(stored)] = stored

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _mlp(self, prefix: str) -> MlpWeights:
        if self.config.family_row.joined_mlp:
            return self._joined_mlp(prefix)
        width = _filled(self._stored.shape(f"{prefix}.gate_proj.weight")[0], self._narrow_format)
        gate, up, down = (f"{prefix}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
        has_bias = any(f"{name}.bias" in self.checkpoint for name in (gate, up, down))
        is_plain = not has_bias and self.config.expert_clamp is None
        return MlpWeights(
            gate_up=self.projection(gate, up, num_rows=width, is_paired=is_plain),
            down=self.projection(down, num_columns=width),
        )

    def _joined_mlp(self, prefix: str) -> MlpWeights:
        """Read an MLP without biases whose gate and up are one tensor, cut at its middle."""
        name, form = f"{prefix}.gate_up_proj.weight", self._narrow_format
        num_rows, hidden = self._stored.shape(name)
        each, width = num_rows // 2, _filled(num_rows // 2, form)
        whole = self._part(name, form)
        if not isinstance(whole, torch.Tensor | BlockScaled) or (isinstance(whole, BlockScaled) and each % BLOCK):
            whole = self._stored.read(name, self.dtype)
        cut = whole.rows if isinstance(whole, BlockScaled) else lambda start, stop: whole[start:stop]
        held = form.empty(1, 2 * width, hidden, is_paired=True, memory=self._empty)
        form.put(held, 0, cut(0, each), cut(each, num_rows))
        return MlpWeights(Projection(held[0], None), self.projection(f"{prefix}.down_proj", num_columns=width))

    def projection(
        self, *prefixes: str, num_rows: int | None = None, num_columns: int | None = None, is_paired: bool = False
    ) -> Projection:
        """Read one linear map, or several stacked as one, each padded to this shape in memory (None: its stored shape).

        Args:
            is_paired: these are a gate and an up projection without biases.
        """
        biases = [self.tensor(f"{prefix}.bias") for prefix in prefixes if f"{prefix}.bias" in self.checkpoint]
        form, (stored_rows, stored_columns) = self._narrow_format, self._stored.shape(f"{prefixes[0]}.weight")
        num_rows = num_rows or stored_rows
        shape = (len(prefixes) * num_rows, num_columns or stored_columns)
        held = form.empty(1, *shape, is_paired=is_paired, memory=self._empty)
        form.put(held, 0, *(self._part(f"{prefix}.weight", form) for prefix in prefixes))
        biases = [F.pad(bias, (0, num_rows - len(bias))) for bias in biases]
        return Projection(held[0], torch.cat(biases) if len(biases) == len(prefixes) else None)

    def joined_projection(self, *prefixes: str, order: list[int] | None = None) -> Projection:
        """Read linear maps of the same input, of any numbers of rows, as one.

        Weights stored in FP8 stay bit for bit, unless a block would have rows of two.

        Args:
            order: the row of all in each place; None: as they are.
        """
        form, names = self._narrow_format, [f"{prefix}.weight" for prefix in prefixes]
        num_rows = [self._stored.shape(name)[0] for name in names]
        blocks: list[BlockScaled | None] = []
        stays = order is None or all(row // BLOCK == place // BLOCK for place, row in enumerate(order))
        if form.keeps_fp8 and stays and not any(count % form.multiple for count in num_rows):
            blocks = [self._stored.read_blocks(name) for name in names]
        stored = [one for one in blocks if one is not None]
        whole: torch.Tensor | BlockScaled
        if len(stored) == len(names):
            whole = stack(stored)
        else:
            whole = torch.cat([self._stored.read(name, self.dtype) for name in names])
        biases = [self.tensor(f"{prefix}.bias") for prefix in prefixes if f"{prefix}.bias" in self.checkpoint]
        bias = torch.cat(biases) if biases else None
        if order is not None:
            whole = whole.reordered(order) if isinstance(whole, BlockScaled) else whole[order]
            bias = None if bias is None else bias[order]
        held = form.empty(1, sum(num_rows), self._stored.shape(names[0])[1], memory=self._empty)
        form.put(held, 0, whole)
        return Projection(held[0], bias)

    def _part(self, name: str, form: WeightFormat) -> torch.Tensor | BlockScaled | GroupScaled | Fp4Scaled:
        """Return a weight to put into this form; do not keep it, as it may be a view of the mapped file."""
        if form.keeps_fp4:
            return self._stored.read_fp4(name)
        kept: BlockScaled | GroupScaled | None = None
        if form.keeps_fp8 or form.keeps_int4:
            kept = self._stored.read_blocks(name) if form.keeps_fp8 else self._stored.read_groups(name)
        return self._stored.read(name, self.dtype) if kept is None else kept


def _filled(width: int, form: WeightFormat) -> int:
    """Return the intermediate width in memory, padded to the form's multiple."""
    return -(-width // form.multiple) * form.multiple
