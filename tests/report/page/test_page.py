"""The page of a run: its pictures by their numbers, and in a real browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from batchinfer.report.figures import PUBLISHED
from batchinfer.report.page import charts
from batchinfer.report.page import page as page_file
from batchinfer.report.page.charts import Axis, Series
from batchinfer.report.page.data import MAX_BINS, PageData, read_page_data
from batchinfer.report.page.page import page, write_page
from batchinfer.report.page.time_marks import stretch, time_marks
from batchinfer.report.read import read_report
from batchinfer.report.time_axis import TimeAxis, time_axis
from support.browser import Browser
from support.jobs import batchinfer, write_job, write_questions, write_shard
from support.paths import SAMPLE_MODEL
from support.runs import SCHEMAS, error_output, error_request, output, request, session, step, write_run, write_table

PRICES = {"gpu_hour": 2.0, "input_hit": 0.14, "input_miss": 0.55, "output": 2.19}
HOUR_S = 3600.0
START_S = 20_000 * 24 * HOUR_S  # a midnight


def group_run(
    root: Path, *, hours: int = 24, prefill: int = 2, decode: int = 3, prices: dict[str, float] = PRICES
) -> Path:
    """A day of one group with ranks apart: a prefill step an hour and rank, a decode step an hour and rank."""
    ranks = prefill + decode
    steps, requests, rows = [], [], []
    for hour in range(hours):
        at = START_S + hour * HOUR_S
        common = {"step": hour, "num_requests": 1, "start_s": at + 60}
        for rank in range(ranks):
            kind = "prefill" if rank < prefill else "decode"
            new, cached, sampled = (300, 100, 1) if kind == "prefill" else (10 + rank, 0, 10 + rank)
            steps.append(
                step("a", kind, 1800.0, new=new, cached=cached, output=sampled, rank=rank, kv_tokens=100 * (rank + 1),
                     expert_rows=50 * (rank + 1), comm_s=90.0, hidden_comm_s=60.0, **common)
            )  # fmt: skip
        requests.append(
            request(
                hour, 400, 15, at + 1900, at + 3000, admitted_s=at + 60, cached_memory_tokens=75, cached_disk_tokens=25
            )
        )
        rows.append(output(hour, text=f"answer {hour}"))
    requests.append(error_request(hours))
    rows.append(error_output(hours, "the prompt is null"))
    node = session(
        "a", START_S, START_S + hours * HOUR_S, ranks=ranks, prefill_s=START_S + 60, mode="disaggregated",
        prefill_ranks=prefill, decode_ranks=decode,
    )  # fmt: skip
    shards = [{"index": 0, "path": "/data/s.parquet", "name": "s.parquet", "problem": None}]
    shards.append({"index": 1, "path": "/data/t.parquet", "name": "t.parquet", "problem": "no footer"})
    run = write_run(
        root, requests=requests, steps=steps, nodes=[node], outputs={"s.parquet": rows}, shards=shards,
        distinct_tokens=7000, predicted_computed_tokens=7200, **prices,
    )  # fmt: skip
    experts = [
        {"session": "a", "rank": 0, "phase": "decode", "layer": layer, "expert": expert, "tokens": 10 * (expert + 1)}
        for layer in (1, 2)
        for expert in range(4)
    ]
    write_table(run / "stats" / "experts.parquet", experts, SCHEMAS["experts"])
    return run


@pytest.fixture(scope="module")
def day(tmp_path_factory) -> Path:
    return group_run(tmp_path_factory.mktemp("day") / "day")


@pytest.fixture(scope="module")
def day_data(day) -> PageData:
    return read_page_data(day)


# ---- the numbers of the pictures


def test_a_day_is_shown_by_the_hour(day_data):
    assert day_data.axis == TimeAxis(START_S, HOUR_S, 24)
    assert stretch(day_data.axis) == "each hour"
    marks = time_marks(day_data.axis)
    assert marks.names[1] == "2024-10-04 01:00"
    assert list(marks.marks)[:3] == [(0.0, "00:00"), (4.0, "04:00"), (8.0, "08:00")]


def test_the_pictures_over_time_add_up_to_the_figures(day_data):
    metrics, rows = day_data.report.values, day_data.occupancy
    assert [row["nodes"] for row in rows] == [pytest.approx(1.0)] * 24
    assert [row["cost_usd"] for row in rows] == [pytest.approx(10.0)] * 24  # 5 ranks at $2
    assert sum(row["cost_usd"] for row in rows) == pytest.approx(metrics["cost_usd"])
    assert sum(row["income_usd"] for row in rows) == pytest.approx(metrics["revenue_usd"])
    assert [row["prefill_per_s"] for row in day_data.throughput] == [pytest.approx(800 / HOUR_S)] * 24
    assert [row["decode_per_s"] for row in day_data.throughput] == [pytest.approx((12 + 13 + 14) / HOUR_S)] * 24
    for row in day_data.throughput:
        assert (row["memory"], row["disk"], row["computed"]) == pytest.approx((75, 25, 300))


def test_work_that_spans_several_hours_is_spread_over_them(tmp_path):
    # one step and one prompt from 00:30 to 03:00; nodes are held from 00:00 to 04:00 and from 05:00 to 06:00
    at = START_S + HOUR_S / 2
    steps = [step("a", "prefill", 2.5 * HOUR_S, new=1000, cached=0, output=1, start_s=at)]
    run = write_run(
        tmp_path / "r",
        steps=steps,
        requests=[request(0, 1000, 1, at + 2.5 * HOUR_S, at + 2.5 * HOUR_S, admitted_s=at)],
        nodes=[
            session("a", START_S, START_S + 4 * HOUR_S, prefill_s=at, node="n1"),
            session("b", START_S + HOUR_S, START_S + 2 * HOUR_S, ranks=2, node="n2"),
            session("c", START_S + 5 * HOUR_S, START_S + 36 * HOUR_S, node="n1"),
        ],
        **PRICES,
    )
    data = read_page_data(run)
    assert data.axis is not None
    assert (data.axis.width_s, data.axis.num_bins) == (HOUR_S, 36)
    assert [row["computed"] for row in data.throughput[:4]] == pytest.approx([200, 400, 400, 0])
    assert [row["prefill_per_s"] * HOUR_S for row in data.throughput[:4]] == pytest.approx([200, 400, 400, 0])
    assert [row["nodes"] for row in data.occupancy[:6]] == pytest.approx([1, 2, 1, 1, 0, 1])
    assert [row["cost_usd"] for row in data.occupancy[:6]] == pytest.approx([2, 6, 2, 2, 0, 2])
    assert sum(row["income_usd"] for row in data.occupancy) == pytest.approx(data.report.values["revenue_usd"])


def test_ranks_and_experts_by_their_load(day_data):
    assert [(row["rank"], row["role"], row["prefill_tokens"]) for row in day_data.rank_work] == [
        (0, "prefill", 7200),
        (1, "prefill", 7200),
        (2, "decode", 0),
        (3, "decode", 0),
        (4, "decode", 0),
    ]
    assert {row["share"] for row in day_data.rank_times} == {0.5}
    assert len(day_data.rank_times) == 5 * 24
    assert [row["tokens"] for row in day_data.expert_tokens] == [10, 20, 30, 40] * 2
    document = page([day_data])
    assert "rank n1 · 4 (decode), KV attended" not in document  # a tooltip names the line first
    assert "KV attended, rank n1 · 4 (decode): 1.25 × mean" in document  # 500 / 400
    assert "layer 2, expert 3: 1.60 × mean" in document


def test_the_revenue_is_split_by_kind_of_tokens(day_data):
    (parts,) = day_data.revenue
    # 24 prompts of 400 tokens, 100 of them cached, with 15 tokens of answer
    assert parts == pytest.approx(
        {"cached_input": 2400 * 0.14e-6, "computed_input": 7200 * 0.55e-6, "output": 360 * 2.19e-6}
    )
    assert sum(parts.values()) == pytest.approx(day_data.report.values["revenue_usd"])
    assert "revenue of cached input: $0.000336" in page([day_data])


def test_lengths_of_answers_and_of_thinking_are_columns(tmp_path):
    thinks = {"reasoning_tokens": 9, "structured_valid": True, "mean_logprob": -0.25}
    requests = [request(0, 4, 10, **thinks), request(1, 4, 20), request(2, 4, 21)]
    document = page([read_page_data(write_run(tmp_path / "r", requests=requests))])
    for told in ("8 to 11 tokens: rows 1", "12 to 15 tokens: rows 0", "16 to 23 tokens: rows 2", "Length of thinking"):
        assert told in document
    for told in ("valid structured outputs", "100.0 %", "1 of 1; 0 cut at max_tokens", "-0.25"):
        assert told in document
    answered = [request(0, 4, 10), request(1, 4, 20)]
    plain = page([read_page_data(write_run(tmp_path / "plain", requests=answered))])
    assert "Length of answers" in plain
    assert "Length of thinking" not in plain
    assert "What is known of answers" not in plain


def test_many_ranks_share_lines_of_the_picture(tmp_path):
    steps = [
        step("a", "decode", 0.5, new=1, cached=0, output=1, rank=rank, start_s=0.25)
        for rank in range(0, 100, 2)  # every other rank of a line
    ] + [step("a", "prefill", 1.0, new=0, cached=0, output=0, rank=rank, start_s=0) for rank in range(1, 100, 2)]
    run = write_run(tmp_path / "r", steps=steps, nodes=[session("a", 0, 1, ranks=100, prefill_s=0)])
    data = read_page_data(run)
    assert len(data.rank_work) == 100
    assert {row["line"] for row in data.rank_times} == set(
        range(33)
    )  # three ranks each; the last one alone ran no token
    middle = [row["share"] for row in data.rank_times if row["bin"] == 10]
    assert middle[0] == pytest.approx(2 / 3)
    assert middle[1] == pytest.approx(1 / 3)
    assert "n1 · 0 to n1 · 2, second 0.5: 66.7%" in page([data])


@pytest.mark.parametrize("length_s", [0.0, 0.003, 1.0, 4.6, 47.9, 3000.0, 9e3, 86_400.0, 1e6, 1e8])
@pytest.mark.parametrize("start_s", [0.0, 1_700_000_123.4])
def test_the_time_axis_covers_the_run(start_s, length_s):
    axis = time_axis(start_s, start_s + length_s, MAX_BINS)
    assert 1 <= axis.num_bins <= MAX_BINS
    assert axis.start_s <= start_s
    assert start_s + length_s <= axis.start_s + axis.num_bins * axis.width_s + 1e-6
    marks = time_marks(axis)
    assert len(marks.names) == axis.num_bins
    assert len(marks.marks) <= 8
    assert all(0 <= place <= axis.num_bins for place, _ in marks.marks)


def test_axis_numbers_are_round_and_reach_the_largest():
    assert charts.nice_steps(278) == [0, 100, 200, 300]
    assert charts.nice_steps(0.037) == pytest.approx([0, 0.01, 0.02, 0.03, 0.04])
    assert charts.nice_steps(0) == [0, 1]
    for largest in (1e-7, 0.3, 1, 7, 99.999, 1e5, 7.7e12):
        steps = charts.nice_steps(largest)
        assert steps[-1] >= largest * (1 - 1e-9)
        assert 2 <= len(steps) <= 5
    assert [charts.short(value) for value in (0, 950, 12_000, 3.5e6, 0.02, 8e12)] == [
        "0", "950", "12k", "3.5M", "0.02", "8T",
    ]  # fmt: skip


def test_columns_are_as_high_as_their_values():
    # 60 of 80 and 20 of 80 units upon each other, then nothing
    axis = Axis(["first", "second"], [(0, "0")])
    series = [Series("a", "s0", [60, None]), Series("b<", "s1", [20, None])]
    drawn = charts.columns("k", "title & more", axis, series, "{:g} units".format)
    heights = {kind: float(high) for kind, high in re.findall(r'class="(s\d)" .*?height="([\d.]+)"', drawn)}
    assert heights["s0"] == pytest.approx(3 * heights["s1"], abs=0.02)
    assert heights["s0"] + heights["s1"] == pytest.approx(charts.PLOT_HEIGHT, abs=0.02)
    assert "first: a 60 units, b&lt; 20 units" in drawn
    assert "second: nothing" in drawn
    assert "title &amp; more" in drawn


def test_large_heat_maps_have_a_tooltip_per_line():
    values = [[float(column == row) for column in range(256)] for row in range(58)]
    axis = Axis([f"expert {column}" for column in range(256)], [])
    drawn = charts.heat_map("k", "t", [f"layer {row}" for row in range(58)], axis, values, 1.0, "{:g}".format)
    assert drawn.count("<title>layer") == 58
    assert "layer 7: most at expert 7, 1" in drawn
    assert len(drawn) < 600_000


def tiles_of(document: str) -> list[str]:
    return re.findall(r"<dt>([^<]*)</dt><dd>[^<]*</dd><dd class=\"note\">", document)


def test_the_first_tiles_are_what_engines_are_compared_by(tmp_path, day_data):
    first = ["rows", "errors", "wall time", "rows/s", "tokens/s", "cache hits"]
    money = ["cost", "GPU-hours", "cost per M", "revenue", "cost profit margin", "gross margin"]
    assert tiles_of(page([day_data])) == first + money
    unpriced = page([read_page_data(group_run(tmp_path / "r", prices={}))])
    assert tiles_of(unpriced) == first
    assert "profit" not in unpriced[: unpriced.index("All figures")]


def test_a_single_column_is_no_picture(tmp_path):
    # one second of one node, and answers of one length
    steps = [step("a", "decode", 0.5, new=1, cached=0, output=1, start_s=0.25)]
    run = write_run(
        tmp_path / "r", steps=steps, requests=[request(0, 4, 10, 0, 0.1)], nodes=[session("a", 0, 0.001)], **PRICES
    )
    data = read_page_data(run)
    assert data.axis is not None
    assert data.axis.num_bins == 1
    drawn = re.findall(r'<svg class="chart".*?<title id="r0-(\w+)-title"', page([data]))
    assert not {"prefill", "decode", "hits", "nodes", "money", "rows"} & set(drawn)


def test_nodes_have_a_picture_where_there_were_several(tmp_path, day_data):
    assert "Nodes held over time" not in page([day_data])
    nodes = [session("a", 0, 9, prefill_s=0, node="n1"), session("b", 3, 9, prefill_s=3, node="n2")]
    steps = [step("a", "decode", 0.5, new=1, cached=0, output=1, start_s=0.25)]
    assert "Nodes held over time" in page([read_page_data(write_run(tmp_path / "r", nodes=nodes, steps=steps))])


def test_prompts_of_examples_are_shown_as_the_model_got_them_and_do_nothing(tmp_path):
    hostile = "</dd></dl><script>window.owned = 1</script><img src=x onerror='owned()'>"
    long = "word " * 900 + "the end"
    rows = {"id": ["a", "b", "c"], "prompt": [hostile, "plain", long]}
    write_shard(tmp_path / "prompts" / "p.parquet", rows)
    job = write_job(tmp_path, model={"path": str(SAMPLE_MODEL)}, sampling={"max_tokens": 2})
    assert batchinfer("run", job).code == 0
    data = read_page_data(tmp_path / "run")
    assert [row.id for row in data.examples] == ["a", "b", "c"]
    assert hostile in data.examples[0].prompt
    assert data.examples[2].prompt.endswith("word the end")
    assert "tokens in all" in data.examples[2].prompt
    assert dict(data.settings)["sampling"] == "max_tokens 2, greedy"
    assert dict(data.settings)["command"] == f"batchinfer run {tmp_path / 'run'}"
    document = page([data])
    assert "&lt;/dl&gt;&lt;script&gt;window.owned = 1" in document
    assert not re.findall("<script|<img|onerror='owned", document)
    assert len(document.split("the end")[0].split("word ")) < 400
    # without the model, or with a damaged file of tokens, the reason is in place of the prompt
    tokens = tmp_path / "run" / "tokens" / "00000.parquet"
    tokens.write_bytes(tokens.read_bytes()[:-1] + b"?")
    assert "not shown: " in page([read_page_data(tmp_path / "run")])


def test_two_runs_stand_side_by_side(tmp_path, day):
    other = group_run(tmp_path / "other", hours=12, prices={})
    ended = batchinfer("report", day, other, "--compare", "--html", tmp_path / "both.html")
    assert ended.code == 0, ended.err
    document = (tmp_path / "both.html").read_text()
    heads = re.findall(r"<h1>(.*?)</h1>", document)
    assert heads == ["Two runs side by side", "<bdi>before: day</bdi>", "<bdi>after: other</bdi>"]
    assert re.search(r"Rows: output rows.*?>25<.*?>13<.*?>-48.0 %<", document, re.DOTALL)
    assert re.findall(r'class="run"><bdi>(.*?)</bdi>', document)[:4] == ["before: day", "after: other"] * 2
    assert document.count("Prefill throughput</h3>") == 2
    assert "not in this run" in document  # the picture of money
    told = batchinfer("report", day, "--compare", "--html", tmp_path / "one.html")
    assert (told.code, "--compare takes two runs, but got 1" in told.err) == (2, True)


def test_runs_without_steps_sessions_or_prices_have_a_page(tmp_path):
    for name, parts in {
        "empty": {},
        "planned only": {"requests": [error_request(0)], "nodes": [session("p", 0, 1, ranks=0)]},
        "no steps": {"nodes": [session("a", 5, 5)], "gpu_hour": 2.0},
        "no prices": {"nodes": [session("a", 0, 9)], "steps": [step("a", "decode", 1, new=1, cached=0, output=1)]},
    }.items():
        document = page([read_page_data(write_run(tmp_path / name, **parts))])
        assert "nan" not in document.replace("nano", "")
        assert f"<h1><bdi>{name}</bdi></h1>" in document


def test_the_page_is_whole_or_not_written(day, tmp_path, monkeypatch):
    file = tmp_path / "page.html"
    write_page([day], file)
    whole = file.read_text()
    write_page([day], file)
    assert file.read_text() == whole  # nothing in it depends on the moment

    def fails(*_: Any) -> str:
        raise RuntimeError("in the middle")

    monkeypatch.setattr(page_file, "page", fails)
    with pytest.raises(RuntimeError):
        write_page([day], file)
    assert file.read_text() == whole
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


# ---- in a browser

# The contrast of every text with what is behind it, by the rule of WCAG 2
CONTRAST = """
(() => {
  const light = text => {
    const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = node => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (!colour.endsWith(', 0)') && colour !== 'transparent') return colour;
    }
    return 'rgb(255, 255, 255)';
  };
  const found = [];
  for (const node of document.body.querySelectorAll('*')) {
    if (node.localName === 'title' || ![...node.childNodes].some(c => c.nodeType === 3 && c.data.trim())) continue;
    const style = getComputedStyle(node);
    const [a, b] = [light(node.ownerSVGElement ? style.fill : style.color), light(behind(node))].sort((x, y) => y - x);
    found.push({what: node.outerHTML.slice(0, 80), ratio: (a + 0.05) / (b + 0.05)});
  }
  return found.sort((x, y) => x.ratio - y.ratio).slice(0, 1);
})()
"""


@pytest.fixture(scope="module")
def real_run(tmp_path_factory) -> Path:
    """A job of the random model on this machine, some rows bad."""
    folder = tmp_path_factory.mktemp("real")
    write_questions(folder / "prompts", (9, 4))
    write_shard(folder / "prompts" / "bad.parquet", {"id": ["b1", "b2"], "prompt": [None, ""], "extra": [1, 2]})
    assert batchinfer("run", write_job(folder, pricing=PRICES)).code == 3
    return folder / "run"


@pytest.fixture(scope="module")
def pages(day, real_run, tmp_path_factory) -> dict[str, str]:
    """Addresses of pages: of a made-up day, of a real run, and of both."""
    folder = tmp_path_factory.mktemp("pages")
    kinds = {"day": [day], "real": [real_run], "both": [day, real_run], "compared": [day, real_run, "--compare"]}
    for name, runs in kinds.items():
        ended = batchinfer("report", *runs, "--html", folder / f"{name}.html")
        assert (ended.code, ended.out.strip()) == (0, str(folder / f"{name}.html"))
    return {file.stem: file.as_uri() for file in folder.iterdir()}


@pytest.mark.system  # make test: its text, above
@pytest.mark.parametrize("name", ["day", "real", "both", "compared"])
@pytest.mark.parametrize(("width", "dark"), [(1400, False), (400, True), (375, False)])
def test_the_page_in_a_browser(browser: Browser, pages, name, width, dark):
    browser.open(pages[name], width=width, dark=dark)
    assert browser.complaints() == []
    assert [url for url in browser.requested() if not url.startswith("data:")] == [pages[name]]
    assert browser.evaluate("document.scripts.length") == 0
    # it fits: nothing sticks out to the side, every chart has its room
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    boxes = browser.evaluate(
        "[...document.querySelectorAll('svg.chart')].map(s => [s.getBoundingClientRect().left, "
        "s.getBoundingClientRect().right, s.getBoundingClientRect().height])"
    )
    assert all(0 <= left < right <= width and high > 30 for left, right, high in boxes)
    # it can be read: letters of at least nine pixels, and enough contrast
    smallest = browser.evaluate(
        "Math.min(...[...document.querySelectorAll('svg.chart text')].map(t => parseFloat(getComputedStyle(t).fontSize)"
        " * t.ownerSVGElement.clientWidth / t.ownerSVGElement.viewBox.baseVal.width))"
    )
    assert smallest >= 9
    sizes = browser.evaluate(
        "[...new Set([...document.querySelectorAll('svg.chart')].map(s => Math.round(s.clientWidth)))]"
    )
    assert len(sizes) == 1  # one width, so one size of text
    (worst,) = browser.evaluate(CONTRAST)
    assert worst["ratio"] >= 4.5, worst
    # and by people who cannot see the pictures: names, and tables of the same numbers
    names = browser.evaluate(
        "[...document.querySelectorAll('svg.chart[role=img]')].map(s => "
        "document.getElementById(s.getAttribute('aria-labelledby')).textContent)"
    )
    assert len(names) == len(boxes)
    assert all(len(name) > 5 for name in names)
    ids = browser.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    assert browser.evaluate("document.querySelectorAll('table caption').length") >= 8


@pytest.mark.system  # make test: its text, above
def test_every_picture_is_there(browser: Browser, pages):
    browser.open(pages["day"])
    charts_there = browser.evaluate("[...document.querySelectorAll('svg.chart')].map(s => s.id || s.firstChild.id)")
    names = ["prefill", "decode", "hits", "seconds", "cost", "money", "ranks", "load", "kv_tokens", "num_requests",
             "balance", "experts"]  # fmt: skip
    assert charts_there == [f"r0-{name}-title" for name in names]
    headings = browser.evaluate("[...document.querySelectorAll('h2')].map(h => h.textContent)")
    assert headings == [
        "Settings", "Examples", "Over time", "Time and cost", "Load", "Plan", "Slowest rows", "Failed rows",
        "Unreadable shards", "All figures",
    ]  # fmt: skip
    text = browser.evaluate("document.body.innerText")
    for words in ("answer 0", "the prompt is null", "no footer", "s.parquet row 24", "$240.00"):
        assert words in text
    assert browser.evaluate("document.querySelectorAll('svg rect.s4').length") >= 24  # a cost column an hour


@pytest.mark.system  # make test: its text, above
def test_the_page_shows_the_figures_of_the_run(browser: Browser, pages, real_run):
    browser.open(pages["real"])
    metrics = read_report(real_run).values
    tiles = browser.evaluate("[...document.querySelectorAll('.tile')].map(t => t.innerText)")
    assert f"\n{metrics['input_tokens']:,} in, " in "\n".join(tiles)
    assert "errors\n2\n" in "\n".join(tiles)
    rows = browser.evaluate("[...document.querySelectorAll('tbody tr')].map(r => r.innerText)")
    assert any("bad.parquet row 0" in row and "null" in row for row in rows)
    for figure in PUBLISHED:
        assert any(row.startswith(f"{figure.key}\t") for row in rows), figure.key


@pytest.mark.system  # make test: its text, above
def test_a_table_opens_without_a_script(browser: Browser, pages):
    browser.open(pages["day"])
    shown = "document.querySelector('details table').checkVisibility()"
    assert not browser.evaluate(shown)
    browser.evaluate("document.querySelector('summary').click()")
    assert browser.evaluate(shown)


# texts of pictures that stick out of their picture, or run into another one of their line
UNREADABLE = """
[...document.querySelectorAll('svg.chart')].flatMap(svg => {
  const edge = svg.getBoundingClientRect();
  const boxes = [...svg.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]);
  const isCut = box => box.left < edge.left - 1 || box.right > edge.right + 1;
  const isIn = (a, b) => Math.abs(a.bottom - b.bottom) < 1 && a.left < b.right && b.left < a.right;
  const seen = ([, box], i) => isCut(box) || boxes.slice(0, i).some(([, other]) => isIn(box, other));
  return boxes.filter(seen).map(([text]) => text);
})
"""


@pytest.mark.system  # make test: its text, above
@pytest.mark.parametrize("domain", ["", ".gpu.cluster.example.org"])
@pytest.mark.parametrize("width", [1200, 375])
def test_names_of_nodes_have_room(browser: Browser, tmp_path, domain, width):
    nodes = [f"node{number:03d}{domain}" for number in range(64)]
    run = write_run(
        tmp_path / "r",
        steps=[
            step(name, "decode", 0.5, new=1, cached=0, output=1, rank=rank, start_s=0.25, kv_tokens=9)
            for name in nodes
            for rank in range(2)
        ],
        nodes=[session(name, 0, 1, ranks=2, prefill_s=0, node=name) for name in nodes],
    )
    write_page([run], tmp_path / "r.html")
    browser.open((tmp_path / "r.html").as_uri(), width=width)
    assert browser.evaluate(UNREADABLE) == []
    marks = browser.evaluate("[...document.querySelectorAll('svg.chart text')].map(t => t.textContent)")
    assert "node000 · 0" in marks
    assert f"node063{domain} · 1" in browser.evaluate("document.body.textContent")


@pytest.mark.system  # make test: its text, above
def test_a_printed_page_has_all_rows_of_its_tables_and_the_colours_of_its_legends(browser: Browser, pages):
    browser.open(pages["day"])
    hidden = "[...document.querySelectorAll('.scroll')].filter(s => s.scrollHeight > s.clientHeight + 1).length"
    assert browser.evaluate(hidden) > 0
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.evaluate(hidden) == 0
    assert browser.evaluate("getComputedStyle(document.querySelector('.swatch')).printColorAdjust") == "exact"
