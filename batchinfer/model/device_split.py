"""Split of a GPU's memory and the host's where weights are streamed to the GPU: one formula for plan and ranks.

GPU    | embedding, head, steps | ring of slots | KV pages | layers that stay |
host   | pinned copy of all layers that are streamed |                          or, if that does not fit,
       | ring of pinned slots, read from disk | layers that stay |
"""

# L layers, M of them streamed

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from batchinfer.model.memory_split import MemorySplit, SplitError, slot_size, split_memory


@dataclass(frozen=True, slots=True)
class DeviceSplit:
    """Memory of one rank whose weights are streamed to its GPU.

    device: of the GPU, over all L layers; the layers alone in their slots stay there.
    host: of the host, over the M layers that are copied in every sweep; `sweep_bytes` are read from disk.
    """

    device: MemorySplit
    host: MemorySplit

    @property
    def streamed(self) -> tuple[int, ...]:
        """[M] layers that are copied in every sweep."""
        return streamed_layers(self.device)

    @property
    def source(self) -> Literal["host", "disk"]:
        """Source of a sweep's layers: "host" if all are in the host's memory, "disk" if some are read from disk."""
        return "disk" if self.host.sweep_bytes else "host"


def streamed_layers(device: MemorySplit) -> tuple[int, ...]:
    """Return the layers whose slot is shared, so that each sweep copies them again."""
    slots = device.slot_of_layer
    return tuple(layer for layer, slot in enumerate(slots) if slots.count(slot) > 1)


def split_device_memory(
    layer_bytes: Sequence[int],
    *,
    device_bytes: int,
    host_bytes: int,
    fixed_bytes: int,
    least_kv_bytes: int,
    useful_kv_bytes: int | None,
) -> DeviceSplit:
    """Split a GPU's memory, as `split_memory` does a rank's, and the host's memory for the streamed layers.

    Args:
        layer_bytes: [L] size of each layer, at least two.
        device_bytes: of the GPU, for this rank.
        host_bytes: of the host, for this rank's weights.
        fixed_bytes, least_kv_bytes, useful_kv_bytes: in the GPU's memory, as of `split_memory`.

    Raises:
        SplitError: names the bytes that are missing.
    """
    device = split_memory(
        layer_bytes,
        memory_bytes=device_bytes,
        fixed_bytes=fixed_bytes,
        least_kv_bytes=least_kv_bytes,
        useful_kv_bytes=useful_kv_bytes,
    )
    return DeviceSplit(device, split_host_memory([layer_bytes[layer] for layer in streamed_layers(device)], host_bytes))


def split_host_memory(streamed_bytes: Sequence[int], host_bytes: int) -> MemorySplit:
    """Give each streamed layer a slot in the host's memory if all fit, else some of them, and the others a ring.

    Args:
        streamed_bytes: [M] size of each layer.

    Raises:
        SplitError: there is not even room for the ring.
    """
    slots = tuple(slot_size(size) for size in streamed_bytes)
    if sum(slots) <= host_bytes:
        return MemorySplit(tuple(range(len(slots))), slots, kv_bytes=0, sweep_bytes=0)
    try:
        return split_memory(streamed_bytes, memory_bytes=host_bytes, fixed_bytes=0, least_kv_bytes=0, useful_kv_bytes=0)
    except SplitError:
        raise SplitError(
            f"{2 * max(slots) / 1e9:.2f} GB of the host's memory are needed for two layers on their way from disk, "
            f"and there are {host_bytes / 1e9:.2f} GB"
        ) from None
