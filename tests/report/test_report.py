"""The figures of a report by SQL, their prices, and the views that they come from."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchinfer.records import ConfigError, ExitCode
from batchinfer.report.foreign_sql import run_query
from batchinfer.report.panel import panel as panel_parts
from batchinfer.report.price import margin
from batchinfer.report.read import Report, read_report
from batchinfer.report.terminal import drawn
from batchinfer.report.views import VIEWS, open_views
from support.runs import error_output, error_request, output, request, session, step, write_run

HOUR_S = 3600.0
# of `report --json`, by the design
CONTRACT = """
rows rows_ok rows_error input_tokens cached_tokens cache_hit_rate optimal_cached_tokens output_tokens
output_tokens_per_s_per_request mean_kv_tokens_per_output_token prefill_tokens_per_s_per_node
decode_tokens_per_s_per_node replicated_tokens wasted_tokens hidden_comm_share rows_per_s tokens_per_s
wall_s busy_s idle_s startup_s peak_nodes mean_nodes gpu_hours cost_usd revenue_usd cost_profit_margin gross_margin
"""
DAY_S = 24 * HOUR_S


def format_report(report: Report) -> str:
    return drawn(*panel_parts(report))


def query(run: Path, sql: str) -> list[tuple[Any, ...]]:
    return list(run_query([run], sql)[1])


# ---- figures


def test_a_worked_example_gives_every_figure(tmp_path):
    # seconds     980   1000      1100     1200      1255 1260 1270
    # plan         [------)                                            no rank
    # a (killed)           [--------)                                  one rank, first prefill at 1010
    # b                                      [-------------)           one rank, first prefill at 1206
    # finish                                           [--------)      no rank
    # spans        [----------------)        [------------------)      wall = 120 + 70
    run = write_run(
        tmp_path / "demo",
        requests=[
            request(0, 20, 5, 1020, 1024, kv_tokens_sum=115),  # 4 tokens in 4 s
            request(1, 20, 3, 1220, 1221, kv_tokens_sum=66, cached_memory_tokens=10, cached_disk_tokens=2),  # 2 in 1 s
            request(2, 20, 0, cached_duplicate_tokens=20, completion_tokens=5, first_token_s=None, finished_s=None),
            request(3, 8, 1, 1230, 1230, kv_tokens_sum=9, replicated_tokens=3),
            error_request(4),
        ],
        steps=[
            step("a", "prefill", 20, new=30, cached=10, output=2),
            step("a", "decode", 30, new=6, cached=0, output=6),
            step("b", "prefill", 10, new=12, cached=4, output=2),
            step("b", "decode", 10, new=5, cached=0, output=5),
        ],
        nodes=[
            session("plan", 980, 1000, ranks=0, command="plan"),
            session("a", 1000, 1100, prefill_s=1010, state="running"),
            session("b", 1200, 1260, prefill_s=1206),
            session("finish", 1255, 1270, ranks=0, command="finish"),
        ],
        distinct_tokens=28,
        replicated_tokens=3,
        gpu_hour=36.0,
        input_hit=100_000.0,
        input_miss=200_000.0,
        output=300_000.0,
    )
    metrics = read_report(run).values
    cost, revenue = 160 / 3600 * 36, 32 * 0.1 + 36 * 0.2 + 14 * 0.3
    assert {key: metrics[key] for key in CONTRACT.split()} == pytest.approx(
        {
            "rows": 5,
            "rows_ok": 4,
            "rows_error": 1,
            "input_tokens": 68,
            "cached_tokens": 32,  # 10 in memory, 2 on disk, 20 of the duplicate
            "cache_hit_rate": 32 / 68,
            "optimal_cached_tokens": 42,  # 68 - (28 - 2 that were on disk)
            "output_tokens": 14,
            "output_tokens_per_s_per_request": 1.5,  # mean of 4 / 4 and 2 / 1
            "mean_kv_tokens_per_output_token": 190 / 9,
            "prefill_tokens_per_s_per_node": 56 / 30,
            "decode_tokens_per_s_per_node": 11 / 40,
            "replicated_tokens": 3,
            "wasted_tokens": 8,  # 53 run; needed 36 prompt tokens and 9 - 3 output tokens, 3 replicated
            "hidden_comm_share": None,
            "rows_per_s": 5 / 190,
            "tokens_per_s": (68 + 14) / 190,
            "wall_s": 190,
            "busy_s": 70,
            "idle_s": 160 - 70 - 16,
            "startup_s": 16,
            "peak_nodes": 1,
            "mean_nodes": 1,
            "gpu_hours": 160 / 3600,
            "cost_usd": cost,
            "revenue_usd": revenue,
            "cost_profit_margin": (revenue - cost) / cost,
            "gross_margin": (revenue - cost) / revenue,
        }
    )
    for key in ("rows", "input_tokens", "cached_tokens", "optimal_cached_tokens", "wasted_tokens", "peak_nodes"):
        assert isinstance(metrics[key], int), key


def test_a_killed_session_lasts_until_the_last_step_that_is_known_of_its_own_ranks(tmp_path):
    # seconds      1000 1010     1030    1050   1060
    # recorded      [--------------)                 killed behind its last commit
    # rank 0             [-----------------)         from its journal
    # rank 1             [------------------------)  of another node, by its clock
    def shown(name, state, num_steps):
        group = {"prefill_ranks": 2, "decode_ranks": 2, "num_ranks": 1, "first_rank": 0}
        nodes = [session("a", 1000, 1030, prefill_s=1010, state=state, **group)]
        steps = [
            step("a", "prefill", 40, new=30, cached=0, output=2, start_s=1010.0),
            step("a", "prefill", 50, new=30, cached=0, output=2, start_s=1010.0, rank=1),
        ]
        report = read_report(write_run(tmp_path / name, nodes=nodes, steps=steps[:num_steps], gpu_hour=36.0))
        return {key: report.values[key] for key in ("wall_s", "startup_s", "busy_s", "idle_s", "cost_usd")}

    parts = {"startup_s": 10, "busy_s": 40, "idle_s": 0}
    assert shown("killed", "running", 1) == pytest.approx({"wall_s": 50, **parts, "cost_usd": 0.5})
    assert shown("elsewhere", "running", 2)["wall_s"] == 50
    assert shown("done", "done", 1)["wall_s"] == 30


def test_the_published_day_gives_the_published_figures(tmp_path):
    # 278 nodes for 18 hours and 73 for the other 6: (278 * 18 + 73 * 6) / 24 = 226.75
    nodes = [
        session(f"n{i}", 0, DAY_S if i < 73 else 18 * HOUR_S, ranks=8, prefill_s=0.0, node=f"n{i}") for i in range(278)
    ]
    # 608 requests of a billion prompt tokens each; 21 tokens/s each, 4,989 KV tokens per output token
    generated = 168_000_000_000 // 608
    requests = [
        request(
            i,
            1_000_000_000,
            generated,
            0.0,
            (generated - 1) / 21,
            cached_disk_tokens=562_500_000,
            kv_tokens_sum=4_989 * generated,
        )
        for i in range(608)
    ]
    # 95.5 nodes' ranks in prefill and 131.4 in decode, all day
    rank_day_s = 8 * DAY_S
    steps = [
        step("n0", "prefill", 95.5 * rank_day_s / 608, new=437_500_000, cached=562_500_000, output=1)
        for _ in range(608)
    ] + [step("n0", "decode", 131.4 * rank_day_s / 608, new=generated, cached=0, output=generated) for _ in range(608)]
    prices = {"gpu_hour": 2.0, "input_hit": 0.14, "input_miss": 0.55, "output": 2.19}
    metrics = read_report(write_run(tmp_path / "day", requests=requests, steps=steps, nodes=nodes, **prices)).values
    published = {
        "input_tokens": 608e9,
        "cached_tokens": 342e9,
        "cache_hit_rate": 0.563,
        "output_tokens": 168e9,
        "output_tokens_per_s_per_request": 21,
        "mean_kv_tokens_per_output_token": 4_989,
        "prefill_tokens_per_s_per_node": 73_700,
        "decode_tokens_per_s_per_node": 14_800,
        "peak_nodes": 278,
        "mean_nodes": 226.75,
        "gpu_hours": 43_536,
        "cost_usd": 87_072,
        "revenue_usd": 562_027,
        "cost_profit_margin": 5.45,
        "gross_margin": 0.845,
    }
    for key, figure in published.items():
        print(f"{key}: published {figure:,}, own {metrics[key]:,}")
        assert metrics[key] == pytest.approx(figure, rel=2e-3), key
    # what follows from the rounded tokens to the dollar
    assert metrics["cost_usd"] == pytest.approx(87_072, abs=0.5)
    assert metrics["revenue_usd"] == pytest.approx(562_100, abs=0.5)
    assert f"{metrics['cost_profit_margin']:.3f}, {metrics['gross_margin']:.4f}" == "5.456, 0.8451"
    panel = format_report(read_report(tmp_path / "day"))
    for words in ("87,072.00 $", "562,100.00 $", "545.6 %", "84.5 %", "226.75", "43,536.00 h"):
        assert words in " ".join(panel.split()), words


def test_nodes_of_several_ranks_add_up(tmp_path):
    # n1 [0, 100) and n2 [50, 100) with 4 ranks each; every rank is busy for 20 s after a start-up of 10 s
    nodes = [
        session("a", 0, 100, ranks=4, prefill_s=10, node="n1"),
        session("b", 50, 100, ranks=4, prefill_s=60, node="n2"),
    ]
    steps = [step(name, "prefill", 20, new=100, cached=0, output=1, rank=rank) for name in "ab" for rank in range(4)]
    metrics = read_report(write_run(tmp_path / "r", steps=steps, nodes=nodes)).values
    assert metrics["prefill_tokens_per_s_per_node"] == pytest.approx(4 * 100 / 20)
    assert metrics["mean_nodes"] == pytest.approx(1.5)
    assert metrics["peak_nodes"] == 2
    assert metrics["gpu_hours"] == pytest.approx(600 / 3600)
    # 6 ranks on average over 100 s
    assert metrics["busy_s"] == pytest.approx(8 * 20 / 6)
    assert metrics["startup_s"] == pytest.approx(8 * 10 / 6)
    assert metrics["busy_s"] + metrics["startup_s"] + metrics["idle_s"] == pytest.approx(100)


def test_two_sessions_on_one_host_are_one_node(tmp_path):
    nodes = [session("a", 0, 100, prefill_s=0), session("b", 0, 100, prefill_s=0)]
    steps = [step(name, "decode", 50, new=10, cached=0, output=10) for name in "ab"]
    metrics = read_report(write_run(tmp_path / "r", steps=steps, nodes=nodes)).values
    assert (metrics["peak_nodes"], metrics["mean_nodes"]) == (1, 1)
    assert metrics["decode_tokens_per_s_per_node"] == pytest.approx(2 * 10 / 50)


def test_a_rate_per_node_is_of_the_ranks_of_that_kind_on_nodes_that_hold_such(tmp_path):
    # ranks 0 to 5 of one group on three nodes:  n0 [prefill, prefill]   n1 [prefill, decode]   n2 [decode, decode]
    group = {"mode": "disaggregated", "prefill_ranks": 3, "decode_ranks": 3}
    nodes = [session(f"s{i}", 0, 100, ranks=2, node=f"n{i}", first_rank=2 * i) | group for i in range(3)]
    steps = [step("s0", "prefill", 10, new=100, cached=0, output=1, rank=rank) for rank in range(3)]
    steps += [step("s0", "decode", 20, new=80, cached=0, output=80, rank=rank) for rank in range(3, 6)]
    metrics = read_report(write_run(tmp_path / "r", steps=steps, nodes=nodes)).values
    assert (metrics["prefill_tokens_per_s_per_rank"], metrics["decode_tokens_per_s_per_rank"]) == (10, 4)
    assert (metrics["prefill_ranks_per_node"], metrics["decode_ranks_per_node"]) == (1.5, 1.5)
    assert (metrics["prefill_tokens_per_s_per_node"], metrics["decode_tokens_per_s_per_node"]) == (15, 6)


def test_a_rate_per_node_is_of_the_mean_number_of_ranks_where_nodes_differ(tmp_path):
    nodes = [session("a", 0, 100, ranks=4, node="n1"), session("b", 50, 100, ranks=1, node="n2")]
    steps = [step(name, "prefill", 10, new=100, cached=0, output=1) for name in "ab"]
    metrics = read_report(write_run(tmp_path / "r", steps=steps, nodes=nodes)).values
    assert metrics["prefill_ranks_per_node"] == pytest.approx((4 * 100 + 1 * 50) / 150)
    assert metrics["prefill_tokens_per_s_per_node"] == pytest.approx(10 * 3)
    assert metrics["decode_tokens_per_s_per_node"] is None


def test_nodes_that_follow_one_another_are_not_held_together(tmp_path):
    nodes = [session("a", 0, 50, node="n1"), session("b", 50, 90, node="n2"), session("c", 70, 70, node="n3")]
    metrics = read_report(write_run(tmp_path / "r", nodes=nodes)).values
    assert metrics["peak_nodes"] == 1
    assert metrics["mean_nodes"] == pytest.approx(1)


def test_the_same_command_once_more_on_a_finished_run_takes_no_time_of_the_run(tmp_path):
    """A session that computes later counts, and so does the finish after that session."""
    nodes = [
        session("plan", 0, 10, ranks=0, command="plan"),
        session("work", 10, 40),
        session("finish", 50, 55, ranks=0, command="finish"),
        session("again", 60, 70, ranks=0, command="run"),
    ]
    assert read_report(write_run(tmp_path / "a", nodes=nodes)).values["wall_s"] == 45
    nodes += [session("damage", 80, 90), session("second", 95, 99, ranks=0, command="finish")]
    assert read_report(write_run(tmp_path / "b", nodes=nodes)).values["wall_s"] == 45 + 10 + 4


def test_a_session_without_prefill_is_all_startup(tmp_path):
    metrics = read_report(write_run(tmp_path / "r", nodes=[session("a", 0, 30, state="failed")])).values
    assert (metrics["startup_s"], metrics["busy_s"], metrics["idle_s"]) == (30, 0, 0)


def test_a_clock_that_was_set_back_gives_no_negative_time(tmp_path):
    nodes = [session("a", 100, 40, prefill_s=90), session("b", 0, 50, prefill_s=70)]
    metrics = read_report(write_run(tmp_path / "r", nodes=nodes)).values
    assert metrics["wall_s"] == 50
    assert metrics["startup_s"] == 50
    assert metrics["gpu_hours"] == pytest.approx(50 / 3600)


@pytest.mark.parametrize(
    ("state", "start_s", "seconds", "outside_s"),
    [
        ("done", 100, 20, None),
        ("done", 99.5, 101, None),  # clocks of hosts may differ a little
        ("done", 40, 20, 60),
        ("done", 3700, 20, 3520),
        ("running", 3700, 20, None),  # killed: its end is a guess
        ("running", 40, 20, 60),
    ],
)
def test_steps_outside_their_session_are_a_warning(tmp_path, state, start_s, seconds, outside_s):
    steps = [step("a", "prefill", seconds, new=5, cached=0, output=1, start_s=start_s, rank=1)]
    run = write_run(tmp_path / "r", nodes=[session("a", 100, 200, ranks=2, prefill_s=100, state=state)], steps=steps)
    report = read_report(run)
    assert report.values["steps_outside_s"] == outside_s
    warning = f"warning: steps lie up to {outside_s or 0:,} s outside the time of their session"
    assert (warning in format_report(report)) == (outside_s is not None)


@pytest.mark.parametrize("seed", range(10))
def test_spans_agree_with_a_plain_count_of_seconds(tmp_path, seed):
    # whole seconds, so that everything can be counted second by second
    draw = random.Random(seed)
    nodes = []
    for index in range(12):
        start_s = draw.randrange(60)
        length_s, ranks = draw.randrange(1, 20), draw.randrange(3)
        host = f"n{draw.randrange(4)}"
        prefill_s = start_s + draw.randrange(length_s)
        nodes.append(session(f"s{index}", start_s, start_s + length_s, ranks=ranks, prefill_s=prefill_s, node=host))
    metrics = read_report(write_run(tmp_path / "r", nodes=nodes)).values

    def alive(second: int) -> list[dict[str, Any]]:
        return [node for node in nodes if node["start_s"] <= second < node["end_s"]]

    held = [{node["node"] for node in alive(second) if node["num_ranks"]} for second in range(80)]
    working_s = sum(map(bool, held))
    assert metrics["wall_s"] == sum(bool(alive(second)) for second in range(80))
    assert metrics["peak_nodes"] == max(map(len, held))
    assert metrics["mean_nodes"] == pytest.approx(sum(map(len, held)) / working_s)
    assert metrics["startup_s"] + metrics["idle_s"] == pytest.approx(working_s)


def test_an_empty_run_has_no_undefined_figures(tmp_path):
    metrics = read_report(write_run(tmp_path / "empty", gpu_hour=2.0, input_hit=1.0, input_miss=1.0, output=1.0)).values
    assert [metrics[key] for key in ("rows", "input_tokens", "wall_s", "busy_s", "gpu_hours", "cost_usd")] == [0] * 6
    assert metrics["revenue_usd"] == 0
    for key in (
        "rows_per_s",
        "tokens_per_s",
        "cache_hit_rate",
        "mean_nodes",
        "prefill_tokens_per_s_per_node",
        "cost_profit_margin",
        "gross_margin",
    ):
        assert metrics[key] is None, key
    assert all(value is None or math.isfinite(value) for value in metrics.values())
    assert "no node held ranks" in format_report(read_report(tmp_path / "empty"))


def test_a_run_of_error_rows_only(tmp_path):
    outputs = {"a.parquet": [error_output(0, "the prompt is null"), error_output(1, "the prompt is null")]}
    run = write_run(tmp_path / "r", requests=[error_request(0), error_request(1)], outputs=outputs)
    metrics = read_report(run).values
    assert (metrics["rows"], metrics["rows_ok"], metrics["rows_error"]) == (2, 0, 2)
    assert metrics["cache_hit_rate"] is None
    assert read_report(run).errors == (("the prompt is null", 2),)


def test_lost_steps_never_give_negative_waste(tmp_path):
    metrics = read_report(write_run(tmp_path / "r", requests=[request(0, 9, 3, 0, 1)])).values
    assert metrics["wasted_tokens"] == 0


# ---- prices


def test_prices_of_the_published_day():
    cost = margin.cost(226.75 * 8 * 24, 2.0)
    revenue = margin.revenue(342e9, 266e9, 168e9, input_hit=0.14, input_miss=0.55, output=2.19)
    assert cost == 87_072
    assert revenue == pytest.approx(562_027, rel=1e-3)
    money = margin.money(cost, revenue, output_tokens=168e9)
    assert money["cost_profit_margin"] == pytest.approx(5.45, abs=0.01)
    assert money["gross_margin"] == pytest.approx(0.845, abs=0.001)


def test_prices_that_are_not_known_or_zero_give_none():
    assert margin.cost(10, None) is None
    assert margin.revenue(1, 1, 1, input_hit=1.0, input_miss=None, output=1.0) is None

    def margins(cost, revenue):
        money = margin.money(cost, revenue, None)
        return money["cost_profit_margin"], money["gross_margin"]

    assert margins(1.0, None) == margins(None, 1.0) == (None, None)
    assert margins(0.0, 5.0) == (None, 1.0)
    assert margins(5.0, 0.0) == (-1.0, None)


# ---- views


def test_views_have_the_documented_columns_even_without_files(tmp_path):
    write_run(tmp_path / "r")
    with open_views([tmp_path / "r"]) as connection:
        for table in VIEWS:
            connection.execute(f"SELECT * FROM {table.name}")
            assert [column[0] for column in connection.description] == table.schema.names
        types = dict(connection.execute("SELECT column_name, column_type FROM (DESCRIBE outputs)").fetchall())
        assert types["token_ids"] == "INTEGER[]"
        connection.execute("SELECT sum(tokens) FROM experts WHERE layer = 3")


def test_several_runs_are_told_apart_by_the_column_run(tmp_path):
    fields = [pa.field("run", pa.string()), pa.field("extra", pa.int64())]
    one = write_run(tmp_path / "one", outputs={"s.parquet": [output(0), output(1)]}, nodes=[session("a", 0, 1)])
    two = write_run(tmp_path / "two", outputs={"s.parquet": [output(0, run="kept", extra=7)]}, kept=fields)
    three = write_run(tmp_path / "more" / "two", requests=[request(0, 3, 1)])
    columns, rows = run_query([one, two, one], "SELECT run, row, input_run, extra FROM outputs ORDER BY ALL")
    assert columns == ["run", "row", "input_run", "extra"]
    assert list(rows) == [("one", 0, None, None), ("one", 1, None, None), ("two", 0, "kept", 7)]
    _, rows = run_query([one, two, three], "SELECT run FROM run ORDER BY run")
    assert [name for (name,) in rows] == sorted(["one", str(two), str(three)])
    for table in VIEWS:
        assert "run" in run_query([one, two], f"SELECT * FROM {table.name}")[0]
    fields = [pa.field("run", pa.string()), pa.field("input_run", pa.string())]
    row = output(0, run="kept", input_run="another")
    four = write_run(tmp_path / "four", outputs={"s.parquet": [row]}, kept=fields)
    _, rows = run_query([one, four], "SELECT run, input_run_1, input_run FROM outputs WHERE input_run_1 IS NOT NULL")
    assert list(rows) == [("four", "kept", "another")]


@pytest.mark.parametrize("name", ["it's", "a [1] *b? {c}", "spaces  and;--", "größe 批", "x=1", 'dq"', "new\nline"])
def test_odd_characters_in_paths_are_no_syntax(tmp_path, name):
    outputs = {
        f"{name}/date=2024/{name}.parquet": [output(0)],
        "s*.parquet": [output(1)],
        "s1.parquet": [output(2)],
        "s[1].parquet": [output(3)],
        "empty.parquet": [],
    }
    run = write_run(tmp_path / name / name, outputs=outputs, requests=[request(0, 4, 2, 0, 1)])
    assert read_report(run).values["rows"] == 1
    assert query(run, "SELECT row FROM outputs ORDER BY row") == [(0,), (1,), (2,), (3,)]
    assert query(run, "SELECT * FROM outputs WHERE row = 0")[0][0] == "id-0"
    assert len(list(run_query([run, write_run(tmp_path / "z")], "FROM outputs")[1])) == 4


def test_a_backslash_in_a_path_is_a_character(tmp_path):
    run = write_run(tmp_path / "back\\slash", outputs={"s\\t.parquet": [output(0)]})
    assert query(run, "SELECT row FROM outputs") == [(0,)]


def test_files_that_are_being_written_are_not_read(tmp_path):
    run = write_run(tmp_path / "r", outputs={"s.parquet": [output(0)]})
    (run / "outputs" / ".s.parquet.x.tmp").write_text("half a file")
    assert query(run, "SELECT count(*) FROM outputs") == [(1,)]


def test_what_is_no_finished_run_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match=r"is not a run folder .* give the job's output.dir"):
        read_report(tmp_path)
    with pytest.raises(ConfigError, match="is not a run folder"):
        open_views([tmp_path / "nothing"])
    with pytest.raises(ConfigError, match="name at least one"):
        open_views([])
    run = write_run(tmp_path / "r")
    (run / "stats" / "run.parquet").unlink()
    with pytest.raises(ConfigError, match=r"not finished; `batchinfer run .*/r` goes on with it"):
        read_report(run)


def test_a_damaged_table_is_named(tmp_path):
    run = write_run(tmp_path / "r", nodes=[session("a", 0, 1)])
    (run / "stats" / "nodes" / "a.parquet").write_bytes(b"not parquet")
    with pytest.raises(ConfigError, match=r"/r/stats/nodes/a\.parquet is damaged: .*; delete it") as caught:
        read_report(run)
    assert caught.value.exit_code == ExitCode.BAD_JOB
    assert "\n" not in str(caught.value)
