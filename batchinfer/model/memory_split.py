"""Split of a rank's memory where weights are streamed: one formula for plan, ranks and reports.

memory  | process, embedding, head, steps | ring of slots | KV pages | layers that stay |

A sweep reads every layer that has no slot of its own. A longer sweep serves more requests, so KV comes before layers
that stay: what the job's KV cannot use goes to these.
"""

# L layers

from collections.abc import Sequence
from dataclasses import dataclass

RING_SLOTS = 3  # one layer computes, the next is there, a third is being read
LEAST_SLOTS = 2
SLOT_ALIGNMENT = 2 << 20  # of slots in memory


class SplitError(ValueError):
    """Memory does not hold the ring of slots and the KV of one request."""


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """Memory of one rank whose weights are streamed.

    slot_of_layer: [L] the slot into which each layer is read; a layer alone in its slot is read once and stays.
    slot_bytes: size of each slot, whole multiples of SLOT_ALIGNMENT.
    kv_bytes: for KV pages and states of requests.
    sweep_bytes: read from disk in every sweep.
    """

    slot_of_layer: tuple[int, ...]
    slot_bytes: tuple[int, ...]
    kv_bytes: int
    sweep_bytes: int

    @property
    def num_resident(self) -> int:
        """Number of layers that stay."""
        slots = self.slot_of_layer
        return sum(slots.count(slot) == 1 for slot in slots)


def split_memory(
    layer_bytes: Sequence[int], *, memory_bytes: int, fixed_bytes: int, least_kv_bytes: int, useful_kv_bytes: int | None
) -> MemorySplit:
    """Split memory between a ring of slots, KV, and layers that stay.

    If all layers would fit, none stays: then the job streams because it is asked to.

    Args:
        layer_bytes: [L] size of each layer's file, at least one.
        memory_bytes: of the rank, in all.
        fixed_bytes: of process, embedding, head and steps.
        least_kv_bytes: KV of the largest request.
        useful_kv_bytes: KV of all requests that can run at once; None: not known, as much as there is.

    Raises:
        SplitError: names the bytes that are missing.
    """
    sizes, largest = [slot_size(size) for size in layer_bytes], slot_size(max(layer_bytes))
    room = memory_bytes - fixed_bytes - least_kv_bytes
    wanted = RING_SLOTS if room >= RING_SLOTS * largest else LEAST_SLOTS
    num_slots = min(len(sizes), wanted, max(LEAST_SLOTS, len(sizes) // 2))
    room -= num_slots * largest
    if room < 0:
        raise SplitError(
            f"{(memory_bytes - room) / 1e9:.2f} GB are needed at least: {num_slots * largest / 1e9:.2f} GB for "
            f"{num_slots} of {len(sizes)} layers at a time, {least_kv_bytes / 1e9:.2f} GB for the KV of one request "
            f"and {fixed_bytes / 1e9:.2f} GB for steps, embedding and head"
        )
    kv_bytes = least_kv_bytes + room
    if useful_kv_bytes is not None:
        kv_bytes = min(kv_bytes, max(least_kv_bytes, useful_kv_bytes))
    num_fitting = (least_kv_bytes + room - kv_bytes) // largest
    # each slot of the ring serves two layers at least, or the disk would idle
    most_resident = max(0, len(sizes) - 2 * num_slots) if num_fitting < len(sizes) - num_slots else 0
    num_resident = min(num_fitting, most_resident)
    return _laid_out(layer_bytes, num_slots, num_resident, kv_bytes)


def sweep_seconds(sweep_bytes: int, product_s: float, *, disk_bytes_per_s: float) -> float:
    """Return the seconds of a sweep: of its reads or of its products, whichever takes longer."""
    return max(sweep_bytes / disk_bytes_per_s, product_s)


def _laid_out(layer_bytes: Sequence[int], num_slots: int, num_resident: int, kv_bytes: int) -> MemorySplit:
    """Give resident layers, spread evenly so that the disk never idles for long, a slot each, and others the ring."""
    num_layers, largest = len(layer_bytes), slot_size(max(layer_bytes))
    resident = {int((number + 0.5) * num_layers / num_resident) for number in range(num_resident)}
    streamed = [layer for layer in range(num_layers) if layer not in resident]
    slot_of_layer, slot_bytes = [0] * num_layers, [largest] * num_slots
    for number, layer in enumerate(streamed):
        slot_of_layer[layer] = number % num_slots
    if num_slots > LEAST_SLOTS and len(streamed) % num_slots == 1:
        # the next sweep's first layer is read while this sweep's last one computes
        slot_of_layer[streamed[-1]] = 1
    for layer in sorted(resident):
        slot_of_layer[layer] = len(slot_bytes)
        slot_bytes.append(slot_size(layer_bytes[layer]))
    read = [layer for layer in streamed if slot_of_layer.count(slot_of_layer[layer]) > 1]
    return MemorySplit(tuple(slot_of_layer), tuple(slot_bytes), kv_bytes, sum(layer_bytes[layer] for layer in read))


def slot_size(num_bytes: int) -> int:
    """Return the bytes of a slot for a file of this size."""
    return -(-num_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
