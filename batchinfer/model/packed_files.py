"""Weights as the C++ operations read them, written to files and mapped from there.

A file is in the safetensors format, its metadata say how each tensor is packed. Tensors begin at multiples of 64 bytes
where their sizes allow it. Mapped memory is private: experts that change places are copied in it, not in the file.
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
from typing import Any

import torch
from xxhash import xxh3_128

from batchinfer.model.attention_kinds import kind_of
from batchinfer.model.config import ModelConfig
from batchinfer.model.ops import Ops
from batchinfer.model.packed_folder import ENDS, EXPERT_FIELDS, EXPERT_TENSORS, MTP, PackedFolder
from batchinfer.model.weight_stream import WeightStream
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

_ALIGNMENT = 64
_DTYPES = {"U8": torch.uint8, "BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_KINDS: dict[str, type[Any]] = {
    **{"layer": LayerWeights, "indexer": IndexerWeights},
    **{"mlp": MlpWeights, "shared": MlpWeights},
    **{"entries": CompressorWeights, "keys": CompressorWeights, "index": IndexWeights},
    **dict.fromkeys(("streams", "attention_streams", "mlp_streams"), StreamWeights),
}


def write_parts(path: Path, weights: Ends | LayerWeights | MtpWeights) -> str:
    """Write a new file and force it to disk; returns the checksum of its bytes.

    Raises:
        OSError: it cannot be written (the disk is full).
    """
    parts = sorted(_parts_of(weights), key=lambda part: part[1].nbytes % _ALIGNMENT > 0)
    header: dict[str, Any] = {"__metadata__": {"forms": json.dumps({name: form for name, _, form in parts})}}
    end = 0
    for name, tensor, _ in parts:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    hasher = xxh3_128()
    with open(path, "xb") as file:
        pieces = (tensor.contiguous().view(-1).view(torch.uint8).numpy().data for _, tensor, _ in parts)
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
    stream: WeightStream | None = None,
) -> ModelWeights:
    """Return the weights of a converted folder, mapped; arguments as of `load_weights`.

    Args:
        stream: reads the layers into slots, where their tensors are; None: all layers are mapped, too.

    Raises:
        ModelError: the folder is not made for these operations or this dtype, or a file is damaged.
    """
    narrow = "fp4" if ops.fp4_experts else "int4" if ops.four_bit else "fp8"
    packed.check(narrow if ops.eight_bit else str(dtype).removeprefix("torch."))
    if torch.device(device).type != "cpu" or not ops.weight_format(dtype, device).copies:
        raise ModelError(
            f"{packed.folder} is converted for the C++ operations on a CPU, which this job does not use; "
            f"give the folder that it was made from, {packed.source}"
        )
    ids = [range(config.n_routed_experts)] * config.num_moe_layers if expert_ids is None else expert_ids
    held = tuple(tuple(of_layer) for of_layer in ids)
    of_layer = dict(zip(config.moe_layers, held, strict=True))
    kinds = _KINDS | {"attention": kind_of(config.attention).weights}
    ends = MappedParts(packed.folder / ENDS).take(Ends, kinds)
    layers = tuple(
        MappedParts(
            packed.layer(number), of_layer.get(number), None if stream is None else stream.slot_of(number)
        ).take(LayerWeights, kinds)
        for number in range(config.num_hidden_layers)
    )
    of_mtp = MappedParts(packed.folder / MTP).take(MtpWeights, kinds) if mtp else None
    mapped = (ends, *(layers if stream is None else ()), of_mtp)
    num_bytes = sum(tensor.nbytes for part in mapped for _, tensor, _ in _parts_of(part))
    of_ends = {"embedding": ends.embedding, "norm": ends.norm, "lm_head": ends.lm_head, "streams": ends.streams}
    return ModelWeights(layers=layers, expert_ids=held, mtp=of_mtp, mapped_bytes=num_bytes, stream=stream, **of_ends)


class PackedExperts:
    """The source of experts that change places, read from a converted folder."""

    def __init__(self, packed: PackedFolder):
        self._packed = packed

    def expert(self, prefix: str, expert: int, mlp: MoeWeights, slot: int) -> None:
        """Copy one routed expert of the layer `prefix` into a slot."""
        mapped = MappedParts(self._packed.layer(int(prefix.split(".")[2])), (expert,))
        for field, name in zip(EXPERT_FIELDS, EXPERT_TENSORS, strict=True):
            held = getattr(mlp, field)
            if held is not None:
                _data_of(held)[slot] = _data_of(mapped.leaf(name))[0]


class MappedParts:
    """One mapped file; of routed experts only these numbers (None: all).

    Args:
        slot: where the file's bytes will be when a layer computes, and where its tensors begin there (None: as in the
            file); the file's header is read now. None: the file is mapped.

    Raises:
        ModelError: the file cannot be read, or is damaged.
    """

    def __init__(
        self,
        path: Path,
        expert_ids: Sequence[int] | None = None,
        slot: tuple[memoryview, Mapping[str, int] | None] | None = None,
    ):
        self._path, self._expert_ids = path, expert_ids
        memory, starts = slot or (None, None)
        self._starts: Mapping[str, int] | None = starts
        try:
            with open(path, "rb") as file:
                access = mmap.PROT_READ | mmap.PROT_WRITE
                self._memory = memory or mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=access)
                self._start = 8 + int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(self._start - 8))
            self._forms: dict[str, dict[str, int]] = json.loads(header.pop("__metadata__")["forms"])
            self._header: dict[str, Any] = header
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{path} cannot be mapped: {error}; convert the model again") from None

    def leaf(self, name: str) -> Any:
        """Return one tensor, or packed weight; shares the file's memory unless its experts are not side by side."""
        entry, form = self._header[name], self._forms[name]
        start, _ = entry["data_offsets"]
        dtype, shape, offset = _DTYPES[entry["dtype"]], entry["shape"], self._start + start
        has_rows = self._expert_ids is not None and name in EXPERT_TENSORS
        if self._starts is not None:
            offset = self._starts[name]
            if has_rows:  # only these are in the slot
                shape = [len(self._expert_ids or ()), *shape[1:]]
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)
        if has_rows and self._starts is None:
            tensor = _rows(tensor, list(self._expert_ids or ()))
        if "num_experts" in form:
            return PackedRouter(tensor, form["num_experts"])
        if not form:
            return tensor
        return Packed(
            tensor, form["num_columns"], form["depth"], WeightKind(form["kind"]), is_paired=bool(form["is_paired"])
        )

    def take(self, kind: type[Any], kinds: dict[str, type[Any]], name: str = "") -> Any:
        """Return an object of this kind, made of the tensors with this prefix; None if there are none.

        Args:
            kinds: of its parts, by field; others are projections.
        """
        if name in self._header:
            try:
                return self.leaf(name)
            except (KeyError, ValueError, RuntimeError) as error:
                raise ModelError(f"{self._path} is damaged at {name}: {error}; convert the model again") from None
        prefix = f"{name}." if name else ""
        if not any(known.startswith(prefix) for known in self._header):
            return None
        if f"{prefix}router_ED" in self._header:
            kind = MoeWeights
        parts = {field: kinds.get(field, Projection) for field in _field_names(kind)}
        return kind(**{field: self.take(part, kinds, prefix + field) for field, part in parts.items()})


def _data_of(held: torch.Tensor | Packed) -> torch.Tensor:
    return held.data if isinstance(held, Packed) else held


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
    elif isinstance(value, PackedRouter):
        yield name, value.data_PDN, {"num_experts": value.num_experts}
    elif value is not None:
        for field in _field_names(type(value)):
            yield from _parts_of(getattr(value, field), f"{name}.{field}" if name else field)


def _field_names(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind)] if is_dataclass(kind) else list(kind._fields)
