"""Experts to GPUs: valid, close to the bound, better than the published algorithm, and stable when loads change."""

import itertools
import time

import numpy as np
import pytest

from batchinfer.balance.experts import place_experts, placement
from batchinfer.records import ConfigError

NUM_SLOTS = 288
CLOSE = 1e-9


def loads(kind, seed, num_layers=58, num_experts=256):
    rng = np.random.default_rng(seed)
    if kind == "zipf":
        return np.array([rng.permutation(np.arange(1, num_experts + 1) ** -0.8) for _ in range(num_layers)])
    return rng.lognormal(0.0, {"even": 0.5, "skewed": 1.0}[kind], (num_layers, num_experts))


def gpu_loads(load, placement, num_gpus):
    per_slot = np.take_along_axis(np.asarray(load, float), placement.expert_of_slot, axis=1) * placement.share_of_slot
    return per_slot.reshape(len(per_slot), num_gpus, -1).sum(axis=2)


def simple_bounds(load, num_slots, num_gpus):
    """The mean, or the load per copy when copies are as even as they can be."""
    return np.array([max(row.sum() / num_gpus, (row / published_copies(row, num_slots)).max()) for row in load])


def published_copies(load_E, num_slots):
    copies = np.ones(len(load_E), int)
    for _ in range(num_slots - len(load_E)):
        copies[np.argmax(load_E / copies)] += 1
    return copies


