"""Experts placed before the first request and while ranks work: what ranks measure, and outputs that stay the same."""

from __future__ import annotations

import functools
import json
import random

import numpy as np
import pytest

from batchinfer.controller.experts import proposals
from batchinfer.data.expert_tables import read_expert_tables
from batchinfer.rundir import RunDir
from support.jobs import batchinfer, output_bytes, write_job, write_shard
from support.paths import RANDOM_MODEL, SAMPLE_MODEL, SAMPLE_PROMPTS
from support.random_model import make_random_twin, skew_experts

# measured rows by layer, and promised rows by the tokens that all ranks sent and the shares of the slots
BY_LAYER = """
    WITH asked AS (
        SELECT placement, phase AS ran, layer, expert, sum(tokens) AS tokens FROM experts GROUP BY ALL
    ),
    promises AS (
        SELECT rank + CASE WHEN phase = 'decode' THEN (SELECT max(prefill_ranks) FROM nodes) ELSE 0 END AS rank,
               placement, ran AS phase, layer, sum(share * asked.tokens) AS promised
        FROM placements AS slots JOIN asked USING (placement, layer, expert)
        WHERE slots.phase IN ('both', ran) GROUP BY ALL
    )
    SELECT rank, placement, phase, layer, rows, promised
    FROM expert_rows JOIN promises USING (rank, placement, phase, layer)
"""
LAYOUTS = {
    "2": {"prefill_ranks": 2},
    "2+2": {"mode": "disaggregated", "prefill_ranks": 2, "decode_ranks": 2},
}


def query(run, sql):
    return json.loads(batchinfer("report", run, "--json", "--sql", sql).out)


def busiest_by_mean(run, where="true"):
    """Layer by layer, phase by phase and placement by placement, weighted by rows."""
    by = "GROUP BY placement, phase, layer"
    groups = f"SELECT max(rows) AS busiest, avg(rows) AS mean FROM ({BY_LAYER}) WHERE {where} {by}"
    return query(run, f"SELECT sum(busiest) / sum(mean) AS ratio FROM ({groups})")[0]["ratio"]


def furthest_from_promise(run):
    """Return the largest difference of measured and promised rows of any rank and phase, as a share of the promise."""
    ranks = f"SELECT sum(rows) / sum(promised) AS ratio FROM ({BY_LAYER}) GROUP BY rank, phase HAVING sum(promised) > 0"
    return query(run, f"SELECT max(abs(ratio - 1)) AS off FROM ({ranks})")[0]["off"]


def job_of_sample(folder, name, model, **cluster):
    return write_job(
        folder,
        name=f"{name}.toml",
        input={"files": [f"{SAMPLE_PROMPTS}/*.parquet"], "prompt": None, "id": "id", "messages": "messages"},
        output={"dir": name},
        model={"path": str(model)},
        sampling={"max_tokens": 32},
        cluster=cluster,
    )


def ran(path):
    """A job with bad rows has run to its end; returns what it said and its run folder."""
    ended = batchinfer("run", path)
    assert ended.code in (0, 3), ended.err
    return ended.err, path.parent / path.stem


@pytest.fixture(scope="module")
def skewed_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("skewed") / "model"
    return skew_experts(make_random_twin(SAMPLE_MODEL, folder))


@pytest.fixture(scope="module", params=[pytest.param("sample", marks=pytest.mark.slow), "skewed"])
def unplaced(request, tmp_path_factory, skewed_model):
    """A folder, a model, and its job of one unit on two ranks whose experts are left in order."""
    folder = tmp_path_factory.mktemp("unplaced")
    model = SAMPLE_MODEL if request.param == "sample" else skewed_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proposals, "START", 10.0)
        said, run = ran(job_of_sample(folder, "unplaced", model, prefill_ranks=2, redundant_experts=8))
    assert "experts placed by" not in said
    return folder, model, run


KINDS = ([11, 12, 13, 14, 15, 16], [900, 910, 920, 930, 940, 950])  # tokens of two kinds of prompts


@pytest.fixture(scope="module")
def two_kinds(tmp_path_factory):
    """A folder with prompts of two kinds, one after the other in the plan's order, and their job on one rank."""
    folder, draw = tmp_path_factory.mktemp("kinds"), random.Random(0)
    prompts = [draw.choices(kind, k=120) for kind in KINDS for _ in range(90)]
    write_shard(folder / "prompts" / "part-0.parquet", {"tokens": prompts})
    return folder, ran(job_of_kinds(folder, "one"))[1]


@pytest.fixture(scope="module")
def run_of_layout(two_kinds):
    """Return what the job of two kinds of prompts said with a layout of ranks, and its run: once for all tests."""
    small = {"prefill_tokens": 128, "decode_requests": 16, "redundant_experts": 4}
    return functools.cache(
        lambda layout: ran(job_of_kinds(two_kinds[0], f"kinds-{layout}", **LAYOUTS[layout], **small))
    )


