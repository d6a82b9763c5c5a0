"""The split of a rank's memory between slots, KV and layers that stay, and the seconds of a sweep."""

from itertools import pairwise

import pytest

from batchinfer.model.memory_split import SLOT_ALIGNMENT, SplitError, split_memory, sweep_seconds

MB = SLOT_ALIGNMENT // 2
LAYER = 10 * MB


def split(num_layers, memory_mb, *, least=0, useful=None, fixed=0):
    sizes = [LAYER - 5] * num_layers
    given = {"fixed_bytes": fixed * MB, "least_kv_bytes": least * MB}
    return split_memory(
        sizes, memory_bytes=memory_mb * MB, useful_kv_bytes=None if useful is None else useful * MB, **given
    )


def test_kv_gets_what_the_ring_leaves():
    found = split(27, 100, fixed=7)
    assert found.slot_bytes == (LAYER,) * 3
    assert found.kv_bytes == (100 - 7 - 30) * MB
    assert found.sweep_bytes == 27 * (LAYER - 5)
    assert found.num_resident == 0


def test_layers_stay_evenly_spread_in_memory_that_kv_cannot_use():
    found = split(27, 100, useful=13)
    assert (found.kv_bytes, found.num_resident) == (13 * MB, 5)
    assert len(found.slot_bytes) == 3 + 5
    assert found.sweep_bytes == 22 * (LAYER - 5)
    stay = [layer for layer, slot in enumerate(found.slot_of_layer) if found.slot_of_layer.count(slot) == 1]
    assert max(after - before for before, after in pairwise(stay)) <= 6


def test_no_layer_stays_where_all_would_fit():
    assert split(9, 1000, useful=1).num_resident == 0


@pytest.mark.parametrize("num_layers", range(4, 40))
@pytest.mark.parametrize("memory", [25, 35, 75])
def test_neighbours_never_share_a_slot_nor_last_and_first_layer_if_there_are_three(num_layers, memory):
    slots = split(num_layers, memory, useful=1).slot_of_layer
    ring = [slot for slot in slots if slots.count(slot) > 1]
    assert all(slot != after for slot, after in pairwise(ring))
    assert ring[0] != ring[-1] or len(set(ring)) == 2


def test_memory_that_holds_no_ring_is_refused_with_the_sizes():
    assert split(27, 24, least=3).kv_bytes == 4 * MB  # two slots suffice
    with pytest.raises(SplitError, match=r"0\.02 GB are needed at least: 0\.02 GB for 2 of 27 layers"):
        split(27, 22, least=3)


def test_a_sweep_takes_as_long_as_disk_or_products():
    assert sweep_seconds(30 * 10**9, 6, disk_bytes_per_s=1.5e9) == 20
    assert sweep_seconds(30 * 10**9, 24, disk_bytes_per_s=1.5e9) == 24
