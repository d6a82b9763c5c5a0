"""Weights as the operations read them, written to files and mapped from there.

A file is in the safetensors format, its metadata say how each tensor is packed. Tensors for the C++ operations begin at
multiples of 64 bytes where their sizes allow it, those for GPUs always, with gaps between them. Mapped memory is
private: experts that change places are copied in it, not in the file.
"""

# E routed experts

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from xxhash import xxh3_128

from batchinfer.model.attention_kinds import kind_of
from batchinfer.model.config import ModelConfig
from batchinfer.model.ops import Ops
from batchinfer.model.packed_folder import ENDS, EXPERT_FIELDS, EXPERT_TENSORS, MTP, PackedFolder
from batchinfer.model.weight_stream import LayerStream
from batchinfer.model.weights import (
    CompressorWeights,
    Ends,
    IndexerWeights,
    IndexWeights,
    LayerWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
    MtpWeights,
    Projection,
    StreamWeights,
)
from batchinfer.records import ModelError
from batchinfer_kernels.cpu.packed import Packed, PackedRouter, WeightKind
from batchinfer_kernels.reference.block_scaled import BlockScaled
from batchinfer_kernels.reference.fp4 import Fp4Scaled
from batchinfer_kernels.reference.group_scaled import GroupScaled
from batchinfer_kernels.weight_format import format_of

_ALIGNMENT = 64
_GPU_ALIGNMENT = 256  # as of memory from CUDA
_GAP = "gap."  # begins the names of tensors that only fill gaps
_DTYPES = {
    "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "BF16": torch.bfloat16, "F32": torch.float32,
    "I64": torch.int64,
}  # fmt: skip
_SCALED = (BlockScaled, GroupScaled, Fp4Scaled)  # by the number in a file
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_KINDS: dict[str, type[Any]] = {
    "layer": LayerWeights, "indexer": IndexerWeights, "mlp": MlpWeights, "shared": MlpWeights,
    "entries": CompressorWeights, "keys": CompressorWeights, "index": IndexWeights,
    "streams": StreamWeights, "attention_streams": StreamWeights, "mlp_streams": StreamWeights,
}  # fmt: skip


class Layout(NamedTuple):
    """Positions of the tensors of a part of the model, in a file or in memory.

    entries: dtype, shape and first and last byte after `start` of each tensor, as in a safetensors header.
    forms: how each is packed.
    start: the first byte of all.
    size: bytes of all, with what is before `start`.
    """

    entries: dict[str, Any]
    forms: dict[str, dict[str, int]]
    start: int
    size: int

    @classmethod
    def read(cls, path: Path) -> Layout:
        """Return the layout of a file.

        Raises:
            ModelError: it cannot be read, or is damaged.
        """
        try:
            with open(path, "rb") as file:
                start = 8 + int.from_bytes(file.read(8), "little")
                entries = json.loads(file.read(start - 8))
                forms = json.loads(entries.pop("__metadata__")["forms"])
            return cls(entries, forms, start, path.stat().st_size)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{path} cannot be mapped: {error}; convert the model again") from None


