"""The panel and tables as text in a terminal."""

from __future__ import annotations

import datetime
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from batchinfer.report.figures import FIGURES, PARTS
from batchinfer.report.foreign_sql import run_query
from batchinfer.report.panel import panel as panel_parts
from batchinfer.report.read import Prediction, Report, as_document, read_report
from batchinfer.report.rows import json_records, json_value, table_of_rows
from batchinfer.report.terminal import UNCUT, WARNING, drawn, text
from batchinfer.report.terminal import table as drawn_table
from batchinfer.sanitize import display_width, fit
from support.runs import error_output, error_request, output, request, session, step, write_run


def format_report(report: Report) -> str:
    return drawn(*panel_parts(report))


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
    """Such rows have the finish reason 'length' in outputs, because max_tokens is 0."""
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


@pytest.mark.parametrize("width", [10, 40, 46])
def test_a_terminal_too_narrow_for_the_numbers_gets_wider_lines(width):
    rows = [["  output rows", "1,234,567,890", "rows and words that wrap"], ["  ok", "324", "rows"]]
    shown = drawn(drawn_table(rows, "lrw", min_widths=(27, 12)), width=width)
    assert "1,234,567,890  rows" in shown
    assert " 324  rows\n" in shown


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


def test_every_value_duckdb_knows_can_be_shown(tmp_path):
    run = write_run(tmp_path / "run", outputs={"s.parquet": [output(0)]}, nodes=[session("a", 0, 9)])
    columns, rows = run_query([run], "SELECT * FROM test_all_types()")
    rows = list(rows)
    json.dumps(list(json_records(columns, rows)), allow_nan=False)
    assert rows_text(columns, rows)


def test_the_report_starts_without_torch():
    code = "import sys, batchinfer.report.panel, batchinfer.report.rows; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