def published_packing(weights, num_packs):
    """Heaviest first, each to the lightest pack with room."""
    pack_of, load, room = np.zeros(len(weights), int), [0.0] * num_packs, [len(weights) // num_packs] * num_packs
    for item in np.argsort(-weights, kind="stable"):
        pack = min((p for p in range(num_packs) if room[p]), key=load.__getitem__)
        pack_of[item], load[pack], room[pack] = pack, load[pack] + weights[item], room[pack] - 1
    return pack_of


def published_max_load(load_E, num_slots, num_gpus, num_nodes=1, num_groups=1):
    """The fullest GPU after the steps of github.com/deepseek-ai/EPLB: groups to nodes, copies, copies to GPUs."""
    group_loads = load_E.reshape(num_groups, -1)
    node_of_group = published_packing(group_loads.sum(axis=1), num_nodes)
    fullest = 0.0
    for node in range(num_nodes):
        local = group_loads[node_of_group == node].ravel()
        copies = published_copies(local, num_slots // num_nodes)
        weights = np.repeat(local / copies, copies)
        gpu_of_copy = published_packing(weights, num_gpus // num_nodes)
        fullest = max(fullest, np.bincount(gpu_of_copy, weights).max())
    return fullest


def check(load, placement, num_slots, num_gpus):
    """Assert the invariants of every placement."""
    load = np.asarray(load, float)
    assert placement.expert_of_slot.shape == placement.share_of_slot.shape == (len(load), num_slots)
    assert (placement.share_of_slot >= 0.0).all()
    for expert_R, share_R in zip(placement.expert_of_slot, placement.share_of_slot, strict=True):
        sums = np.bincount(expert_R, share_R, minlength=load.shape[1])
        assert np.abs(sums - 1.0).max() < CLOSE  # so every expert has a slot, too
    reached = gpu_loads(load, placement, num_gpus)
    scale = load.max(axis=1) + 1e-300
    assert (np.abs(reached - placement.gpu_load).max(axis=1) <= CLOSE * scale).all()
    assert (placement.bound <= reached.max(axis=1) + CLOSE * scale).all()
    assert (placement.bound >= simple_bounds(load, num_slots, num_gpus) - CLOSE * scale).all()


def num_moved(before, after, num_gpus):
    """Weights that GPUs get and did not have."""
    gpus = zip(
        before.expert_of_slot.reshape(-1, before.expert_of_slot.shape[1] // num_gpus),
        after.expert_of_slot.reshape(-1, before.expert_of_slot.shape[1] // num_gpus),
        strict=True,
    )
    return sum(len(set(new) - set(old)) for old, new in gpus)


@pytest.mark.all  # make test: the fullest GPU is close to the bound
def test_eight_experts_on_eight_gpus_of_two_slots_reach_the_mean():
    # The published algorithm decides on copies first and splits them evenly: 232. Free shares fill all GPUs alike.
    load = np.array([[600.0, 560, 120, 120, 20, 10, 10, 10]])
    placement = place_experts(load, num_slots=16, num_gpus=8)
    check(load, placement, 16, 8)
    assert published_max_load(load[0], 16, 8) > 230.0
    assert placement.max_load == pytest.approx([181.25])
    assert placement.bound == pytest.approx([181.25])


def test_a_pool_of_three_experts_on_two_gpus():
    # loads 5 4 3, 2 GPUs of 2 slots: 6 each, so one expert is cut in two unequal parts
    placement = place_experts(np.array([[5.0, 4.0, 3.0]]), num_slots=4, num_gpus=2)
    assert placement.gpu_load == pytest.approx(np.array([[6.0, 6.0]]))


@pytest.mark.parametrize("seed", range(40))
def test_random_shapes_give_valid_placements(seed):
    rng = np.random.default_rng(seed)
    for case in range(50):
        num_gpus, slots_per_gpu = rng.integers(1, 9), rng.integers(1, 6)
        num_slots = int(num_gpus * slots_per_gpu) + (0 if case % 5 else 10 * int(num_gpus))
        num_experts = num_slots if case % 7 == 0 else int(rng.integers(1, num_slots + 1))
        load = rng.lognormal(0.0, 1.5, (2, num_experts)) * 10.0 ** rng.integers(-6, 7)
        if case % 3 == 0:
            load[rng.random(load.shape) < 0.5] = 0.0
        if case % 4 == 0:
            load[:, rng.integers(num_experts)] += 100.0 * load.sum()
        if case % 6 == 0:
            load = np.floor(load)
        placement = place_experts(load, num_slots=num_slots, num_gpus=int(num_gpus))
        check(load, placement, num_slots, num_gpus)
        for row, fullest in zip(load, placement.max_load, strict=True):
            assert fullest <= published_max_load(row, num_slots, num_gpus) * (1.0 + CLOSE)


@pytest.mark.parametrize("seed", range(20))
def test_random_node_shapes_keep_groups_on_one_node(seed):
    rng = np.random.default_rng(seed)
    for _ in range(5):
        num_nodes, groups_per_node, experts_per_group, gpus_per_node = rng.integers(1, 5, size=4).tolist()
        num_experts, num_gpus = num_nodes * groups_per_node * experts_per_group, num_nodes * gpus_per_node
        slots_per_gpu = -(-groups_per_node * experts_per_group // gpus_per_node) + int(rng.integers(0, 3))
        num_groups, num_slots = num_nodes * groups_per_node, slots_per_gpu * num_gpus
        sizes = {"num_slots": num_slots, "num_gpus": num_gpus, "num_nodes": num_nodes, "num_groups": num_groups}
        load = rng.lognormal(0.0, 1.0, (2, num_experts))
        placement = place_experts(load, **sizes)
        check(load, placement, num_slots, num_gpus)
        for layer, row in enumerate(load):
            groups = placement.expert_of_slot[layer].reshape(num_nodes, -1) // experts_per_group
            assert sum(len(set(node)) for node in groups.tolist()) == num_groups
            assert placement.max_load[layer] <= published_max_load(row, *sizes.values()) * (1.0 + CLOSE)


def best_possible(load_E, num_gpus):
    """The smallest largest load over all contents of GPUs with two slots, with the best shares.

    With given slots that is the largest load of a set of experts per GPU that holds one of them (Hall).
    """
    num_experts = len(load_E)
    experts_of_set = [[e for e in range(num_experts) if mask >> e & 1] for mask in range(2**num_experts)]
    pairs = [1 << a | 1 << b for a, b in itertools.combinations_with_replacement(range(num_experts), 2)]
    slots = np.array(list(itertools.combinations_with_replacement(pairs, num_gpus)))
    slots = slots[np.bitwise_or.reduce(slots, axis=1) == 2**num_experts - 1]
    worst = np.zeros(len(slots))
    for mask in range(1, 2**num_experts):
        worst = np.maximum(worst, load_E[experts_of_set[mask]].sum() / ((slots & mask) > 0).sum(axis=1))
    return worst.min()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("num_experts", "num_gpus"), [(4, 3), (5, 3), (6, 3), (6, 4)])
def test_small_placements_are_as_good_as_the_best_of_all(num_experts, num_gpus, seed):
    load_E = np.random.default_rng(seed).lognormal(0.0, 1.0, num_experts)
    placement = place_experts(load_E[None], num_slots=2 * num_gpus, num_gpus=num_gpus)
    best = best_possible(load_E, num_gpus)
    assert placement.max_load[0] == pytest.approx(best)
    assert placement.bound[0] <= best * (1.0 + CLOSE)


# Largest acceptable mean of (fullest GPU / simple bound). With two slots per GPU the simple bound is out of reach.
LIMIT = {
    (32, "default"): {"even": 1.007, "skewed": 1.007, "zipf": 1.007},
    (144, "default"): {"even": 1.030, "skewed": 1.023, "zipf": 1.103},
    (144, "high"): {"even": 1.020, "skewed": 1.0215, "zipf": 1.098},
}


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "num_gpus", "effort"),
    [
        pytest.param(kind, *case, marks=[pytest.mark.slow] * (case == (144, "high") and kind != "skewed"))
        for case in LIMIT
        for kind in LIMIT[case]
    ],
)
def test_the_fullest_gpu_is_close_to_the_bound(kind, num_gpus, effort, seed):
    load = loads(kind, seed, num_layers=58 if effort == "default" else 8)
    begin = time.perf_counter()
    placement = place_experts(load, num_slots=NUM_SLOTS, num_gpus=num_gpus, effort=effort)
    took_s = time.perf_counter() - begin
    check(load, placement, NUM_SLOTS, num_gpus)
    ratio = placement.max_load / simple_bounds(load, NUM_SLOTS, num_gpus)
    print(f"{kind}, {num_gpus} GPUs, {effort}: mean {ratio.mean():.4f}, worst {ratio.max():.4f}, {took_s:.2f} s")
    assert ratio.mean() <= LIMIT[num_gpus, effort][kind]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", ["even", "skewed", "zipf"])
def test_with_groups_on_nodes_no_layer_is_worse_than_published(kind, seed):
    sizes = {"num_slots": NUM_SLOTS, "num_gpus": 32, "num_nodes": 4, "num_groups": 8}
    load = loads(kind, seed)
    placement = place_experts(load, **sizes)
    check(load, placement, NUM_SLOTS, 32)
    published = np.array([published_max_load(row, *sizes.values()) for row in load])
    assert (placement.max_load <= published * (1.0 + CLOSE)).all()
    # The best packing of 8 groups, two to a node, by trying all.
    bound = np.array([min(map(max, all_pairings(row.reshape(8, -1).sum(axis=1)))) for row in load]) / 8
    ours, theirs = (placement.max_load / bound).mean() - 1.0, (published / bound).mean() - 1.0
    print(f"{kind}: above the bound {ours:.5f}, published {theirs:.5f}")
    assert ours <= theirs / 2


def all_pairings(weights):
    """The sums of pairs, for every way to make pairs of all."""
    if len(weights) == 0:
        yield [0.0]
        return
    for other in range(1, len(weights)):
        for rest in all_pairings(np.delete(weights, [0, other])):
            yield [weights[0] + weights[other], *rest]


@pytest.mark.parametrize("sizes", [{}, {"num_nodes": 4, "num_groups": 8}])
def test_a_new_plan_close_to_the_old_one_moves_few_weights(sizes):
    load = loads("skewed", 5, num_layers=12)
    before = place_experts(load, num_slots=NUM_SLOTS, num_gpus=32, **sizes)
    load *= np.random.default_rng(6).lognormal(0.0, 0.1, load.shape)
    fresh = place_experts(load, num_slots=NUM_SLOTS, num_gpus=32, **sizes)
    after = place_experts(load, num_slots=NUM_SLOTS, num_gpus=32, previous=before, **sizes)
    check(load, after, NUM_SLOTS, 32)
    assert (after.max_load <= fresh.max_load * (1.0 + CLOSE)).all()
    assert num_moved(before, after, 32) < num_moved(before, fresh, 32) / 3


def test_with_two_slots_per_gpu_a_new_plan_keeps_one_of_them():
    load = loads("skewed", 5, num_layers=6)
    before = place_experts(load, num_slots=NUM_SLOTS, num_gpus=144)
    load *= np.random.default_rng(6).lognormal(0.0, 0.1, load.shape)
    fresh = place_experts(load, num_slots=NUM_SLOTS, num_gpus=144)
    after = place_experts(load, num_slots=NUM_SLOTS, num_gpus=144, previous=before)
    assert (after.max_load <= fresh.max_load * (1.0 + CLOSE)).all()
    assert num_moved(before, after, 144) < 0.55 * num_moved(before, fresh, 144)


@pytest.mark.parametrize("num_gpus", [32, 144])
def test_the_same_load_again_moves_nothing(num_gpus):
    load = loads("even", 3, num_layers=4)
    before = place_experts(load, num_slots=NUM_SLOTS, num_gpus=num_gpus)
    after = place_experts(load, num_slots=NUM_SLOTS, num_gpus=num_gpus, previous=before)
    assert num_moved(before, after, num_gpus) == 0


@pytest.mark.parametrize("seed", range(20))
def test_any_previous_placement_is_accepted(seed):
    rng = np.random.default_rng(seed)
    num_gpus, slots_per_gpu = int(rng.integers(1, 8)), int(rng.integers(1, 5))
    num_slots = num_gpus * slots_per_gpu
    num_experts = int(rng.integers(1, num_slots + 1))
    sizes = {"num_slots": num_slots, "num_gpus": num_gpus}
    before, load = rng.lognormal(0.0, 1.0, (2, 3, num_experts))
    fresh = place_experts(load, **sizes)
    after = place_experts(load, previous=place_experts(before, **sizes), **sizes)
    check(load, after, num_slots, num_gpus)
    assert (after.max_load <= fresh.max_load * (1.0 + CLOSE)).all()


def test_threads_do_not_change_the_plan(monkeypatch):
    load = loads("even", 4, num_layers=6)
    plans = []
    for num_threads in (1, 4):
        monkeypatch.setattr(placement, "num_cores", lambda num_threads=num_threads: num_threads)
        plans.append(place_experts(load, num_slots=NUM_SLOTS, num_gpus=144))
    assert np.array_equal(plans[0].expert_of_slot, plans[1].expert_of_slot)
    assert np.array_equal(plans[0].share_of_slot, plans[1].share_of_slot)


def test_no_copies_on_one_gpu_while_others_could_use_them():
    # 3 experts, 2 GPUs with 3 slots: every GPU can hold every expert once
    placement = place_experts(np.array([[9.0, 1.0, 1.0]]), num_slots=6, num_gpus=2)
    assert all(len(set(gpu)) == 3 for gpu in placement.expert_of_slot.reshape(2, 3).tolist())


def test_no_load_is_a_load():
    placement = place_experts(np.zeros((2, 5)), num_slots=8, num_gpus=4)
    check(np.zeros((2, 5)), placement, 8, 4)
    assert (placement.max_over_mean == 1.0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"load": np.ones(8)}, "one row per layer"),
        ({"load": np.array([[1.0, -1.0]])}, r"load\[0, 1\] is -1.0"),
        ({"load": np.array([[np.nan, 1.0]])}, r"load\[0, 0\] is nan"),
        ({"load": [["many"]]}, "not a table of numbers"),
        ({"num_slots": 6}, "fewer than 8 experts; use 8"),
        ({"num_slots": 10}, "not a multiple of 4 GPUs; use 12"),
        ({"num_gpus": 0}, "num_gpus is 0"),
        ({"num_nodes": 3}, "not a multiple of 3 nodes; use 6"),
        ({"num_nodes": 2, "num_groups": 6}, "num_groups is 6"),
        ({"effort": "most"}, "'default' or 'high'"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {"load": np.ones((1, 8)), "num_slots": 8, "num_gpus": 4} | change
    with pytest.raises(ConfigError, match=message):
        place_experts(arguments.pop("load"), **arguments)


def test_a_previous_placement_of_another_shape_is_refused():
    before = place_experts(np.ones((1, 8)), num_slots=8, num_gpus=4)
    with pytest.raises(ConfigError, match="leave it out"):
        place_experts(np.ones((2, 8)), num_slots=8, num_gpus=4, previous=before)