def lay_out(
    weights: Ends | LayerWeights | MtpWeights, *, aligned: bool
) -> tuple[Layout, list[tuple[str, torch.Tensor]]]:
    """Return the layout for the tensors of a part of the model, and the tensors in this order.

    Args:
        aligned: begin each tensor at a multiple of _GPU_ALIGNMENT.
    """
    parts = sorted(_parts_of(weights), key=lambda part: part[1].nbytes % _ALIGNMENT > 0)
    entries: dict[str, Any] = {}
    end = 0
    for name, tensor, _ in parts:
        if aligned and (gap := -end % _GPU_ALIGNMENT):
            entries[f"{_GAP}{name}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [end, end + gap]}
            end += gap
        dtype, shape, first, end = _NAMES[tensor.dtype], list(tensor.shape), end, end + tensor.nbytes
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}
    layout = Layout(entries, {name: form for name, _, form in parts}, 0, end)
    return layout, [(name, tensor) for name, tensor, _ in parts]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor on any device, on the host."""
    return tensor.contiguous().view(-1).view(torch.uint8).cpu()


def write_parts(path: Path, weights: Ends | LayerWeights | MtpWeights, *, aligned: bool = False) -> str:
    """Write a new file and force it to disk; returns the checksum of its bytes. Arguments as of `lay_out`.

    Raises:
        OSError: it cannot be written (the disk is full).
    """
    layout, parts = lay_out(weights, aligned=aligned)
    tensors = dict(parts)
    text = json.dumps({"__metadata__": {"forms": json.dumps(layout.forms)}, **layout.entries}).encode()
    text += b" " * (-(8 + len(text)) % (_GPU_ALIGNMENT if aligned else _ALIGNMENT))
    hasher = xxh3_128()
    with open(path, "xb") as file:
        pieces = (
            bytes_of(tensors[name]).numpy().data if name in tensors else memoryview(bytes(entry["shape"][0]))
            for name, entry in layout.entries.items()
        )
        for piece in (memoryview(len(text).to_bytes(8, "little") + text), *pieces):
            file.write(piece)
            hasher.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return hasher.hexdigest()


def map_weights(
    packed: PackedFolder,
    config: ModelConfig,
    ops: Ops,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    expert_ids: Sequence[Sequence[int]] | None,
    mtp: bool = False,
    stream: LayerStream | None = None,
) -> ModelWeights:
    """Return the weights of a converted folder, mapped or on a GPU; arguments as of `load_weights`.

    Args:
        stream: reads the layers into slots, where their tensors are; None: all layers are in memory, too.

    Raises:
        ModelError: the folder is not made for these operations or this dtype, or a file is damaged.
    """
    check_folder(packed, ops, dtype, device)
    place = torch.device(device)
    ids = [range(config.n_routed_experts)] * config.num_moe_layers if expert_ids is None else expert_ids
    held = tuple(tuple(of_layer) for of_layer in ids)
    of_layer = dict(zip(config.moe_layers, held, strict=True))
    kinds = kinds_of(config)
    ends = MappedParts.open(packed.folder / ENDS, device=place).take(Ends, kinds)
    layers = tuple(
        MappedParts.open(
            packed.layer(number),
            of_layer.get(number),
            None if stream is None else stream.memory_of(number),
            place,
            None if stream is None else stream.starts_of(number),
        ).take(LayerWeights, kinds)
        for number in range(config.num_hidden_layers)
    )
    of_mtp = MappedParts.open(packed.folder / MTP, device=place).take(MtpWeights, kinds) if mtp else None
    mapped = (ends, *(layers if stream is None else ()), of_mtp) if place.type == "cpu" else ()
    num_bytes = sum(tensor.nbytes for part in mapped for _, tensor, _ in _parts_of(part))
    of_ends = {"embedding": ends.embedding, "norm": ends.norm, "lm_head": ends.lm_head, "streams": ends.streams}
    return ModelWeights(layers=layers, expert_ids=held, mtp=of_mtp, mapped_bytes=num_bytes, stream=stream, **of_ends)


def kinds_of(config: ModelConfig) -> dict[str, type[Any]]:
    """Return the kinds of a layer's parts that are no projections, by field."""
    return _KINDS | {"attention": kind_of(config.attention).weights}


def check_folder(packed: PackedFolder, ops: Ops, dtype: torch.dtype, device: torch.device | str) -> None:
    """Refuse a converted folder for other operations or another dtype.

    Raises:
        ModelError: it is not made for these, or a file is missing.
    """
    narrow = "fp4" if ops.fp4_experts else "int4" if ops.four_bit else "fp8"
    packed.check(narrow if ops.eight_bit else str(dtype).removeprefix("torch."))
    is_tiled = torch.device(device).type == "cpu" and ops.weight_format(dtype, device).copies
    if packed.for_gpus != ops.on_gpus or not (packed.for_gpus or is_tiled):
        made_for = "GPUs" if packed.for_gpus else "the C++ operations on a CPU"
        raise ModelError(
            f"{packed.folder} is converted for {made_for}, which this job does not use; "
            f"give the folder that it was made from, {packed.source}"
        )


class PackedExperts:
    """The source of experts that change places, read from a converted folder."""

    def __init__(self, packed: PackedFolder):
        self._packed = packed

    def expert(self, prefix: str, expert: int, mlp: MoeWeights, slot: int) -> None:
        """Copy one routed expert of the layer `prefix` into a slot."""
        mapped = MappedParts.open(self._packed.layer(int(prefix.split(".")[2])), (expert,))
        for field, name in zip(EXPERT_FIELDS, EXPERT_TENSORS, strict=True):
            held = getattr(mlp, field)
            if held is not None:
                stored = mapped.take(Projection, {}, name)
                for room, part in zip(format_of(held).slots(held), format_of(stored).slots(stored), strict=True):
                    room[slot] = part[0]


