"""The report room: figures by SQL, prices, the panel, and read-only SQL over run folders."""

from __future__ import annotations

import datetime
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from batchinfer.data.schemas import OUTPUTS
from batchinfer.records import ConfigError, ExitCode, InterruptedRunError
from batchinfer.report.figures import FIGURES, PARTS
from batchinfer.report.foreign_sql import run_query
from batchinfer.report.panel import panel as panel_parts
from batchinfer.report.price import margin
from batchinfer.report.query_limits import Deadline
from batchinfer.report.read import Prediction, Report, as_document, read_report
from batchinfer.report.rows import json_records, json_value, table_of_rows
from batchinfer.report.terminal import UNCUT, WARNING, drawn, text
from batchinfer.report.terminal import table as drawn_table
from batchinfer.report.views import VIEWS, open_views
from batchinfer.sanitize import display_width, fit
from support.jobs import start
from support.runs import SCHEMAS, error_output, error_request, output, request, session, step, write_run

HOUR_S = 3600.0
# of `report --json`, by the design
CONTRACT = """
rows rows_ok rows_error input_tokens cached_tokens cache_hit_rate optimal_cached_tokens output_tokens
output_tokens_per_s_per_request mean_kv_tokens_per_output_token prefill_tokens_per_s_per_node
decode_tokens_per_s_per_node replicated_tokens wasted_tokens hidden_comm_share wall_s busy_s idle_s startup_s peak_nodes
mean_nodes gpu_hours cost_usd revenue_usd cost_profit_margin gross_margin
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


def test_a_session_without_prefill_is_all_startup(tmp_path):
    metrics = read_report(write_run(tmp_path / "r", nodes=[session("a", 0, 30, state="failed")])).values
    assert (metrics["startup_s"], metrics["busy_s"], metrics["idle_s"]) == (30, 0, 0)


def test_a_clock_that_was_set_back_gives_no_negative_time(tmp_path):
    nodes = [session("a", 100, 40, prefill_s=90), session("b", 0, 50, prefill_s=70)]
    metrics = read_report(write_run(tmp_path / "r", nodes=nodes)).values
    assert metrics["wall_s"] == 50
    assert metrics["startup_s"] == 50
    assert metrics["gpu_hours"] == pytest.approx(50 / 3600)


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
    for key in ("cache_hit_rate", "mean_nodes", "prefill_tokens_per_s_per_node", "cost_profit_margin", "gross_margin"):
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
    with pytest.raises(ConfigError, match=r"cannot read the table nodes of .*/r") as caught:
        read_report(run)
    assert caught.value.exit_code == ExitCode.BAD_JOB
    assert "\n" not in str(caught.value)


# ---- SQL of other people


@pytest.fixture(scope="module")
def small_run(tmp_path_factory) -> Path:
    rows = [output(row) for row in range(5)]
    return write_run(tmp_path_factory.mktemp("sql") / "run", outputs={"s.parquet": rows}, nodes=[session("a", 0, 9)])


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT sum(completion_tokens) FROM outputs", [(10,)]),
        ("FROM outputs SELECT id WHERE row = 3; -- the third", [("id-3",)]),
        ("WITH n AS (SELECT * FROM nodes) SELECT session, end_s FROM n", [("a", 9.0)]),
        ("SELECT id FROM outputs ORDER BY row DESC LIMIT 1", [("id-4",)]),
        ("SELECT count(*) FROM (DESCRIBE nodes)", [(21,)]),
        ("SELECT '; DROP VIEW outputs'", [("; DROP VIEW outputs",)]),
        ("VALUES (1), (2)", [(1,), (2,)]),
        ("SELECT TIMESTAMPTZ '2024-01-01 12:00:00+02' AS t, 1 AS t; -- x", [("2024-01-01 10:00:00+00", 1)]),
    ],
)
def test_sql_reads_the_views(small_run, sql, expected):
    assert query(small_run, sql) == expected


def test_show_and_summarize_work(small_run):
    assert {row[0] for row in query(small_run, "SHOW TABLES")} == {"outputs", *SCHEMAS, "decode_steps"}
    assert len(query(small_run, "SUMMARIZE outputs")) == len(OUTPUTS.columns)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM read_text('{run}/run.json')",
        "SELECT * FROM read_text('{run}/outputs/../run.json')",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM sniff_csv('/etc/passwd')",
        "SELECT * FROM 'https://example.com/x.parquet'",
        "SELECT * FROM 's3://bucket/x.parquet'",
        "COPY outputs TO '{run}/out.csv'",
        "COPY outputs TO '{run}/outputs/s.parquet'",
        "COPY (SELECT 1) TO '{run}/outputs/s.parquet' (USE_TMP_FILE false)",
        "WITH x AS (COPY (SELECT 1) TO '{run}/out.parquet') SELECT * FROM x",
        "WITH x AS (COPY (SELECT 1) TO '{run}/outputs/s.parquet' (USE_TMP_FILE false)) SELECT * FROM x",
        "SELECT * FROM json_execute_serialized_sql(json_serialize_sql('WITH x AS (COPY (SELECT 1)"
        " TO ''{run}/outputs/s.parquet'' (USE_TMP_FILE false)) SELECT * FROM x'))",
        "SELECT * FROM query('WITH x AS (COPY (SELECT 1) TO ''{run}/outputs/s.parquet'' (USE_TMP_FILE false)) FROM x')",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{run}/outputs/s.parquet' (USE_TMP_FILE false)",
        "ATTACH '{run}/new.db' AS other",
        "ATTACH ':memory:' AS other",
        "EXPORT DATABASE '{run}/dump'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET allowed_paths = ['/etc/passwd']",
        "RESET lock_configuration",
        "PRAGMA enable_profiling",
        "CALL enable_logging()",
        "SELECT * FROM enable_logging('QueryLog', storage = 'file', storage_path = '{run}/log')",
        "CREATE TABLE mine AS SELECT 1",
        "DROP VIEW outputs",
        "INSERT INTO run SELECT * FROM run",
        "DELETE FROM experts",
        "SELECT 1; SELECT 2",
        "SELECT 1; DROP VIEW outputs",
        "",
        "-- only a comment",
        "SELEC 1",
        "SELECT nothing FROM outputs",
        "SELECT * FROM no_such_view",
        "SELECT ?",
        "PIVOT outputs ON row USING sum(prompt_tokens)",
        "SELECT error('stop here')",
        "SELECT '\ud800'",
        "(" * 5000,
    ],
)
def test_sql_that_does_not_only_read_is_refused(small_run, sql):
    before = {path: path.stat().st_mtime_ns for path in small_run.parent.rglob("*")}
    with pytest.raises(ConfigError) as caught:
        query(small_run, sql.replace("{run}", str(small_run)))
    assert "\n" not in str(caught.value)
    assert {path: path.stat().st_mtime_ns for path in small_run.parent.rglob("*")} == before


def test_sql_does_not_see_python_variables(small_run):
    hidden = pa.table({"secret": [1]})
    with pytest.raises(ConfigError, match="hidden does not exist"):
        query(small_run, "SELECT * FROM hidden")
    assert hidden.num_rows == 1


def test_a_refusal_names_the_reason_in_one_sentence(small_run):
    with pytest.raises(ConfigError, match=r"--sql only reads: it takes one SELECT .* but got COPY"):
        query(small_run, "COPY outputs TO 'x.csv'")
    with pytest.raises(ConfigError, match=r"the SQL does not run: Binder Error: .*nothing"):
        query(small_run, "SELECT nothing FROM outputs")
    with pytest.raises(ConfigError, match=r"may read the views outputs, .* no other file: .*passwd"):
        query(small_run, "FROM read_text('/etc/passwd')")


def test_errors_in_the_middle_of_a_result_are_sentences(small_run):
    _, rows = run_query(
        [small_run], "SELECT CASE WHEN i = 150000 THEN error('late') ELSE i END FROM range(200000) t(i)"
    )
    with pytest.raises(ConfigError, match="the SQL does not run"):
        list(rows)


def test_a_large_result_is_taken_bit_by_bit(tmp_path):
    # 60,000 texts of 2,000 characters: 120 MB if all of them were held
    text = "x" * 2000
    run = write_run(tmp_path / "r", outputs={"s.parquet": [output(row, text=text) for row in range(2000)]})
    for index in range(1, 30):
        os.link(run / "outputs" / "s.parquet", run / "outputs" / f"s{index}.parquet")
    tracemalloc.start()
    _, rows = run_query([run], "SELECT * FROM outputs")
    assert sum(len(row[5]) for row in rows) == 60_000 * 2000
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 20e6


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT max(hash(i)) FROM range(1000000000000) t(i)",
        "WITH RECURSIVE t AS (SELECT 1 x UNION ALL SELECT x + 1 FROM t) SELECT count(*) FROM t",
        "SELECT levenshtein(repeat('ab', 200000), repeat('ba', 200000))",  # one call: DuckDB cannot stop it
        "SELECT i FROM range(1000000000000) t(i)",
    ],
)
def test_a_query_without_end_is_stopped(small_run, sql):
    with start("report", small_run, "--json", "--sql-seconds", "1", "--sql", sql) as command:
        out, err = command.communicate()
    assert (command.returncode, out) == (2, "")
    assert err == "error: the SQL takes more than 1 s; give it more with --sql-seconds\n"


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("SELECT tex FROM outputs", 'Referenced column "tex" not found in FROM clause!; Candidate bindings: "text"'),
        ("SELECT * FROM output", 'output does not exist!; Did you mean "outputs"?; --sql reads the views '),
        ("SELECT sume(row) FROM outputs", 'name sume does not exist!; Did you mean "sum"?'),
    ],
)
def test_a_name_that_is_not_there_comes_with_what_was_meant(small_run, sql, told):
    with pytest.raises(ConfigError) as error:
        run_query([small_run], sql)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


ENDLESS = "SELECT count(*) FROM range(1000000000000)"


@pytest.mark.parametrize("wait_s", [0, 0.2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
def test_a_signal_stops_a_query(number, wait_s):
    def handle(*_):
        raise InterruptedRunError("stopped")

    before = signal.signal(number, handle)
    try:
        with duckdb.connect() as connection:
            deadline = Deadline(connection, 60)

            def query():
                os.kill(os.getpid(), number)  # it comes before DuckDB has begun, or after
                time.sleep(wait_s)
                return connection.execute(ENDLESS).fetchall()

            with pytest.raises(InterruptedRunError):
                deadline.call(query)
            assert not deadline.is_stuck
    finally:
        signal.signal(number, before)


def test_a_signal_stops_a_query_also_while_its_thread_starts(monkeypatch):
    class Thread(threading.Thread):
        def start(self) -> None:
            super().start()
            time.sleep(0.2)  # the query runs
            raise InterruptedRunError("stopped")  # as a handler does

    monkeypatch.setattr(threading, "Thread", Thread)
    with duckdb.connect() as connection:
        deadline = Deadline(connection, 60)

        with pytest.raises(InterruptedRunError):
            deadline.call(lambda: connection.execute(ENDLESS).fetchall())
        assert not deadline.is_stuck


def test_a_query_that_is_stopped_before_it_begins_stops():
    with duckdb.connect() as connection:
        deadline = Deadline(connection, 0)

        def query():
            time.sleep(0.1)  # DuckDB forgets what it was told before it begins
            return connection.execute(ENDLESS).fetchall()

        with pytest.raises(ConfigError, match="takes more than 0 s"):
            deadline.call(query)
        assert not deadline.is_stuck


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT list(i) FROM range(1000000000000) t(i)",
        "SELECT length(repeat('x', 4000000000))",  # DuckDB's own limit does not count it
        "SELECT repeat('x', 300000000) FROM range(100)",  # small for DuckDB, not for who takes the rows
    ],
)
def test_a_query_that_wants_too_much_memory_is_refused(small_run, sql):
    code = (
        "from batchinfer.report import query_limits; query_limits.free_memory_bytes = lambda: 2 << 30;"
        "from batchinfer.program import program; program()"
    )
    command = [sys.executable, "-c", code, "report", small_run, "--json", "--sql", sql]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: the SQL needs more than 1.0 GiB of memory, half of what was free;")


def test_a_result_can_be_left_halfway(small_run):
    _, rows = run_query([small_run], "SELECT * FROM range(1000000000)")
    assert next(rows) == (0,)
    rows.close()


# ---- text


def report_with(value: float | None, **values: float | None) -> Report:
    """All figures are `value`, but for those that are named."""
    return Report(
        run="demo",
        model="/models/tiny",
        dtype="bfloat16",
        values=dict.fromkeys((*FIGURES, "comm_s"), value) | values,
        seconds=dict.fromkeys(PARTS, 0.0),
        predictions=(Prediction("computed_tokens", 265e9, 266e9, None),),
        lengths=(),
        decode_over_time=(),
        ranks=(),
        unreadable_shards=(),
        errors=(),
        num_error_texts=0,
        bit_equal=None,
        bit_equal_reason=None,
        processor=None,
        no_graph=None,
    )


def squeezed(panel: str) -> list[str]:
    return [" ".join(line.split()) for line in panel.splitlines()]


def test_the_panel_shows_units_and_fits_the_terminal():
    panel = format_report(
        report_with(608_000_000_000, cache_hit_rate=0.5625, gross_margin=0.845, decode_ranks_per_node=8)
    )
    assert max(map(len, panel.splitlines())) <= 80
    lines = squeezed(panel)
    assert lines[0] == "demo (/models/tiny, bfloat16)"
    for line in (
        "input 608,000,000,000 tokens",
        "hit share 56.2 %",
        "prompt tokens computed 265,000,000,000 266,000,000,000 –",
        "decode per node 608,000,000,000 tok/s 8 x 608,000,000,000",
        "gross margin 84.5 % profit / revenue",
        "damaged 608,000,000,000 files computed again",
    ):
        assert line in lines


def test_a_long_path_of_a_model_leaves_room_for_its_precision():
    report = replace(report_with(0), run="r" * 60, model="/models" * 20 + "/tiny", dtype="bfloat16, KV in fp8")
    line = format_report(report).splitlines()[0]
    assert line.endswith("/tiny, bfloat16, KV in fp8)")
    assert len(line) == 80


def test_the_panel_says_why_something_is_not_known():
    lines = squeezed(format_report(report_with(None, rows=0, cost_usd=1.0)))
    assert "revenue at list prices – no token prices" in lines
    assert "gross margin – needs cost and revenue" in lines
    assert "prefill per node – no prefill step" in lines
    assert not any("None" in line for line in lines)
    assert not any(line.startswith(("restarts", "read", "KV store")) for line in lines)


def test_without_prices_the_panel_says_how_to_give_them():
    panel = format_report(report_with(0, cost_usd=None, revenue_usd=None, cost_profit_margin=None, gross_margin=None))
    assert "set gpu_hour, input_hit, input_miss and output under" in panel
    assert not any(line.startswith(("cost", "revenue")) for line in squeezed(panel))


def test_the_panel_tells_small_sums_apart_from_nothing():
    lines = squeezed(format_report(report_with(0, cost_usd=0.000123, gpu_hours=0.0002)))
    assert "cost 0.000123 $" in lines
    assert "GPU-hours 0.000200 h" in lines


def test_a_perfect_cache_serves_no_less_than_what_was_served_when_rows_failed(tmp_path):
    # 3 prompts of 10 tokens that share 8, and one of 30 that failed: 12 + 2 + 30 of the plan's are distinct
    requests = [
        request(0, 10, 2, 0, 1),
        *(request(row, 10, 2, 0, 1, cached_memory_tokens=8) for row in (1, 2)),
        error_request(3),
    ]
    report = read_report(write_run(tmp_path / "r", requests=requests, distinct_tokens=44))
    values, (computed, *_) = report.values, report.predictions
    assert (values["input_tokens"], values["cached_tokens"]) == (30, 16)
    assert values["optimal_cached_tokens"] == 16
    assert (computed.name, computed.at_best) == ("computed_tokens", 30 - 16)


def test_many_rows_that_were_cut_come_with_a_hint(tmp_path):
    reasons = ["stop"] * 6 + ["length"] * 3
    rows = [output(row, finish_reason=reason) for row, reason in enumerate(reasons)]
    rows.append(error_output(9, "no room") | {"finish_reason": "error"})
    requests = [request(row, 4, 2, 0, 1) for row in range(9)] + [error_request(9)]
    run = write_run(tmp_path / "r", requests=requests, outputs={"s.parquet": rows})
    report = read_report(run)
    assert as_document(report)["finish_reasons"] == {"stop": 6, "length": 3, "error": 1}
    lines = squeezed(format_report(report))
    assert "ended by themselves 6" in lines
    assert "cut at max_tokens 3 33.3% of answers: raise max_tokens?" in lines
    few = report.values | {"rows_ok": 31}
    assert FIGURES["finish_reasons.length"].note_of(few) == ""


def test_rows_of_which_only_the_prompt_is_scored_are_not_cut(tmp_path):
    """They end with 'length' in outputs, as all that they were allowed is nothing."""
    reasons = ["stop"] * 12 + ["length"] * 6
    rows = [output(row, finish_reason=reason) for row, reason in enumerate(reasons)]
    for row in rows[13:]:
        row |= {"completion_tokens": 0, "token_ids": [], "text": ""}
    requests = [request(row, 4, 0 if row >= 13 else 2, 0, 1) for row in range(18)]
    report = read_report(write_run(tmp_path / "r", requests=requests, outputs={"s.parquet": rows}))
    assert as_document(report)["finish_reasons"] == {"stop": 12, "length": 1, "error": 0}
    lines = squeezed(format_report(report))
    assert "cut at max_tokens 1" in lines, "one of 13 answers"
    assert "only their prompts 5" in lines
    cut = report.values | {"finish_reasons.length": 2}
    assert FIGURES["finish_reasons.length"].note_of(cut) == "15.4% of answers: raise max_tokens?"


def test_a_terminal_gets_colours_and_nobody_elses_markup(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    parts = [text("[red]x[/red] :smile: \x1b[31m", WARNING), drawn_table([["[b]a[/b]", "1"]], "lr")]
    assert drawn(*parts) == "[red]x[/red] :smile: \\x1b[31m\n[b]a[/b]  1\n"
    coloured = drawn(*parts, on_terminal=True)
    assert coloured.startswith("\x1b[33m[red]x[/red] :smile: \\x1b[31m\x1b[0m\n")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[33m" not in drawn(*parts, on_terminal=True)


@pytest.mark.parametrize("width", [60, 70, 80, 200])
def test_a_narrow_terminal_cuts_no_number(tmp_path, width):
    nodes = [session("a", 0, 100, ranks=2, prefill_s=10)]
    steps = [step("a", "decode", 20, new=100, cached=0, output=1, rank=rank) for rank in range(2)]
    run = write_run(tmp_path / "r", steps=steps, nodes=nodes, gpu_hour=2.0)
    panel = drawn(*panel_parts(read_report(run)), width=width)
    assert max(map(len, panel.splitlines())) <= width
    assert "…" not in panel
    assert "rank 1 prefill + decode 0 1 20.00" in squeezed(panel)


def test_the_panel_names_unreadable_shards_and_the_commonest_errors(tmp_path):
    hostile = "\x1b[2J\x1b]0;owned\x07 line\nbreak \u202egnp.exe " + "long " * 100
    rows = [error_output(0, hostile), *(error_output(row, "no room for a token") for row in range(1, 4))]
    rows += [error_output(row, f"error {row}") for row in range(4, 12)]
    shards = [
        {"index": 0, "path": "/data/good.parquet", "name": "good.parquet", "num_rows": 3, "problem": None},
        {"index": 1, "path": "/data/\x1b[31mbad.parquet", "name": "b", "num_rows": 0, "problem": "no footer\n\x1b[0m"},
    ]
    run = write_run(tmp_path / "r\x1b[1m", outputs={"s.parquet": rows}, shards=shards, predicted_computed_tokens=5)
    details = read_report(run)
    assert details.errors[0] == ("no room for a token", 3)
    assert details.num_error_texts == 10
    panel = format_report(details)
    assert all(char.isprintable() or char == "\n" for char in panel)
    assert max(map(display_width, panel.splitlines())) <= 80
    assert "Unreadable shards (1)" in panel
    assert "/data/\\x1b[31mbad.parquet" in panel
    assert "good.parquet" not in panel
    assert "3 x no room for a token" in panel
    assert "and 5 other texts" in panel


@pytest.mark.parametrize("seed", range(50))
def test_fitted_text_is_printable_and_no_wider_than_asked(seed):
    draw = random.Random(seed)
    alphabet = "ab\\ \x00\x1b\x7f\x9b\n\r\t\u200b\u202e\u3000批量é\u0301\U0001f600\ud800"
    text = "".join(draw.choices(alphabet, k=draw.randrange(60)))
    for keep_end in (False, True):
        fitted = fit(text, 20, keep_end=keep_end)
        assert display_width(fitted) <= 20
        assert not any(ord(char) < 32 or 0x7F <= ord(char) < 0xA0 or char in "\u202e\u200b\ud800" for char in fitted)
        if "…" not in fitted and text.isprintable():
            assert fitted == text


def rows_text(columns: list[str], rows: Iterable[tuple[Any, ...]], **limits: int) -> str:
    return drawn(*table_of_rows(columns, rows, **limits), width=UNCUT)


def test_rows_are_aligned_cut_and_counted():
    rows = [
        (1, "a\x1b[2Jb", None, 0.5),
        (22, "批量", b"\x00", 1234567.25),
        (3, "x" * 99, [1, 2], None),
        (4, "", "", 1.0),
    ]
    lines = rows_text(["n", "text", "any", "rate"], rows, max_rows=3).splitlines()
    assert lines[0].split() == ["n", "text", "any", "rate"]
    assert lines[2].startswith(" 1   a\\x1b[2Jb")
    assert display_width(lines[2]) == display_width(lines[4]) == display_width(lines[0])
    assert lines[3].endswith("1234567.2")
    assert lines[4].split()[1] == "x" * 39 + "…"
    assert lines[-1] == "… 1 more row"
    endless = ((number,) for number in iter(int, 1))
    assert rows_text(["n"], endless, count_rows=10).splitlines()[-1] == "… more than 10 more rows"
    assert "(no rows)" in rows_text(["n"], [])
    assert len(rows_text(["n"] * 99, [("x" * 30,) * 99]).splitlines()) == 3


def test_query_values_become_json():
    moment = datetime.datetime(2024, 1, 2, 3, 4, 5)
    rows = [(moment, b"\x00\xff", Decimal("1.50"), Decimal("7"), [{"a": math.nan}], moment.date(), 2**70)]
    columns = ["t", "b", "d", "d", "l", "day", "big"]
    (record,) = json_records(columns, rows)
    assert json.loads(json.dumps(record, allow_nan=False)) == {
        "t": "2024-01-02T03:04:05",
        "b": "AP8=",
        "d": 1.5,
        "d_2": 7,
        "l": [{"a": None}],
        "day": "2024-01-02",
        "big": 2**70,
    }
    assert json_value(datetime.timedelta(seconds=90)) == "0:01:30"
    assert json_value({1: (True, None)}) == {"1": [True, None]}


def test_every_value_duckdb_knows_can_be_shown(small_run):
    columns, rows = run_query([small_run], "SELECT * FROM test_all_types()")
    rows = list(rows)
    json.dumps(list(json_records(columns, rows)), allow_nan=False)
    assert rows_text(columns, rows)


def test_the_report_starts_without_torch():
    code = "import sys, batchinfer.report.panel, batchinfer.report.rows; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
