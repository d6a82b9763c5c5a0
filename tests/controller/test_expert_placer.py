"""Experts placed by what the ranks have counted: each group of ranks by the counts of its own phase."""

from __future__ import annotations

import time

import numpy as np
import pytest

from batchinfer.balance.expert_groups import group_loads
from batchinfer.config import ClusterConfig
from batchinfer.controller.expert_placer import ExpertPlacer
from batchinfer.data.expert_tables import read_expert_tables
from batchinfer.rundir import RunDir

# one MoE layer, six experts: prefill and decode like others
COUNTS = {"prefill": [[60, 50, 1, 1, 1, 7]], "decode": [[3, 1, 1, 2, 50, 63]]}
NUM_RANKS = 4  # two of each group: all count alike here


def placed(run, cluster):
    """What a placer hands out once every rank has sent its counts."""
    placer = ExpertPlacer(run, cluster, num_experts=6)
    placer.set_layers([1])
    placer.unit_done()
    assert placer.should_count()
    for rank in range(cluster.num_ranks):
        placer.add_counts(rank, COUNTS)
    deadline = time.monotonic() + 120
    while not (slots := placer.take_placed()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return slots


@pytest.fixture(scope="module")
def two_and_two(tmp_path_factory):
    run = RunDir(tmp_path_factory.mktemp("placed"))
    cluster = ClusterConfig(mode="disaggregated", prefill_ranks=2, decode_ranks=2, redundant_experts=2)
    return placed(run, cluster), read_expert_tables(run)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_ranks_are_balanced_for_the_tokens_of_their_own_phase(two_and_two, role):
    slots, _ = two_and_two
    counts = NUM_RANKS * np.array(COUNTS[role][0])
    load = counts[slots[role].expert_of_slot[0]] * np.array(slots[role].share_of_slot[0])
    busiest = load.reshape(2, -1).sum(axis=1).max()
    assert busiest == pytest.approx(counts.sum() / 2)  # two redundant slots can level any two ranks


def test_ranks_get_the_shares_that_make_them_even(two_and_two):
    slots, tables = two_and_two
    for role, table in tables.items():
        assert slots[role].expert_of_slot == table.expert_of_slot.tolist()
        assert slots[role].share_of_slot == table.share_of_slot.tolist()
    shares = np.concatenate([np.array(slots[role].share_of_slot[0]) for role in tables])
    assert not np.isin(shares.round(6), [0.0, 0.5, 1.0]).all(), "even shares would do: the test shows nothing"


def test_ranks_that_do_both_are_placed_for_the_sum():
    loads = {phase: np.array(counts) for phase, counts in COUNTS.items()}
    assert group_loads(loads, ["both"])["both"].tolist() == [[63, 51, 2, 3, 51, 70]]
    apart = group_loads(loads, ["prefill", "decode"])
    assert {group: load.tolist() for group, load in apart.items()} == COUNTS
