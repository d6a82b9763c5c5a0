"""Placement: every row goes to a slot of its expert, and each slot gets its share of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.parallel.placement import Placement
from batchinfer.records import ConfigError
from support.random_placements import random_placement

repeatable = settings(derandomize=True, deadline=None, max_examples=150)
seeds = st.integers(0, 2**32 - 1)


def some_placement(random: np.random.Generator) -> Placement:
    """Return a random placement of any number of experts, with redundant ones, on any number of ranks."""
    num_ranks, num_experts = int(random.integers(1, 9)), int(random.integers(1, 33))
    num_redundant = -num_experts % num_ranks + num_ranks * int(random.integers(0, 4))
    return random_placement(random, num_experts, num_ranks, num_redundant, without_share=0.2)


def rows_per_slot(placement: Placement, experts: torch.Tensor, rank: int) -> np.ndarray:
    return np.bincount(placement.slots_for(experts, rank).numpy(), minlength=placement.num_slots)


def holders(placement: Placement, slots: torch.Tensor) -> list[int]:
    return [placement.expert_of_slot[slot] for slot in slots.tolist()]


# --- where rows go ----------------------------------------------------------------------------------------------------


def test_worked_example():
    # rank 0: slots 0 1 hold experts 0 1; rank 1: slots 2 3 hold experts 2 and again 0
    # of the rows for expert 0, a quarter goes to slot 0 and three quarters to slot 3
    placement = Placement((0, 1, 2, 0), (0.25, 1.0, 1.0, 0.75), num_experts=3, num_ranks=2)
    assert placement.slots_per_rank == 2
    assert placement.experts_of_rank(0) == (0, 1)
    assert placement.experts_of_rank(1) == (2, 0)
    # rank 0's four rows for expert 0 lie at 1/16, 5/16, 9/16 and 13/16 of the shares [0, 1/4) and [1/4, 1)
    assert placement.slots_for(torch.tensor([0, 2, 0, 1, 0, 0]), rank=0).tolist() == [0, 2, 3, 1, 3, 3]
    # a single row of rank 0 lies at 1/4, which is no longer slot 0's; one of rank 1 at 3/4
    assert placement.slots_for(torch.tensor([0]), rank=0).tolist() == [3]
    assert placement.slots_for(torch.tensor([0]), rank=1).tolist() == [3]


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.85])
def test_single_rows_of_many_steps_take_their_shares(share):
    """In decode a rank often has one row for an expert: it must not take the same slot in every step."""
    placement = Placement((0, 1, 1, 0), (share, share, 1 - share, 1 - share), num_experts=2, num_ranks=2)
    for rank in range(2):
        turns = [placement.slots_for(torch.tensor([1, 0]), rank, turn).tolist() for turn in range(200)]
        first = np.mean([slots == 1 for slots, _ in turns]), np.mean([slots == 0 for _, slots in turns])
        assert first == pytest.approx((share, share), abs=0.02)
        # nor do all experts' rows of a step take the slots of one rank
        assert len({tuple(slots) for slots in turns}) > 2


def test_experts_in_order():
    placement = Placement.in_order(4, num_ranks=3, num_redundant=5)
    assert placement.expert_of_slot == (0, 1, 2, 3, 0, 1, 2, 3, 0)
    assert placement.share_of_slot == pytest.approx((1 / 3, 1 / 2, 1 / 2, 1 / 2, 1 / 3, 1 / 2, 1 / 2, 1 / 2, 1 / 3))
    assert placement.experts_of_rank(2) == (2, 3, 0)
    assert Placement.in_order(4, num_ranks=2).expert_of_slot == (0, 1, 2, 3)


@repeatable
@given(seed=seeds)
def test_a_row_goes_only_to_a_slot_of_its_expert(seed):
    random = np.random.default_rng(seed)
    placement = some_placement(random)
    experts = torch.from_numpy(random.integers(0, placement.num_experts, size=random.integers(0, 300)))
    slots = placement.slots_for(experts, int(random.integers(placement.num_ranks)))
    assert slots.dtype == torch.int64
    assert holders(placement, slots) == experts.tolist()


@repeatable
@given(seed=seeds)
def test_each_slot_gets_its_share_of_a_rank_s_rows_within_one_row(seed):
    random = np.random.default_rng(seed)
    placement = some_placement(random)
    experts = torch.from_numpy(random.integers(0, placement.num_experts, size=1000))
    rows = rows_per_slot(placement, experts, int(random.integers(placement.num_ranks)))
    rows_of_expert = np.bincount(experts.numpy(), minlength=placement.num_experts)
    expected = rows_of_expert[list(placement.expert_of_slot)] * np.array(placement.share_of_slot)
    assert (np.abs(rows - expected) < 1 + 1e-9).all()


@repeatable
@given(seed=seeds)
def test_single_rows_of_many_ranks_spread_by_share_as_well(seed):
    random = np.random.default_rng(seed)
    placement = some_placement(random)
    num_ranks = placement.num_ranks
    for expert in range(placement.num_experts):
        rows = sum(rows_per_slot(placement, torch.tensor([expert]), rank) for rank in range(num_ranks))
        is_its = np.array(placement.expert_of_slot) == expert
        expected = num_ranks * np.array(placement.share_of_slot) * is_its
        assert (np.abs(rows - expected) < 1 + 1e-9).all()


@repeatable
@given(seed=seeds)
def test_a_slot_whose_share_is_zero_gets_nothing(seed):
    random = np.random.default_rng(seed)
    placement = some_placement(random)
    experts = torch.from_numpy(random.integers(0, placement.num_experts, size=500))
    rows = rows_per_slot(placement, experts, int(random.integers(placement.num_ranks)))
    assert not rows[np.array(placement.share_of_slot) == 0].any()


@pytest.mark.parametrize("num_rows", [1_000, 30_000, 1_000_000])
def test_many_rows_for_one_of_many_experts_do_not_round_over_to_the_next(num_rows):
    # 256 experts and 32 redundant ones on 144 ranks, as DeepSeek-V3 is served; the last rank's rows lie nearest to the
    # end of the shares
    placement = Placement.in_order(256, num_ranks=144, num_redundant=32)
    for expert in (0, 31, 200, 255):
        slots = placement.slots_for(torch.full((num_rows,), expert), rank=143)
        assert {placement.expert_of_slot[slot] for slot in slots.unique().tolist()} == {expert}


def test_shares_that_add_up_to_a_little_more_than_one_do_not_reach_into_the_next_expert():
    placement = Placement((0, 1, 2, 2, 3), (1.0, 1.0, 1.0 + 9e-7, 0.0, 1.0), num_experts=4, num_ranks=1)
    assert placement.slots_for(torch.full((1_000_000,), 3), rank=0).unique().tolist() == [4]


def test_without_redundant_slots_there_is_nothing_to_choose():
    placement = Placement((2, 0, 3, 1), (1.0,) * 4, num_experts=4, num_ranks=2)
    assert placement.slots_for(torch.tensor([0, 1, 2, 3, 0]), rank=1).tolist() == [1, 3, 0, 2, 1]


def test_no_rows():
    for placement in (Placement.in_order(4, 2), Placement.in_order(4, 2, 2)):
        assert placement.slots_for(torch.zeros(0, dtype=torch.int64), rank=1).tolist() == []


# --- tables that break the rules --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "shares", "num_experts", "num_ranks", "message"),
    [
        ((0, 1, 2), (1.0,) * 3, 3, 2, r"3 expert slots with 3 shares do not spread evenly over 2 ranks"),
        ((0, 1), (1.0,) * 3, 2, 2, r"2 expert slots with 3 shares do not spread evenly"),
        ((0, 1, 2, 3), (1.0,) * 4, 3, 2, r"slot 3 holds expert 3 with share 1\.0; experts are 0 to "),
        ((0, -1), (1.0,) * 2, 2, 2, r"slot 1 holds expert -1 with share 1\.0; experts are 0 to "),
        ((0, 1, 1, 0), (0.5, 1.5, -0.5, 0.5), 2, 2, r"slot 1 holds expert 1 with share 1\.5; experts are 0 to "),
        ((0, 1, 1, 0), (0.5, 1.0, -0.5, 0.5), 2, 2, r"slot 2 holds expert 1 with share -0\.5; experts are 0 to "),
        ((0, 1), (1.0, float("nan")), 2, 2, r"slot 1 holds expert 1 with share nan; experts are 0 to "),
        ((0, 1, 0, 1), (0.5, 0.5, 0.4, 0.5), 2, 2, r"the shares of expert 0 add up to 0\.9, not to 1"),
        ((0, 0), (1.0, 1.0), 1, 2, r"the shares of expert 0 add up to 2\.0, not to 1"),
        ((0, 2), (1.0, 1.0), 3, 2, r"the shares of expert 1 add up to 0\.0, not to 1"),
    ],
)
def test_a_table_that_breaks_a_rule_is_refused(experts, shares, num_experts, num_ranks, message):
    with pytest.raises(ConfigError, match=message):
        Placement(experts, shares, num_experts, num_ranks)


@repeatable
@given(num_experts=st.integers(1, 300), num_ranks=st.integers(1, 40), num_redundant=st.integers(0, 100))
def test_experts_that_do_not_spread_evenly_are_refused_with_a_number_that_does(num_experts, num_ranks, num_redundant):
    if (num_experts + num_redundant) % num_ranks == 0:
        assert Placement.in_order(num_experts, num_ranks, num_redundant).num_slots == num_experts + num_redundant
        return
    with pytest.raises(ConfigError, match=r"do not spread evenly") as refused:
        Placement.in_order(num_experts, num_ranks, num_redundant)
    remedy = int(str(refused.value).split("cluster.redundant_experts = ")[1].split()[0])
    assert num_redundant < remedy < num_redundant + num_ranks
    assert Placement.in_order(num_experts, num_ranks, remedy).num_slots == num_experts + remedy