def job_of_kinds(folder, name, **cluster):
    return write_job(
        folder,
        name=f"{name}.toml",
        input={"prompt": None, "token_ids": "tokens"},
        output={"dir": name},
        model={"path": str(RANDOM_MODEL)},
        sampling={"max_tokens": 3},
        cluster=cluster,
    )


@pytest.mark.parametrize(
    "layout",
    ["2", *(pytest.param(layout, marks=pytest.mark.all) for layout in LAYOUTS if layout != "2")],  # make test: 2
)
def test_experts_move_again_when_other_prompts_come_and_outputs_stay_the_same(two_kinds, run_of_layout, layout):
    _, alone = two_kinds
    said, run = run_of_layout(layout)
    assert output_bytes(run) == output_bytes(alone)
    made_by = query(run, "SELECT DISTINCT phase, placement, made_by FROM placements ORDER BY phase, placement")
    of_prefill = [row["made_by"] for row in made_by if row["phase"] in ("both", "prefill")]
    assert of_prefill[:2] == ["order", "calibration"]
    assert "loads" in of_prefill[2:]
    assert said.count("placed by the loads measured") >= 1
    assert furthest_from_promise(run) <= 0.02
    # rows of the calibration are of no step
    (rows,) = query(
        run, "SELECT (SELECT sum(expert_rows) FROM steps) AS of_steps, (SELECT sum(tokens) FROM experts) AS routed"
    )
    assert rows["of_steps"] == rows["routed"]
    # the promised rows that the run has written are those
    same_rows = f"expert_rows JOIN ({BY_LAYER}) USING (rank, placement, phase, layer)"
    assert query(run, f"SELECT max(abs(promised_rows - promised)) AS off FROM {same_rows}")[0]["off"] < 1e-6
    # nothing ran before the calibration's placement, in order
    assert query(run, "SELECT count(*) AS n FROM steps WHERE placement = 0")[0]["n"] == 0
    # each placement was in force for steps that follow each other, and the steps say which
    (steps,) = query(
        run,
        """SELECT bool_and(placement >= before) AS rise, max(placement) AS last FROM (
        SELECT placement, lag(placement, 1, 0) OVER (PARTITION BY rank ORDER BY step) AS before FROM steps)""",
    )
    assert steps["rise"]
    assert steps["last"] == max(row["placement"] for row in made_by)
    (node,) = query(run, "SELECT placements FROM nodes")
    assert node["placements"] == sum(row["made_by"] in ("calibration", "loads") for row in made_by)
    # who goes on later begins where the last ones were
    tables = read_expert_tables(RunDir(run))
    assert set(tables) == ({"both"} if layout == "2" else {"prefill", "decode"})
    for phase, table in tables.items():
        last = max(row["placement"] for row in made_by if row["phase"] == phase)
        held = query(
            run, f"SELECT expert FROM placements WHERE phase = '{phase}' AND placement = {last} ORDER BY layer, slot"
        )
        assert [row["expert"] for row in held] == table.expert_of_slot.ravel().tolist()


@pytest.mark.all  # make test: experts move again, above
def test_the_second_kind_of_prompts_is_balanced_again(run_of_layout):
    """Under the last placement the busiest rank has less to do than under the one before it came."""
    _, run = run_of_layout("2")
    last = query(run, "SELECT max(placement) AS n FROM placements")[0]["n"]
    assert busiest_by_mean(run, f"placement = {last} AND phase = 'prefill'") <= 1.1


def test_a_plan_keeps_copies_on_nodes_where_the_router_s_groups_divide(two_kinds):
    folder, alone = two_kinds
    path = job_of_kinds(folder, "nodes", prefill_ranks=4, redundant_experts=4, nodes=2)
    planned = batchinfer("plan", path, "--expert-loads", alone)
    assert planned.code == 0, planned.err
    assert "copies of an expert on one of 2 nodes" in planned.err
    rows = read_expert_tables(RunDir(folder / "nodes"))["both"]
    nodes = np.arange(rows.expert_of_slot.shape[1]) // (rows.expert_of_slot.shape[1] // 2)
    for experts in rows.expert_of_slot:
        groups = [set(experts[nodes == node] // 4) for node in range(2)]  # four groups of four experts
        assert [len(found) for found in groups] == [2, 2]
        assert not groups[0] & groups[1]
    _, run = ran(path)
    assert output_bytes(run) == output_bytes(alone)
    assert query(run, "SELECT DISTINCT node FROM placements WHERE placement = 0 ORDER BY node") == [
        {"node": 0},
        {"node": 1},
    ]
