"""The ranks' time by part, its cost, $ per million tokens, and several runs in one report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from batchinfer.records import ConfigError
from batchinfer.report.figures import FIGURES, PARTS, PUBLISHED, UNIT_COSTS, changes
from batchinfer.report.read import read_report, read_together
from support.jobs import batchinfer
from support.runs import error_request, request, session, step, write_run
from support.small_disks import small_disk

__all__ = ["small_disk"]


def two_ranks(root: Path, *, wasted: int = 0, **run: float) -> Path:
    """Two ranks held for 100 s; 60 tokens of requests and `wasted` ones in prefill.

    second    0         10              30        40        60        100
    rank 0    [ start-up )[ prefill     )[ decode           )[ idle    )   of the prefill 4 s exchange, 1 s hidden
    rank 1    [ start-up )[ prefill     )[ decode )[ no request )[ idle)
    """
    common = {"num_requests": 1, "kv_tokens": 10}
    steps = [
        step("a", "prefill", 20.0, new=25 + wasted, cached=0, output=1, rank=0, start_s=10.0, comm_s=4.0,
             hidden_comm_s=1.0, **common),
        step("a", "prefill", 20.0, new=25, cached=0, output=1, rank=1, start_s=10.0, **common),
        step("a", "decode", 30.0, new=8, cached=0, output=8, rank=0, start_s=30.0, step=1, **common),
        step("a", "decode", 10.0, new=2, cached=0, output=2, rank=1, start_s=30.0, step=1, num_requests=1,
             kv_tokens=5),
        step("a", "decode", 20.0, new=0, cached=0, output=0, rank=1, start_s=40.0, step=2, num_requests=0,
             kv_tokens=0),
    ]  # fmt: skip
    return write_run(
        root,
        requests=[request(0, 25, 9, 30, 60), request(1, 25, 3, 30, 40)],
        steps=steps,
        nodes=[session("a", 0, 100, ranks=2, prefill_s=10)],
        **{"gpu_hour": 36.0, **run},
    )


def test_each_second_of_each_rank_is_counted_once(tmp_path):
    seconds = read_report(two_ranks(tmp_path / "r")).seconds
    assert seconds == {
        "startup": 20, "prefill": 37, "decode": 40, "exchange": 3, "waste": 0, "tail": 20, "idle": 80,
    }  # fmt: skip
    assert sum(seconds.values()) == 200


def test_wasted_tokens_take_their_share_of_the_steps(tmp_path):
    # 20 of 80 tokens: a quarter of 80 s in steps
    seconds = read_report(two_ranks(tmp_path / "r", wasted=20)).seconds
    assert seconds["waste"] == pytest.approx(20)
    assert seconds["prefill"] == pytest.approx(37 * 0.75)
    assert seconds["exchange"] == pytest.approx(3 * 0.75)
    assert sum(seconds.values()) == pytest.approx(200)


def test_parts_never_add_up_to_more_than_was_held(tmp_path):
    # a host's clock was set back: the session is shorter than its steps
    steps = [step("a", "decode", 500.0, new=5, cached=0, output=5, start_s=50.0)]
    run = write_run(tmp_path / "r", steps=steps, nodes=[session("a", 0, 100, prefill_s=40)])
    seconds = read_report(run).seconds
    assert sum(seconds.values()) == pytest.approx(100)
    assert (seconds["startup"], seconds["idle"]) == (40, 0)


def unit_costs(run: Path) -> list[float | None]:
    values = read_report(run).values
    return [values[figure.key] for figure in UNIT_COSTS.figures]


def test_three_conventions_for_the_price_of_a_token(tmp_path):
    # $2 for 200 rank-seconds; the ranks do both, so their seconds in steps split the cost: 40 prefill, 40 decode
    assert unit_costs(two_ranks(tmp_path / "r")) == pytest.approx(
        [2 / 12 * 1e6, 2 / 62 * 1e6, 1 / 50 * 1e6, 1 / 12 * 1e6]
    )


def test_ranks_of_one_kind_cost_by_their_number(tmp_path):
    node = session("a", 0, 100, ranks=4, prefill_s=1, mode="disaggregated", prefill_ranks=1, decode_ranks=3)
    steps = [step("a", "prefill", 90.0, new=20, cached=0, output=1, rank=0)]
    run = write_run(tmp_path / "r", requests=[request(0, 20, 10, 1, 2)], steps=steps, nodes=[node], gpu_hour=9.0)
    assert unit_costs(run)[2:] == pytest.approx([0.25 / 20 * 1e6, 0.75 / 10 * 1e6])


def test_without_a_price_or_tokens_there_is_no_unit_cost(tmp_path):
    assert unit_costs(two_ranks(tmp_path / "free", gpu_hour=None)) == [None] * 4
    only_errors = write_run(tmp_path / "errors", requests=[error_request(0)], nodes=[session("a", 0, 9)], gpu_hour=1.0)
    assert unit_costs(only_errors) == [None] * 4
    panel = batchinfer("report", only_errors).out
    assert "per million tokens" not in panel
    assert max(map(len, panel.splitlines())) <= 80


def test_the_panel_shows_parts_with_their_cost(tmp_path):
    lines = [" ".join(line.split()) for line in batchinfer("report", two_ranks(tmp_path / "r")).out.splitlines()]
    start = lines.index("Where the time went rank-seconds share cost, $")
    assert lines[start + 1 : start + 8] == [
        "start-up 20.00 10.0% 0.200000",
        "prefill 37.00 18.5% 0.370000",
        "decode 40.00 20.0% 0.400000",
        "waiting for expert rows 3.00 1.5% 0.030000",
        "wasted work 0.00 0.0% 0.00",
        "tail 20.00 10.0% 0.200000",
        "idle otherwise 80.00 40.0% 0.800000",
    ]
    assert "all cost on output 166,666.67 $/M output tokens" in lines


def test_json_has_the_published_keys(tmp_path):
    document = json.loads(batchinfer("report", two_ranks(tmp_path / "r"), "--json").out)
    assert {figure.key.split(".")[0] for figure in PUBLISHED} < set(document)
    assert document["finish_reasons"] == {"stop": 0, "length": 0, "error": 0}
    assert document["tail_cost_usd"] == pytest.approx(0.2)
    assert document["usd_per_million_output_tokens"] == pytest.approx(2 / 12 * 1e6)
    assert document["memory_tokens"] == document["disk_tokens"] == 0
    assert document["predictions"]["decode_balance"]["happened"] == pytest.approx(10 / 7.5)


# ---- several runs


def small(root: Path, prompt: int, answer: int, seconds: float, host: str, **prices: float) -> Path:
    """One rank held for `seconds`, half of them in decode steps."""
    steps = [step("s", "decode", seconds / 2, new=answer, cached=0, output=answer, start_s=0.0)]
    node = session("s", 0, seconds, prefill_s=0, node=host)
    return write_run(
        root, requests=[request(0, prompt, answer, 0, 1)], steps=steps, nodes=[node], distinct_tokens=prompt, **prices
    )


PRICES = {"gpu_hour": 36.0, "input_hit": 1.0, "input_miss": 2.0, "output": 3.0}


def test_several_runs_together_add_up(tmp_path):
    # at the same time, on hosts of their own
    runs = [small(tmp_path / "one", 10, 4, 100, "n1", **PRICES), small(tmp_path / "two", 30, 8, 60, "n2", **PRICES)]
    each = [read_report(run) for run in runs]
    together = read_together(runs, each)
    metrics = together.values
    for key in ("rows", "input_tokens", "output_tokens", "gpu_hours", "cost_usd", "revenue_usd"):
        assert metrics[key] == pytest.approx(sum(one.values[key] for one in each)), key
    assert metrics["optimal_cached_tokens"] == 0
    assert metrics["wall_s"] == 100
    assert metrics["peak_nodes"] == 2
    assert metrics["decode_tokens_per_s_per_node"] == pytest.approx(12 / 80)
    assert metrics["gross_margin"] == pytest.approx((metrics["revenue_usd"] - 1.6) / metrics["revenue_usd"])
    assert sum(together.seconds.values()) == pytest.approx(160)
    assert together.run == "one + two"


def test_runs_at_different_prices_add_up_in_dollars(tmp_path):
    runs = [
        small(tmp_path / "dear", 10, 4, 100, "n1", **PRICES),
        small(tmp_path / "cheap", 10, 4, 100, "n1", **(PRICES | {"gpu_hour": 18.0})),
    ]
    metrics = read_together(runs, [read_report(run) for run in runs]).values
    assert metrics["cost_usd"] == pytest.approx(1.5)
    assert metrics["peak_nodes"] == 1  # the same host
    free = small(tmp_path / "free", 10, 4, 100, "n1")
    metrics = read_together([*runs, free], [read_report(run) for run in [*runs, free]]).values
    assert metrics["cost_usd"] is None


def test_the_parts_of_runs_at_different_prices_add_up_in_dollars(tmp_path):
    runs = [two_ranks(tmp_path / "cheap", gpu_hour=1.0), small(tmp_path / "dear", 10, 4, 100, "n2", **PRICES)]
    each = [read_report(run).values for run in runs]
    found = read_together(runs, [read_report(run) for run in runs])
    for part in PARTS:
        key = f"{part}_cost_usd"
        assert found.values[key] == pytest.approx(sum(one[key] for one in each)), key
    for key, tokens in (
        ("prefill_usd_per_million_input_tokens", "input_tokens"),
        ("decode_usd_per_million_output_tokens", "output_tokens"),
    ):
        dollars = sum(one[key] * one[tokens] for one in each)
        assert found.values[key] * found.values[tokens] == pytest.approx(dollars), key
    (of_cost,) = (one for one in found.predictions if one.name == "cost_usd")
    assert of_cost.happened == found.values["cost_usd"]


def test_a_copy_of_a_run_is_another_run_and_a_run_named_twice_is_not(tmp_path):
    run = two_ranks(tmp_path / "r")
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    once = read_report(run)
    twice = read_together([run, copy], [once, read_report(copy)])
    assert twice.values["rows"] == 2 * once.values["rows"]
    assert twice.values["cost_usd"] == pytest.approx(2 * once.values["cost_usd"])
    assert twice.seconds == {part: 2 * part_s for part, part_s in once.seconds.items()}
    key = "prefill_usd_per_million_input_tokens"
    assert twice.values[key] == once.values[key]
    assert read_together([run, run], [once] * 2).values == once.values


def test_several_runs_are_shown_side_by_side_and_together(tmp_path):
    runs = [small(tmp_path / f"run{i}", 10, 4, 100, f"n{i}", **PRICES) for i in range(3)]
    out = batchinfer("report", *runs).out
    assert max(map(len, out.splitlines())) <= 80
    heads = [line.split() for line in out.splitlines() if "run0" in line or "together" in line]
    assert heads == [["run0", "run1", "run2"], ["together"]]
    first, last = out.split("\n\n")
    assert "input tokens 10 10 10" in [" ".join(line.split()) for line in first.splitlines()]
    assert "input tokens 30" in [" ".join(line.split()) for line in last.splitlines()]
    documents = json.loads(batchinfer("report", *runs, "--json").out)
    assert [document["rows"] for document in documents] == [1, 1, 1]
    assert json.loads(batchinfer("report", *runs, "--together", "--json").out)["rows"] == 3
    assert batchinfer("report", *runs, "--together").out.startswith("run0 + run1 + run2 ")


def test_two_runs_are_compared_with_what_changed(tmp_path):
    before = small(tmp_path / "before", 10, 4, 100, "n1", **PRICES)
    after = small(tmp_path / "after", 10, 8, 50, "n1", **(PRICES | {"input_miss": None}))
    lines = [" ".join(line.split()) for line in batchinfer("report", before, after, "--compare").out.splitlines()]
    assert lines[0] == "before after change"
    for line in (
        "output tokens 4 8 +100.0 %",
        "wall s 100.00 50.00 -50.0 %",
        "wasted tokens 0 0 0",
        "hit share % 0.0 0.0 +0.0 points",
    ):
        assert line in lines
    assert any(line.startswith("gross margin % ") and line.endswith(" – –") for line in lines)
    document = json.loads(batchinfer("report", before, after, "--compare", "--json").out)
    assert document["output_tokens"] == {"before": 4, "after": 8, "difference": 4, "relative": 1.0}
    assert document["revenue_usd"]["difference"] is None


def test_every_figure_has_a_value_and_a_place_in_json(tmp_path):
    values = read_report(two_ranks(tmp_path / "r")).values
    assert [key for key in FIGURES if key not in values] == []
    assert set(changes(values, values)) == {figure.key.split(".")[0] for figure in PUBLISHED}
    assert changes(values, values)["finish_reasons"]["stop"]["difference"] == 0


def test_long_and_hostile_names_of_runs_keep_the_columns(tmp_path):
    names = ["x" * 60, "\x1b[2J" + "y" * 40]
    runs = [small(tmp_path / name, 10, 4, 100, "n1") for name in names]
    out = batchinfer("report", *runs).out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out


# ---- export and usage


def test_views_are_exported_as_parquet(tmp_path):
    import duckdb

    run, folder = two_ranks(tmp_path / "r"), tmp_path / "made" / "here"
    for _ in range(2):  # the second one takes the place of the first
        ended = batchinfer("report", run, "--parquet", folder)
        assert ended.code == 0
    files = sorted(folder.iterdir())
    assert sorted(ended.out.split()) == [str(file) for file in files]
    names = [
        "decode_steps",
        "expert_rows",
        "experts",
        "kv",
        "nodes",
        "outputs",
        "placements",
        "requests",
        "run",
        "steps",
    ]
    names += ["units"]
    assert [file.name for file in files] == [f"{name}.parquet" for name in names]
    assert duckdb.sql(f"SELECT sum(new_tokens) FROM '{folder}/steps.parquet'").fetchall() == [(60,)]
    both = small(tmp_path / "it's", 10, 4, 100, "n1")
    assert batchinfer("report", run, both, "--parquet", folder).code == 0
    found = duckdb.sql(f"SELECT run, count(*) FROM '{folder}/steps.parquet' GROUP BY run ORDER BY run").fetchall()
    assert found == [("it's", 1), ("r", 5)]


def test_an_export_to_a_full_disk_is_one_plain_sentence(tmp_path, small_disk):
    run, folder = two_ranks(tmp_path / "r"), small_disk.folder / "tables"
    folder.mkdir()
    small_disk.fill(but_bytes=0)
    ended = batchinfer("report", run, "--parquet", folder)
    assert ended.code == 2
    assert ended.err == (
        f"error: cannot write {folder}/outputs.parquet: No space left on device; free space or choose another folder\n"
    )
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("option", ["--parquet", "--html"])
def test_a_bad_place_to_write_is_one_sentence(tmp_path, option):
    run = two_ranks(tmp_path / "r")
    before = sorted(run.rglob("*"))
    (tmp_path / "file").write_text("mine")
    bad = [run, run / "outputs" / "x", tmp_path / "file" / "below", "/proc/nowhere/x"]
    for target in bad:
        ended = batchinfer("report", run, option, str(target))
        assert ended.code == 2, target
        assert ended.out == ""
        assert len(ended.err.strip().splitlines()) == 1, ended.err
    assert sorted(run.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "mine"
    assert batchinfer("report", run, option, run / "report" / "x").code == 0
    assert "there is no run folder" in batchinfer("report", tmp_path / "nothing", option, tmp_path / "x").err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sql", "SELECT 1", "--html", "x"], ["--sql", "--html"]),
        (["--together", "--compare"], ["--together", "--compare"]),
        (["--json", "--parquet", "x"], ["--json", "--parquet"]),
        (["--compare"], ["two runs", "1"]),
        (
            ["second", "third", "--compare", "--html", "x"],
            ["compares two runs, but got 3; name two, or leave --html out"],
        ),
    ],
)
def test_reports_that_exclude_each_other_are_a_usage_error(tmp_path, options, words):
    ended = batchinfer("report", two_ranks(tmp_path / "r"), *options)
    assert ended.code == 2
    for word in words:
        assert word in ended.err


def test_a_run_that_is_not_finished_is_named_among_several(tmp_path):
    one = read_report(two_ranks(tmp_path / "r"))
    with pytest.raises(ConfigError, match="nothing"):
        read_together([tmp_path / "r", tmp_path / "nothing"], [one, one])
