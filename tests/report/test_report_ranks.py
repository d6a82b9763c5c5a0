"""The report of runs with several ranks: communication, replicated work, and what each rank did."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchinfer.data.parquet import read_rows
from batchinfer.data.schemas.internal import RESULTS
from batchinfer.report.panel import panel as panel_parts
from batchinfer.report.read import read_report
from batchinfer.report.terminal import drawn
from batchinfer.run.store.folder import FolderStorage
from batchinfer.run.units import result_files
from batchinfer.run.units.claims import UnitClaims
from batchinfer.rundir import RunDir
from support.jobs import batchinfer, outputs, write_job, write_shard
from support.runs import request, session, step, write_run


def panel(run: Path) -> list[str]:
    return drawn(*panel_parts(read_report(run))).splitlines()


def rank_section(run: Path) -> list[str]:
    """The lines of the section Ranks, its title first, blanks squeezed; empty when there is none."""
    lines = panel(run)
    assert max(map(len, lines)) <= 80
    starts = [index for index, line in enumerate(lines) if line.startswith("Ranks")]
    if not starts:
        return []
    end = next((i for i in range(starts[0] + 1, len(lines)) if not lines[i].startswith(" ")), len(lines))
    return [" ".join(line.split()) for line in lines[starts[0] : end]]


def disaggregated(name: str, prefill: int, decode: int, **more: Any) -> dict[str, Any]:
    group = {"mode": "disaggregated", "prefill_ranks": prefill, "decode_ranks": decode}
    return session(name, 0, 100, ranks=prefill + decode, prefill_s=1, **group, **more)


# ---- communication


def test_waiting_and_hidden_shares_are_taken_over_the_communication_of_all_steps(tmp_path):
    # rank 0  exchange [--------------------)  3.0 s, of these 1.0 s before rank 1 had sent; 1.5 s while it computed
    # rank 1  exchange [------------)          1.8 s, of these 0.6 s before rank 0 had sent; 0.5 s while it computed
    steps = [
        step("a", "prefill", 5, new=9, cached=0, output=1, comm_s=3.0, wait_comm_s=1.0, hidden_comm_s=1.5),
        step("a", "prefill", 5, new=9, cached=0, output=1, rank=1, comm_s=1.8, wait_comm_s=0.6, hidden_comm_s=0.5),
        step("a", "decode", 1, new=1, cached=0, output=1, rank=1),
    ]
    run = write_run(tmp_path / "r", steps=steps, nodes=[session("a", 0, 9, ranks=2, prefill_s=1)])
    metrics = read_report(run).values
    assert metrics["hidden_comm_share"] == pytest.approx(2.0 / 3.2)
    assert metrics["wait_comm_share"] == pytest.approx(1.6 / 4.8)
    lines = [" ".join(line.split()) for line in panel(run)]
    assert "communication, waiting 33.3 % of 4.8 s, for late ranks" in lines
    assert "communication hidden 62.5 % of 3.2 s of moving" in lines


def test_overlap_is_told_of_prefill_and_decode_apart(tmp_path):
    moving = {"comm_s": 2.0, "wait_comm_s": 1.0}
    steps = [
        step("a", "prefill", 5, new=9, cached=0, output=1, micro_batches=2, **moving, hidden_comm_s=0.5),
        step("a", "prefill", 5, new=9, cached=0, output=1, micro_batches=1, **moving, hidden_comm_s=0.0),
        *(step("a", "decode", 1, new=1, cached=0, output=1, **moving, hidden_comm_s=0.0) for _ in range(3)),
    ]
    run = write_run(tmp_path / "r", steps=steps, nodes=[session("a", 0, 9, ranks=2, prefill_s=1)])
    values = read_report(run).values
    assert (values["overlap_prefill"], values["hidden_comm_prefill"]) == (0.5, 0.25)
    assert (values["overlap_decode"], values["hidden_comm_decode"]) == (0.0, 0.0)
    lines = [" ".join(line.split()) for line in panel(run)]
    assert "two micro-batches, prefill 50.0 % of steps, 25.0 % hidden" in lines
    assert "two micro-batches, decode 0.0 % of steps, 0.0 % hidden" in lines


def test_where_waiting_is_not_told_from_moving_neither_share_is_known(tmp_path):
    unknown = {"comm_s": 2.0, "wait_comm_s": None, "hidden_comm_s": None, "exposed_comm_s": 1.0}
    steps = [
        step("a", "prefill", 5, new=9, cached=0, output=1, **unknown),
        step("a", "decode", 5, new=9, cached=0, output=1),
    ]
    values = read_report(write_run(tmp_path / "r", steps=steps)).values
    assert (values["comm_s"], values["wait_comm_share"], values["hidden_comm_share"]) == (2.0, None, None)
    assert (values["overlap_prefill"], values["hidden_comm_prefill"], values["overlap_decode"]) == (0.0, None, None)


def test_short_communication_is_told_apart_from_none(tmp_path):
    steps = [step("a", "decode", 1, new=1, cached=0, output=1, comm_s=0.0021, hidden_comm_s=0.0)]
    (line,) = [line for line in panel(write_run(tmp_path / "r", steps=steps)) if "communication hidden" in line]
    assert line.split()[2:] == ["0.0", "%", "of", "0.0021", "s", "of", "moving"]


def test_without_communication_there_is_no_share(tmp_path):
    run = write_run(tmp_path / "r", steps=[step("a", "decode", 1, new=1, cached=0, output=1)])
    assert read_report(run).values["hidden_comm_share"] is None
    assert any(
        line.split()[2:] == ["–", "none,", "or", "not", "told", "from", "waiting"]
        for line in panel(run)
        if "hidden" in line
    )


# ---- replicated and wasted


def test_what_is_computed_twice_on_purpose_is_not_wasted(tmp_path):
    # a prefix of 10 tokens is computed on both ranks, so that their requests need not wait for each other
    #   rank 0  row 0  [ prefix 10 )[ 4 )        computed 14
    #   rank 1  row 1  [ prefix 10 )[ 6 )        computed 16; the plan has the prefix cached: 10 replicated
    #   rank 1  row 2  [ prefix 10 )[ 5 )        computed 5, the prefix is in memory
    # rank 0 began with 7 tokens of another request before it died
    rows = [
        request(0, 14, 3, 0, 1),
        request(1, 16, 3, 0, 1, cached_memory_tokens=10, replicated_tokens=10),
        request(2, 15, 3, 0, 1, cached_memory_tokens=10),
    ]
    steps = [
        step("a", "prefill", 1, new=7, cached=0, output=0, rank=0),
        step("a", "prefill", 1, new=14, cached=0, output=1, rank=0),
        step("a", "prefill", 1, new=21, cached=10, output=2, rank=1),
        step("a", "decode", 1, new=2, cached=0, output=2, rank=0),
        step("a", "decode", 1, new=4, cached=0, output=4, rank=1),
    ]
    run = write_run(tmp_path / "r", requests=rows, steps=steps, distinct_tokens=25, replicated_tokens=10)
    metrics = read_report(run).values
    assert metrics["replicated_tokens"] == 10
    assert metrics["wasted_tokens"] == 7
    assert metrics["cached_tokens"] == metrics["optimal_cached_tokens"]  # as planned, however many ranks there are


@pytest.fixture
def planned(tmp_path) -> tuple[Path, RunDir]:
    """A planned job of three rows, of which the last is a duplicate of the first."""
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": ["What is 2 + 2?", "What is 2 + 3?", "What is 2 + 2?"]})
    job = write_job(tmp_path)
    assert batchinfer("plan", job).code == 0
    return job, RunDir(tmp_path / "run")


def write_results(run: RunDir, replicated_tokens: dict[int, int], failed_row: int | None = None) -> None:
    """Results by hand for every planned request, as a rank would write them; replicated tokens by row."""
    rows = [
        {
            **{name: item[name] for name in ("shard", "row", "sample", "unit")},
            "status": "error" if item["row"] == failed_row else "ok",
            "text": "4",
            "token_ids": [4],
            "finish_reason": "length",
            "prompt_tokens": len(item["token_ids"]),
            "cached_memory_tokens": 0,
            "cached_disk_tokens": 0,
            "replicated_tokens": replicated_tokens[item["row"]],
            "completion_tokens": 1,
            "kv_tokens_sum": len(item["token_ids"]),
        }
        for item in read_rows(run.requests)
    ]
    with UnitClaims(FolderStorage(run)) as claims:
        for unit in {row["unit"] for row in rows}:
            claim = claims.try_claim(unit)
            mine = [row for row in rows if row["unit"] == unit]
            result_files.write_results(claim.folder, 0, pa.Table.from_pylist(mine, schema=RESULTS.schema))
            claims.complete(claim)


def test_finish_hands_replicated_tokens_on_to_the_statistics_and_counts_them_once(planned):
    job, run = planned
    write_results(run, {0: 5, 1: 3})
    assert batchinfer("finish", job).code == 0
    requests = read_rows(run.stats_file("requests"))
    assert [row["replicated_tokens"] for row in requests] == [5, 3, 0]
    assert read_report(run.root).values["replicated_tokens"] == 8
    # a second finish writes new prices and nothing else
    assert batchinfer("finish", job).code == 0
    assert read_report(run.root).values["replicated_tokens"] == 8
    assert "replicated_tokens" not in outputs(run.root)["a.parquet"][0]


def test_rows_without_a_result_and_failed_rows_have_nothing_replicated(planned):
    job, run = planned
    write_results(run, {0: 5, 1: 3}, failed_row=1)
    assert batchinfer("finish", job).code == 3
    assert read_report(run.root).values["replicated_tokens"] == 5


def test_a_run_that_is_finished_early_counts_no_replicated_tokens(planned):
    job, run = planned
    assert batchinfer("finish", job, "--allow-partial").code == 3
    assert {row["replicated_tokens"] for row in read_rows(run.stats_file("requests"))} == {0}
    assert read_report(run.root).values["replicated_tokens"] == 0


# ---- ranks


def test_two_colocated_ranks(tmp_path):
    steps = [
        step("a", "prefill", 2.0, new=300, cached=50, output=4, rank=0, expert_rows=1218, attention_work=6e4),
        step("a", "prefill", 2.0, new=280, cached=0, output=4, rank=1, expert_rows=1102, attention_work=4e4),
        step("a", "decode", 0.5, new=8, cached=0, output=8, rank=0, expert_rows=30, num_requests=8),
        step("a", "decode", 0.25, new=7, cached=0, output=7, rank=1, expert_rows=50, num_requests=7),
    ]
    run = write_run(tmp_path / "r", steps=steps, nodes=[session("a", 0, 9, ranks=2, prefill_s=1)])
    assert rank_section(run) == [
        "Ranks prefilled decoded busy s",
        "rank 0 prefill + decode 300 8 2.50",
        "rank 1 prefill + decode 280 7 2.25",
        "expert rows, max / mean 1.04",  # 1,248 and 1,152: 1,248 / 1,200
        "prefill tokens, max / mean 1.034",  # 300 and 280: 300 / 290
        "prefill attention, max / mean 1.200",  # 6e4 and 4e4
        "decode requests, max / mean 1.067 at best 1.067",  # 8 and 7: 8 / 7.5
        "decode turns without work 0.0 %",
        "tail 0 s with an idle decode rank",
    ]


def test_two_prefill_ranks_apart_from_one_decode_rank(tmp_path):
    # ranks 0, 1  prefill    the experts are spread over these two: 600 / 500
    # rank 2      decode     holds all experts itself
    steps = [
        step("a", "prefill", 2.0, new=150, cached=0, output=4, rank=0, expert_rows=600),
        step("a", "prefill", 2.0, new=100, cached=0, output=4, rank=1, expert_rows=400),
        step("a", "decode", 3.0, new=40, cached=0, output=40, rank=2, expert_rows=160),
    ]
    run = write_run(tmp_path / "r", steps=steps, nodes=[disaggregated("a", 2, 1)])
    assert rank_section(run) == [
        "Ranks prefilled decoded busy s",
        "rank 0 prefill 150 0 2.00",
        "rank 1 prefill 100 0 2.00",
        "rank 2 decode 0 40 3.00",
        "expert rows, max / mean 1.20 prefill ranks",
        "prefill tokens, max / mean 1.200",  # 150 and 100: 150 / 125
    ]


def test_prefill_and_decode_ranks_are_balanced_apart(tmp_path):
    work = [("prefill", 600), ("prefill", 400), ("decode", 10), ("decode", 10), ("decode", 40)]
    steps = [
        step("a", kind, 1.0, new=1, cached=0, output=1, rank=rank, expert_rows=expert_rows)
        for rank, (kind, expert_rows) in enumerate(work)
    ]
    run = write_run(tmp_path / "r", steps=steps, nodes=[disaggregated("a", 2, 3)])
    assert rank_section(run)[6:8] == [
        "expert rows, max / mean 1.20 prefill ranks",
        "expert rows, max / mean 2.00 decode ranks",
    ]


def test_ranks_of_the_same_number_add_up_over_sessions(tmp_path):
    # the job began on two ranks and was finished on one
    steps = [
        step("a", "prefill", 2.0, new=300, cached=0, output=1, rank=0),
        step("a", "prefill", 2.0, new=200, cached=0, output=1, rank=1),
        step("b", "decode", 1.0, new=5, cached=0, output=5, rank=0),
    ]
    nodes = [session("a", 0, 9, ranks=2, prefill_s=1), session("b", 9, 19, prefill_s=10)]
    run = write_run(tmp_path / "r", steps=steps, nodes=nodes)
    assert rank_section(run) == [
        "Ranks prefilled decoded busy s",
        "rank 0 prefill + decode 300 5 3.00",
        "rank 1 prefill + decode 200 0 2.00",
        "expert rows, max / mean – no expert was used",
        "prefill tokens, max / mean 1.200",  # of the session on two ranks
    ]


def test_a_rank_without_a_step_is_shown_with_the_role_it_was_given(tmp_path):
    steps = [step("a", "prefill", 2.0, new=30, cached=0, output=4, rank=0, expert_rows=60)]
    run = write_run(tmp_path / "r", steps=steps, nodes=[disaggregated("a", 1, 1)])
    assert rank_section(run)[1:] == ["rank 0 prefill 30 0 2.00", "rank 1 decode 0 0 0.00"]


def test_ranks_that_never_ran_a_step_are_not_shown(tmp_path):
    # the first try failed while loading on four ranks
    nodes = [session("a", 0, 9, ranks=4, state="failed"), session("b", 9, 19, prefill_s=10)]
    run = write_run(tmp_path / "r", steps=[step("b", "prefill", 1.0, new=5, cached=0, output=1)], nodes=nodes)
    assert rank_section(run) == []


def test_two_machines_of_one_group_show_each_rank_once(tmp_path):
    nodes = [
        session(name, 0, 9, ranks=2, prefill_s=1, node=name, prefill_ranks=4, decode_ranks=4) for name in ("n1", "n2")
    ]
    steps = [
        step("n1", "prefill", 1.0, new=10, cached=0, output=1, rank=rank, expert_rows=10 + rank) for rank in range(4)
    ]
    section = rank_section(write_run(tmp_path / "r", steps=steps, nodes=nodes))
    assert [line.split()[1] for line in section[1:5]] == ["0", "1", "2", "3"]
    assert section[5:] == ["expert rows, max / mean 1.13", "prefill tokens, max / mean 1.000"]


def test_restarts_are_shown_when_there_were_some(tmp_path):
    steps = [step("a", "prefill", 1.0, new=5, cached=0, output=1, rank=rank, expert_rows=9) for rank in range(2)]
    nodes = [
        session("a", 0, 9, ranks=2, prefill_s=1, restarts=2),
        session("b", 9, 19, ranks=2, prefill_s=9, restarts=1),
        session("finish", 19, 20, ranks=0, command="finish"),
    ]
    run = write_run(tmp_path / "r", steps=steps, nodes=nodes)
    assert rank_section(run)[-1] == "restarts 3 after a rank died"


def test_one_rank_has_no_lines_of_its_own(tmp_path):
    steps = [step("a", "prefill", 1.0, new=5, cached=0, output=1)]
    assert rank_section(write_run(tmp_path / "r", steps=steps, nodes=[session("a", 0, 9, prefill_s=1)])) == []
    died = session("a", 0, 9, prefill_s=1, restarts=1)
    section = rank_section(write_run(tmp_path / "died", steps=steps, nodes=[died]))
    assert section == ["Ranks", "restarts 1 after a rank died"]


def test_lines_of_many_busy_ranks_are_aligned(tmp_path):
    busy = {"new": 2_000_000_000, "cached": 0, "output": 2_000_000_000}
    steps = [
        step("a", kind, 1e9, rank=rank, expert_rows=10**15, **busy)
        for rank in range(0, 128, 9)
        for kind in ("prefill", "decode")
    ]
    run = write_run(tmp_path / "r", steps=steps * 9, nodes=[session("a", 0, 9, ranks=128, prefill_s=1)])
    lines = [line for line in panel(run) if line.startswith(("Ranks", "  rank"))]
    assert len(lines) == 1 + 128
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("seed", range(10))
def test_ranks_agree_with_a_plain_sum_over_steps(tmp_path, seed):
    draw = random.Random(seed)
    steps = [
        step(
            draw.choice("ab"),
            draw.choice(("prefill", "decode")),
            draw.randrange(1, 5),
            new=draw.randrange(100),
            cached=draw.randrange(100),
            output=draw.randrange(100),
            rank=draw.randrange(4),
            expert_rows=draw.randrange(1000),
        )
        for _ in range(40)
    ]
    run = write_run(tmp_path / "r", steps=steps)
    for found in read_report(run).ranks:
        mine = [row for row in steps if row["rank"] == found.rank]
        kinds = {row["kind"] for row in mine}
        assert found.role == " + ".join(kind for kind in ("prefill", "decode") if kind in kinds)
        assert found.prefill_tokens == sum(row["new_tokens"] for row in mine if row["kind"] == "prefill")
        assert found.output_tokens == sum(row["output_tokens"] for row in mine if row["kind"] == "decode")
        assert found.busy_s == sum(row["duration_s"] for row in mine)
        assert found.expert_rows == sum(row["expert_rows"] for row in mine)
