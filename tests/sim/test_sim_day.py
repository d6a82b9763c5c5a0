"""Nodes over a day: the rule on a load curve, against the published day.

Source: the two charts of "DeepSeek-V3/R1 Inference System Overview" (github.com/deepseek-ai/open-infra-index, Day 6),
nodes and theoretical income by time, read off to the pixel.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import correlation, mean

import pytest

from batchinfer.sim.day import LOOK_S, Group, simulate_day
from batchinfer.sim.spec import load_spec
from support.jobs import batchinfer

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "jobs" / "published_day.toml"
# (hours since noon, nodes from then on); each step is 30 or 60
PUBLISHED_STEPS = [
    (0, 278), (12, 218), (13.25, 188), (14, 158), (14.75, 128), (15, 98), (15.5, 68), (18.5, 98), (19, 128),
    (19.5, 188), (20, 218), (20.5, 278),
]  # fmt: skip
PUBLISHED_PEAK, PUBLISHED_MEAN, PUBLISHED_INCOME = 278, 226.75, 562.027  # stated in the text; income in $1,000


def published_by_hour():
    quarters = [[nodes for start, nodes in PUBLISHED_STEPS if start <= quarter / 4][-1] for quarter in range(96)]
    return [mean(quarters[hour * 4 : hour * 4 + 4]) for hour in range(24)]


@pytest.fixture(scope="module")
def day():
    return json.loads(batchinfer("simulate", SPEC, "--json").out)


def test_what_was_read_off_the_charts_is_what_the_text_states():
    assert max(published_by_hour()) == PUBLISHED_PEAK
    assert mean(published_by_hour()) == PUBLISHED_MEAN
    assert sum(load_spec(SPEC).day.load_by_hour) == pytest.approx(PUBLISHED_INCOME, rel=0.001)


@pytest.mark.all  # make test: a day as a table, below
def test_the_published_days_nodes_follow_from_its_load(day):
    ours, theirs = day["nodes_by_hour"], published_by_hour()
    print(
        "\nhour published simulated",
        *(f"{hour:4} {a:9.1f} {b:9.1f}" for hour, (a, b) in enumerate(zip(theirs, ours, strict=True))),
        sep="\n",
    )
    assert day["nodes_per_group"] == 30  # the step of the published curve
    assert day["peak_nodes"] == PUBLISHED_PEAK
    assert day["mean_nodes"] == pytest.approx(PUBLISHED_MEAN, rel=0.02)
    assert correlation(ours, theirs) > 0.99
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= 1.1 * day["nodes_per_group"]
    assert min(ours) == min(theirs) == 68
    assert day["longest_wait_s"] < 600
    assert day["cost_usd"] == pytest.approx(day["mean_nodes"] * 24 * 8 * 2)
    assert day["output_tokens"] == pytest.approx(168e9, rel=0.02)


def test_the_docs_say_what_is_simulated(day):
    text = (ROOT / "docs" / "simulate.md").read_text()
    shape = correlation(day["nodes_by_hour"], published_by_hour())
    off = day["mean_nodes"] / PUBLISHED_MEAN - 1
    assert f"| nodes, mean | {PUBLISHED_MEAN} | {day['mean_nodes']:.2f} ({100 * off:+.1f} %) |" in text
    assert f"| nodes, peak | {PUBLISHED_PEAK} | {day['peak_nodes']} |" in text
    assert f"| shape: correlation of the 24 hours | | {shape:.3f} |" in text


def test_groups_follow_the_load_and_no_work_is_lost():
    #  load  1 1 ... 1 | 9 9 ... 9      5 groups' worth on average: 1 by night, 9 by day
    group = Group(num_prefill_units=3, prefill_nodes=12, decode_nodes=18, seconds=1.0)
    load = [1.0] * 12 + [9.0] * 12
    day = simulate_day(load, 5 * 24 * 3600.0, group, num_nodes=400)
    rest = 400 % 30  # of no whole group: always there
    assert day.by_hour == [rest + 2 * 30] * 12 + [rest + 10 * 30] * 12  # a MARGIN above one, and above nine
    assert day.longest_wait_s == 0
    assert day.busy_share * (day.node_seconds - rest * LOOK_S * len(day.nodes)) / 30 == pytest.approx(5 * 24 * 3600)


def test_too_few_nodes_make_work_wait():
    group = Group(num_prefill_units=1, prefill_nodes=4, decode_nodes=18, seconds=1.0)
    day = simulate_day([1.0] * 24, 2 * 24 * 3600.0, group, num_nodes=22)
    assert set(day.nodes) == {22}
    assert day.longest_wait_s == pytest.approx(24 * 3600)


def changed_spec(folder, old, new):
    text = SPEC.read_text().replace('"models', f'"{ROOT}/jobs/models').replace('"prices', f'"{ROOT}/jobs/prices')
    assert old in text
    (folder / "day.toml").write_text(text.replace(old, new))
    return folder / "day.toml"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("input_tokens = 608e9", "input_tokens = 0", ["day.input_tokens"]),
        ("27.0, 28.5, ", "27.0, ", ["day.load_by_hour"]),
        ("nodes = 278", "nodes = 20", ["cluster.nodes is 20", "take 30"]),
        ("nodes = 278", "finish_hours = 3.0", ["day needs cluster.nodes"]),
    ],
)
def test_a_bad_day_is_one_sentence(tmp_path, old, new, words):
    ended = batchinfer("simulate", changed_spec(tmp_path, old, new))
    assert ended.code == 2
    for word in words:
        assert word in ended.err


def test_a_day_as_a_table(tmp_path):
    ended = batchinfer("simulate", changed_spec(tmp_path, "requests = 20_000", "requests = 1000"))
    assert ended.code == 0
    for words in ("come and go together", "longest wait for them", "output per request"):
        assert words in ended.out
    hours = re.findall(r"^ +hours? (\d+)(?: to (\d+))? ", ended.out, re.MULTILINE)
    assert hours[0][0] == "0"
    assert max(int(last or first) for first, last in hours) >= 23
