"""Placements that stay good when loads change: as light as the lightest, with the heaviest experts on several GPUs."""

from __future__ import annotations

import numpy as np
import pytest

from batchinfer.balance.expert_groups import node_limits
from batchinfer.balance.experts import place_experts, place_robustly

SIZES = [(16, 24, 2), (16, 32, 2), (16, 16, 2), (64, 80, 8), (256, 320, 16), (256, 288, 32), (32, 64, 32)]


def loads(seed, num_experts, num_layers=3, sigma=0.7):
    return 1000 * np.random.default_rng(seed).lognormal(0.0, sigma, (num_layers, num_experts))


def max_over_mean(placement, load):
    load_LR = np.take_along_axis(load, placement.expert_of_slot, axis=1) * placement.share_of_slot
    load_LG = load_LR.reshape(*placement.gpu_load.shape, -1).sum(axis=2)
    return load_LG.max(axis=1).sum() / load_LG.mean(axis=1).sum()


def test_worked_example():
    # a and b on both GPUs, c and d on one each: 1.5 + 1.5 + 3 and 2.5 + 2.5 + 1
    placement = place_robustly(np.array([[4.0, 4.0, 3.0, 1.0]]), num_slots=6, num_gpus=2)
    experts, shares = (table.reshape(2, 3).tolist() for table in (placement.expert_of_slot, placement.share_of_slot))
    of_c, of_d = sorted((dict(zip(*of_gpu, strict=True)) for of_gpu in zip(experts, shares, strict=True)), key=max)
    assert of_c == pytest.approx({0: 3 / 8, 1: 3 / 8, 2: 1}, abs=1e-5)
    assert of_d == pytest.approx({0: 5 / 8, 1: 5 / 8, 3: 1}, abs=1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("num_experts", "num_slots", "num_gpus"), SIZES)
def test_no_gpu_gets_more_than_the_lightest_placement_gives_one(num_experts, num_slots, num_gpus, seed):
    load = loads(seed, num_experts)
    load[0, 0] = 0.0
    lightest = place_experts(load, num_slots=num_slots, num_gpus=num_gpus)
    placement = place_robustly(load, num_slots=num_slots, num_gpus=num_gpus)
    assert (placement.max_load <= lightest.max_load + 2e-6 * load.sum(axis=1) / num_gpus).all()
    assert (placement.share_of_slot >= 0.0).all()
    for experts, shares in zip(placement.expert_of_slot, placement.share_of_slot, strict=True):
        assert np.bincount(experts, shares, minlength=num_experts) == pytest.approx(np.ones(num_experts))


@pytest.mark.parametrize("seed", range(5))
def test_it_stays_better_than_the_lightest_one_when_loads_change(seed):
    load = loads(seed, 16)
    changed = load * np.random.default_rng(seed + 100).lognormal(0.0, 0.4, (20, *load.shape))
    lightest = place_experts(load, num_slots=24, num_gpus=2)
    placement = place_robustly(load, num_slots=24, num_gpus=2)
    mean = [np.mean([max_over_mean(one, other) - 1 for other in changed]) for one in (placement, lightest)]
    assert mean[0] < 0.7 * mean[1]


def test_other_shares_alone_are_tried_before_weights_move():
    load = loads(1, 256)
    before = place_robustly(load, num_slots=320, num_gpus=16)
    after = place_robustly(load * loads(2, 256, sigma=0.1), num_slots=320, num_gpus=16, previous=before)
    assert (after.expert_of_slot == before.expert_of_slot).all()
    assert (after.share_of_slot != before.share_of_slot).any()


def test_copies_stay_on_one_node_where_that_is_wanted():
    load = loads(3, 64)
    placement = place_robustly(load, num_slots=80, num_gpus=8, num_nodes=2, num_groups=8)
    for experts in placement.expert_of_slot.reshape(3, 2, -1):
        groups = [set(of_node // 8) for of_node in experts]
        assert [len(found) for found in groups] == [4, 4]
        assert not groups[0] & groups[1]


@pytest.mark.parametrize(
    ("num_ranks", "num_nodes", "num_router_groups", "limits"),
    [
        (32, 4, 8, (4, 8)),
        (144, 18, 8, (1, 1)),  # groups do not divide: copies may be anywhere
        (6, 4, 8, (1, 1)),  # nor do ranks
        (32, 4, 1, (1, 1)),  # the router knows no groups
        (8, 1, 8, (1, 1)),
    ],
)
def test_nodes_limit_copies_where_router_groups_divide_by_them(num_ranks, num_nodes, num_router_groups, limits):
    assert node_limits(num_ranks, num_nodes, num_router_groups) == limits
