"""Experts placed by what the ranks have counted: each group of ranks by the counts of its own phase, when it pays."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from batchinfer.balance.expert_groups import group_loads
from batchinfer.config import JobConfig
from batchinfer.controller.experts.history import ExpertHistory
from batchinfer.controller.experts.loads import ExpertLoads
from batchinfer.controller.experts.placer import NUM_CHECKS, ExpertPlacer
from batchinfer.controller.experts.proposals import MoveCosts, Proposal
from batchinfer.data.expert_tables import ExpertTables, num_nodes, read_expert_tables
from batchinfer.model.config import load_model_config
from batchinfer.progress import Count
from batchinfer.protocol.messages import ExpertCounts
from batchinfer.rundir import RunDir
from support.paths import SAMPLE_MODEL

# one MoE layer, six experts: prefill and decode like others
COUNTS = {"prefill": [[6000, 5000, 100, 100, 100, 700]], "decode": [[300, 100, 100, 200, 5000, 6300]]}
MODEL = replace(load_model_config(SAMPLE_MODEL), n_routed_experts=6, num_hidden_layers=2, n_group=2, topk_group=1)
APART = {"mode": "disaggregated", "prefill_ranks": 2, "decode_ranks": 2, "redundant_experts": 2}


def told(counts, placement=0):
    return ExpertCounts(placement, counts, {phase: [0] for phase in counts})


def job_of(**cluster):
    parts = {
        "input": {"files": ["a"], "prompt": "a"},
        "output": {"dir": "a"},
        "model": {"path": "a", "dtype": "float32"},
    }
    parts["sampling"] = {"max_tokens": 8}
    return JobConfig.model_validate({**parts, "cluster": cluster})


class Placer:
    """A placer whose ranks have all worked for a while, with much left to do."""

    def __init__(self, run, *, job_tokens=0, **cluster):
        job = job_of(**cluster)
        self.history = ExpertHistory(run, job.cluster, MODEL, may_keep=True)
        self.progress = Count("work", 1_000_000, done=1)
        self.placer = ExpertPlacer(self.history, job, MODEL, self.progress, job_tokens=job_tokens)
        self.num_ranks = job.cluster.num_ranks
        self.placer.step(0)
        time.sleep(0.01)  # time in which something was done says how much is left
        self.so_far = {phase: np.zeros((1, 6), np.int64) for phase in COUNTS}

    def look(self, counts):
        """All ranks together have counted this since the last look; returns where experts are to be."""
        self.placer.step(1_000_000)
        assert self.placer.should_count()
        assert not self.placer.should_count()
        for phase in counts:
            self.so_far[phase] = self.so_far[phase] + np.array(counts[phase]) // self.num_ranks
        number = len(self.history.of_role["both" if "both" in self.history.of_role else "decode"]) - 1
        for rank in range(self.num_ranks):
            so_far = {phase: total.tolist() for phase, total in self.so_far.items()}
            self.placer.add_counts(rank, told(so_far, number))
        deadline = time.monotonic() + 120
        while self.placer._placing is not None and not self.placer._placing.done():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self.taken()

    def taken(self):
        """Where experts are to be, by role; all ranks of a group are told the same, and go there."""
        ranks_of_role = (
            {"both": [0, 1, 2, 3]} if "both" in self.history.of_role else {"prefill": [0, 1], "decode": [2, 3]}
        )
        slots_of_rank = self.placer.take_placed(ranks_of_role)
        for rank in slots_of_rank:
            self.placer.moved(rank, 0.0)
        taken = {role: [slots_of_rank.get(rank) for rank in ranks] for role, ranks in ranks_of_role.items()}
        assert all(slots == [slots[0]] * len(slots) for slots in taken.values())
        return {role: slots[0] for role, slots in taken.items() if slots[0] is not None}


def load_of_ranks(slots, counts, num_ranks=2):
    load = np.array(counts[0])[slots.expert_of_slot[0]] * np.array(slots.share_of_slot[0])
    return load.reshape(num_ranks, -1).sum(axis=1)


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """Where experts are after two looks at two groups of two ranks, and the file."""
    run = RunDir(tmp_path_factory.mktemp("placed"))
    placer = Placer(run, **APART)
    assert placer.look(COUNTS) == {}
    return placer.look(COUNTS), read_expert_tables(run)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_ranks_are_balanced_for_the_tokens_of_their_own_phase(apart, role):
    slots, _ = apart
    total = np.array(COUNTS[role]).sum()
    # two redundant slots can level any two ranks
    assert load_of_ranks(slots[role], COUNTS[role]) == pytest.approx([total / 2, total / 2], rel=1e-3)


def test_ranks_get_the_shares_that_make_them_even(apart):
    slots, tables = apart
    for role, table in tables.items():
        assert slots[role].expert_of_slot == table.expert_of_slot.tolist()
        assert slots[role].share_of_slot == table.share_of_slot.tolist()
        assert slots[role].placement == 1
    shares = np.concatenate([np.array(slots[role].share_of_slot[0]) for role in tables])
    assert not np.isin(shares.round(6), [0.0, 0.5, 1.0]).all(), "even shares would do: the test shows nothing"


def test_ranks_that_do_both_are_placed_for_the_sum():
    loads = {phase: np.array(counts) for phase, counts in COUNTS.items()}
    assert group_loads(loads, ["both"])["both"].tolist() == [[6300, 5100, 200, 300, 5100, 7000]]
    apart = group_loads(loads, ["prefill", "decode"])
    assert {group: load.tolist() for group, load in apart.items()} == COUNTS


def test_experts_move_only_when_new_tokens_say_the_same(tmp_path):
    """A placement made for one look's tokens has to be better for the next look's, too."""
    even = {"prefill": [[2000] * 6], "decode": [[0] * 6]}
    placer = Placer(RunDir(tmp_path), prefill_ranks=2, redundant_experts=2)
    assert placer.look({**even, "prefill": [[4000, 4000, 4000, 0, 0, 0]]}) == {}
    assert placer.look(even) == {}
    assert len(placer.history.of_role["both"]) == 1
    skewed = {**even, "prefill": [[4000, 4000, 4000, 100, 100, 100]]}
    (moved,) = filter(None, [placer.look(skewed) for _ in range(2)])
    assert moved["both"].placement == 1
    assert load_of_ranks(moved["both"], skewed["prefill"]).max() < 0.7 * 12300
    # where they are they stay, as long as loads do
    for _ in range(12):
        placer.look(skewed)  # what was counted before is forgotten
    for _ in range(3):
        assert placer.look(skewed) == {}
    # and go elsewhere when these change
    moves = [placer.look({**even, "prefill": [[100, 5000, 100, 5000, 100, 5000]]}) for _ in range(12)]
    assert any(moves)
    assert placer.history.of_role["both"][-1].made_by == "loads"
    busiest = load_of_ranks(placer.history.slots("both"), [[100, 5000, 100, 5000, 100, 5000]]).max()
    assert busiest < 0.7 * 15300


def test_differences_that_chance_explains_move_nothing(tmp_path):
    none = {"decode": [[0] * 6]}
    placer = Placer(RunDir(tmp_path / "few"), prefill_ranks=2)
    for _ in range(2):
        assert placer.look({**none, "prefill": [[30, 20, 30, 20, 20, 20]]}) == {}
    placer = Placer(RunDir(tmp_path / "even"), prefill_ranks=2)
    draw = np.random.default_rng(0)
    for _ in range(20):
        assert placer.look({**none, "prefill": [draw.multinomial(12_000, [1 / 6] * 6).tolist()]}) == {}


def test_experts_stay_where_moving_costs_more_than_it_saves():
    before = ExpertTables.in_order("both", (1,), 4, 4, 2).with_load(np.array([[3.0, 3.0, 1.0, 1.0]]))
    after = before.with_slots(np.array([[0, 2, 1, 3]]), np.ones((1, 4)), num_nodes=1)
    proposal = Proposal(after, before=1.5, gain=0.5)
    costs = MoveCosts(expert_bytes=1 << 30)  # each rank gets one: a second
    assert not costs.pays(before, proposal, left_s=10.0)
    assert costs.pays(before, proposal, left_s=20.0)
    costs.start(before, after)
    costs.moved(0.01)
    costs.moved(0.1)  # the slowest says how long it takes
    assert costs.pays(before, proposal, left_s=2.0)
    assert not costs.pays(before, proposal, left_s=1.0)


def test_a_calibration_places_experts_before_anything_runs(tmp_path):
    job, history = job_of(**APART), Placer(RunDir(tmp_path), **APART).history
    placer = ExpertPlacer(history, job, MODEL, Count("work", 9), job_tokens=0)
    assert placer.start_calibration([0, 1])
    placer.calibrated(0, COUNTS["prefill"])
    assert placer.take_placed({}) == {}
    placer.calibrated(1, COUNTS["prefill"])
    slots = placer.take_placed({"prefill": [0, 1], "decode": [2, 3]})
    # nothing was decoded yet: what prompts ask for is all that is known
    for rank in range(4):
        assert load_of_ranks(slots[rank], COUNTS["prefill"]) == pytest.approx([6000, 6000], rel=1e-3)
        assert placer.is_preparing
        placer.moved(rank, 0.1)
    assert not placer.is_preparing
    assert history.of_role["decode"][-1].made_by == "calibration"
    assert history.num_placed == 2
    assert not placer.start_calibration([0, 1])


def test_a_calibration_in_which_ranks_die_is_not_tried_again(tmp_path):
    job, history = job_of(prefill_ranks=2), Placer(RunDir(tmp_path), prefill_ranks=2).history
    placer = ExpertPlacer(history, job, MODEL, Count("work", 9), job_tokens=0)
    assert placer.start_calibration([0, 1])
    placer.calibrated(0, COUNTS["prefill"])
    assert placer.is_preparing
    placer.ranks_died()
    assert not placer.is_preparing
    assert not placer.start_calibration([0, 1])


def test_who_starts_later_begins_with_the_table_and_without_calibration(apart, tmp_path):
    run = RunDir(tmp_path)
    placer = Placer(run, **APART)
    placer.look(COUNTS)
    slots = placer.look(COUNTS)
    later = Placer(run, **APART)
    assert not later.placer.start_calibration([0, 1])
    assert later.history.slots("decode") == replace_number(slots["decode"], 0)
    # with another number of ranks it fits none of them
    assert Placer(run, **{**APART, "decode_ranks": 4}).history.slots("decode") is None


def replace_number(slots, number):
    return type(slots)(slots.expert_of_slot, slots.share_of_slot, number)


def test_copies_stay_on_a_node_where_router_groups_divide_by_nodes(tmp_path):
    """Four ranks on two hosts, six experts in two groups of the router: a group's copies are on one host."""
    for folder, cluster, hosts in (("found", {}, ["a", "a", "b", "b"]), ("said", {"nodes": 2}, ["a"] * 4)):
        placer = Placer(RunDir(tmp_path / folder), prefill_ranks=4, redundant_experts=2, **cluster)
        placer.history.ranks_loaded({"both": hosts})
        placer.look(COUNTS)
        placer.look(COUNTS)
        table = placer.history.current("both")
        assert table.num_nodes == 2
        groups = [set(of_host // 3) for of_host in table.expert_of_slot.reshape(2, -1)]
        assert sorted(map(len, groups)) == [1, 1]
        assert read_expert_tables(RunDir(tmp_path / folder))["both"].num_nodes == 2


@pytest.mark.parametrize(
    ("hosts", "count"), [("aabb", 2), ("abab", 1), ("aaab", 1), ("a", 1), ("abc", 3), ("aabbcc", 3)]
)
def test_nodes_are_equal_parts_of_a_group_in_the_order_of_its_ranks(hosts, count):
    assert num_nodes(list(hosts)) == count


def test_counts_begin_anew_with_each_placement_and_each_start():
    loads = ExpertLoads({"both": 2}, tokens=1e12, topk=1)
    for counts, placement in ((10, 0), (30, 0), (5, 1), (7, 1)):
        loads.take(0, told({"prefill": [[counts, counts]], "decode": [[0, 0]]}, placement))
    assert loads.window()["both"].tolist() == [[37, 37]]
    loads.ranks_died()
    loads.take(0, told({"prefill": [[2, 2]], "decode": [[0, 0]]}, 1))
    assert loads.window()["both"].tolist() == [[39, 39]]


def test_earlier_tokens_count_less_and_each_phase_forgets_its_own():
    loads = ExpertLoads({"prefill": 2, "decode": 2}, tokens=100, topk=1)
    loads.take_calibration(np.array([[50.0, 50.0]]))
    decode, _ = loads.of_groups()["decode"]
    assert decode[0, 0] == decode[0, 1]
    loads.take(0, told({"prefill": [[0, 0]], "decode": [[0, 4000]]}))
    prefill, decode = (loads.of_groups()[group][0][0] for group in ("prefill", "decode"))
    assert prefill[0] == prefill[1]
    assert decode[0] == 0
    loads.take(0, told({"prefill": [[0, 4000]], "decode": [[0, 4000]]}))
    prefill, _ = loads.of_groups()["prefill"]
    assert prefill[0, 0] / prefill.sum() < 0.001


def test_ranks_are_asked_by_the_tokens_that_they_have_run(tmp_path):
    placer = Placer(RunDir(tmp_path), prefill_ranks=2, job_tokens=10**6).placer
    interval = 10**6 // NUM_CHECKS
    placer.step(interval - 1)
    assert not placer.should_count()
    placer.step(2)
    assert placer.should_count()
