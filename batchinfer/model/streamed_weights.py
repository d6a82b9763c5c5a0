"""The weights of a rank whose layers are streamed to its GPU: from a converted folder, or from any other one by a copy.

A folder that is converted for GPUs is read from disk in every sweep, as far as its layers do not fit into the host's
memory. Layers of another folder are made on the GPU one by one, as if they were to stay there, and kept in the host's
memory as they are: an FP8 checkpoint as it is stored.
"""

# L layers

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from batchinfer.model.config import ModelConfig
from batchinfer.model.device_split import DeviceSplit
from batchinfer.model.device_stream import DeviceStream, HostLayers, pinned_memory
from batchinfer.model.memory_split import slot_size
from batchinfer.model.ops import Ops
from batchinfer.model.packed_files import Layout, MappedParts, bytes_of, check_folder, kinds_of, lay_out, map_weights
from batchinfer.model.packed_folder import PackedFolder
from batchinfer.model.weight_loading import open_loader, read_ends, read_mtp
from batchinfer.model.weight_stream import WeightStream, slot_memory
from batchinfer.model.weights import LayerWeights, ModelWeights
from batchinfer.records import ModelError

# from the bytes of each layer, [L], and of embedding and head to the split; raises ConfigError
DeviceMemory = Callable[[Sequence[int], int], DeviceSplit]


def stream_to_device(
    folder: Path,
    packed: PackedFolder | None,
    config: ModelConfig,
    ops: Ops,
    memory: DeviceMemory,
    *,
    dtype: torch.dtype,
    device: torch.device,
    mtp: bool = False,
    on_read: Callable[[int, int], None] | None = None,
) -> ModelWeights:
    """Return weights whose layers are copied to the device before they compute; other arguments as of `load_weights`.

    Args:
        packed: the folder's manifest; None: it is not converted.

    Raises:
        ModelError: the folder is not made for these operations, or cannot be read.
        ConfigError: memory is too small.
    """
    if packed is None:
        return _from_copy(folder, config, ops, memory, dtype=dtype, device=device, mtp=mtp, on_read=on_read)
    check_folder(packed, ops, dtype, device)
    sizes = [packed.layer_bytes(layer) for layer in range(config.num_hidden_layers)]
    split = memory(sizes, packed.end_bytes)
    source = WeightStream([packed.layer(layer) for layer in split.streamed], split.host, _new_memory(device))
    stream = DeviceStream(source, sizes, split.device, device)
    return map_weights(packed, config, ops, dtype=dtype, device=device, expert_ids=None, mtp=mtp, stream=stream)


def _from_copy(
    folder: Path,
    config: ModelConfig,
    ops: Ops,
    memory: DeviceMemory,
    *,
    dtype: torch.dtype,
    device: torch.device,
    mtp: bool,
    on_read: Callable[[int, int], None] | None,
) -> ModelWeights:
    """Read a checkpoint once and keep its layers in the host's memory."""
    loader = open_loader(folder, config, dtype=dtype, ops=ops, device=device, mtp=mtp, on_read=on_read)
    ends = read_ends(loader)
    new_memory, layouts, copies = _new_memory(device), [], []
    for layer in range(config.num_hidden_layers):
        layout, parts = lay_out(loader.layer(layer), aligned=True)
        held = new_memory(slot_size(layout.size))
        for name, tensor in parts:
            start, end = layout.entries[name]["data_offsets"]
            held[start:end] = bytes_of(tensor).numpy().data
        layouts.append(layout)
        copies.append(held)
    of_mtp = read_mtp(loader) if mtp else None
    split = memory(
        [layout.size for layout in layouts], sum(tensor.nbytes for _, tensor in lay_out(ends, aligned=False)[1])
    )
    if split.source != "host":
        raise ModelError(
            f"{folder} does not fit into the host's memory; run `batchinfer convert {folder} DIR --gpu --dtype …` and "
            "set model.path to DIR: then its layers are read from disk"
        )
    source = HostLayers(copies, split.streamed)
    stream = DeviceStream(source, [layout.size for layout in layouts], split.device, device)
    take = partial(_layer_in, kinds=kinds_of(config), path=folder, device=device)
    layers = tuple(take(layout, stream.memory_of(layer), copies[layer]) for layer, layout in enumerate(layouts))
    return ModelWeights(
        ends.embedding, layers, ends.norm, ends.lm_head, loader.expert_ids, of_mtp, ends.streams, stream=stream
    )


def _layer_in(
    layout: Layout,
    slot: torch.Tensor | None,
    copy: memoryview,
    *,
    kinds: dict[str, type],
    path: Path,
    device: torch.device,
) -> LayerWeights:
    """Return a layer in its slot; without a slot it is copied to the device to stay."""
    layer: LayerWeights = MappedParts(layout, copy if slot is None else slot, path, device=device).take(
        LayerWeights, kinds
    )
    return layer


def _new_memory(device: torch.device) -> Callable[[int], memoryview]:
    return pinned_memory if device.type == "cuda" else slot_memory