class MappedParts:
    """A part of the model in memory; of routed experts only these numbers (None: all).

    Args:
        memory: a buffer, or bytes on a device, where the tensors are or will be when a layer computes.
        path: named in errors.
        device: where tensors are moved to.
        starts: where tensors begin in a buffer that has no routed experts but these; None: as `layout` has it.
    """

    def __init__(
        self,
        layout: Layout,
        memory: Any,
        path: Path,
        expert_ids: Sequence[int] | None = None,
        device: torch.device | None = None,
        starts: Mapping[str, int] | None = None,
    ):
        self._header, self._forms, self._start, self._starts = layout.entries, layout.forms, layout.start, starts
        self._memory, self._path, self._expert_ids, self._device = memory, path, expert_ids, device

    @classmethod
    def open(
        cls,
        path: Path,
        expert_ids: Sequence[int] | None = None,
        memory: Any = None,
        device: torch.device | None = None,
        starts: Mapping[str, int] | None = None,
    ) -> MappedParts:
        """Return the part of a file.

        Args:
            memory: where the file's bytes will be; its header is read now. None: the file is mapped.

        Raises:
            ModelError: the file cannot be read, or is damaged.
        """
        layout = Layout.read(path)
        if memory is not None:
            return cls(layout, memory, path, expert_ids, starts=starts)
        try:
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be mapped: {error}; convert the model again") from None
        return cls(layout, mapped, path, expert_ids, device)

    def leaf(self, name: str) -> Any:
        """Return one tensor, or packed weight; shares the memory unless its experts are not side by side."""
        entry, form = self._header[name], self._forms[name]
        start, end = entry["data_offsets"]
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        offset = self._start + start if self._starts is None else self._starts[name]
        has_rows = (
            self._expert_ids is not None and name.removesuffix(".values").removesuffix(".scales") in EXPERT_TENSORS
        )
        if has_rows and self._starts is not None:  # only these are in the buffer
            shape = [len(self._expert_ids or ()), *shape[1:]]
        if isinstance(self._memory, torch.Tensor):
            tensor = self._memory[offset : offset + end - start].view(dtype)
        else:
            tensor = torch.frombuffer(self._memory, dtype=dtype, count=math.prod(shape), offset=offset)
        tensor = tensor.view(shape)
        if self._device is not None:
            tensor = tensor.to(self._device)
        if has_rows and self._starts is None:
            tensor = _rows(tensor, list(self._expert_ids or ()))
        if "num_experts" in form:
            return PackedRouter(tensor, form["num_experts"])
        if not form or "scaled" in form:
            return tensor
        return Packed(
            tensor, form["num_columns"], form["depth"], WeightKind(form["kind"]), is_paired=bool(form["is_paired"])
        )

    def take(self, kind: type[Any], kinds: dict[str, type[Any]], name: str = "") -> Any:
        """Return an object of type `kind` built from the tensors with this prefix; None if there are no such tensors.

        Args:
            kinds: of its parts, by field; others are projections.
        """
        if name in self._header:
            try:
                return self.leaf(name)
            except (KeyError, ValueError, RuntimeError) as error:
                raise ModelError(f"{self._path} is damaged at {name}: {error}; convert the model again") from None
        prefix = f"{name}." if name else ""
        if "scaled" in (form := self._forms.get(f"{prefix}values", {})):
            return _SCALED[form["scaled"]](self.leaf(f"{prefix}values"), self.leaf(f"{prefix}scales"))
        if not any(known.startswith(prefix) for known in self._header):
            return None
        if f"{prefix}router_ED" in self._header:
            kind = MoeWeights
        parts = {field: kinds.get(field, Projection) for field in _field_names(kind)}
        return kind(**{field: self.take(part, kinds, prefix + field) for field, part in parts.items()})


def _rows(tensor: torch.Tensor, numbers: list[int]) -> torch.Tensor:
    """Return rows by number; a view if they follow each other."""
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True:
        first = numbers[0] if numbers else 0
        return tensor[first : first + len(numbers)]
    return tensor[numbers]


def _parts_of(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor, dict[str, int]]]:
    """Yield name, tensor and packing of all tensors in a part of the model."""
    if isinstance(value, torch.Tensor):
        yield name, value, {}
    elif isinstance(value, Packed):
        form = {"num_columns": value.num_columns, "depth": value.depth, "kind": int(value.kind)}
        yield name, value.data, {**form, "is_paired": int(value.is_paired)}
    elif isinstance(value, _SCALED):
        form = {"scaled": _SCALED.index(type(value))}
        yield f"{name}.values", value.values, form
        yield f"{name}.scales", value.scales, form
    elif isinstance(value, PackedRouter):
        yield name, value.data_PDN, {"num_experts": value.num_experts}
    elif value is not None:
        for field in _field_names(type(value)):
            yield from _parts_of(getattr(value, field), f"{name}.{field}" if name else field)


def _field_names(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind)] if is_dataclass(kind) else list(kind._fields)
