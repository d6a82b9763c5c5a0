"""Texts that want to be more than text, in answers, errors, ids and names: on a terminal, in JSON, on the page."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from batchinfer.report.page.data import TEXT_CHARS, read_page_data
from batchinfer.report.page.markup import shown
from batchinfer.report.page.page import page
from support.browser import Browser
from support.jobs import batchinfer, write_job, write_shard
from support.runs import error_output, error_request, output, request, session, step, write_run

LONG = "<b>" + "x" * 1_000_000
HOSTILE = [
    "<script>window.owned = 1; document.title = 'owned'</script>",
    "<img src=x onerror='window.owned = 2'><svg onload='window.owned = 3'>",
    "</td></tr></table></main></title></style><h1>owned</h1>",
    "\"' onmouseover='window.owned = 4' x='",
    "<a href=\"javascript:window.owned = 5\">click</a><iframe src='https://example.com/'></iframe>",
    "<style>body { display: none }</style><link rel=stylesheet href=https://example.com/x.css>",
    "&lt;script&gt; &amp; ${7*7} {{7*7}} <!-- --> ]]> %s {0}",
    "\x1b[2J\x1b[31mred\x1b]0;owned\x07 \x9b31m bell\x07 back\x08\x08 null\x00 delete\x7f",
    "line\nbreak\r\ntab\tvertical\x0b form\x0c next\x85 separator\u2028 paragraph\u2029",
    "\u202egnp.exe\u202c \u2067isolate\u2069 \u200f\u200e \u061c mark",
    "שלום עולם مرحبا بالعالم",
    "Z\u0311\u0303\u0314\u036a" * 100,
    "\ufeff\u200b\u200d\u2060 \U000e0041 \ufff9 \U0010ffff",
    "批量推理 " * 50,
    LONG,
]
# one of these in the text of a page or terminal would act on it
ACTING = [
    *map(chr, (*range(0x20), *range(0x7F, 0xA0))),
    *"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f",
]
ACTING = [char for char in ACTING if char != "\n"]


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory) -> Path:
    """Every text as an answer, as an error, as an id and in a kept column; and a shard, a model and a run to match."""
    shard = "<script>owned()<_script>\x1b[31m.parquet"
    rows, requests = [], []
    for number, text in enumerate(HOSTILE):
        rows.append(output(2 * number, id=text[:500], text=text, kept=text))
        requests.append(request(2 * number, 4, 2, 1, 2 + number, admitted_s=0.5))
        rows.append(error_output(2 * number + 1, text) | {"id": f"e{number}"})
        requests.append(error_request(2 * number + 1))
    return write_run(
        tmp_path_factory.mktemp("hostile") / "<i>run\x1b[1m",
        requests=requests,
        steps=[step("a", "decode", 3.0, new=9, cached=0, output=9, start_s=1.0)],
        nodes=[session("a", 0, 30, prefill_s=1, node="<b>host</b>\x1b[7m")],
        outputs={shard: rows},
        kept=[pa.field("kept", pa.string())],
        shards=[
            {"index": 0, "path": f"/data/{shard}", "name": shard, "problem": None},
            {"index": 1, "path": "/data/\u202e<u>.parquet", "name": "u", "problem": HOSTILE[0]},
        ],
        model="/models/<script>alert(1)</script>",
    )


def acting(text: str) -> set[str]:
    return {char for char in ACTING if char in text}


# ---- terminal


@pytest.mark.parametrize(
    "options",
    [[], ["--together"], ["--sql", "SELECT * FROM outputs"], ["--sql", 'SELECT text AS "<\x1b[1m" FROM outputs']],
)
def test_a_terminal_gets_printable_lines(hostile_run, options):
    ended = batchinfer("report", hostile_run, *options)
    assert ended.code == 0
    assert acting(ended.out) == set()
    assert max(map(len, ended.out.splitlines())) < 700
    assert "\\x1b[" in ended.out


def test_the_panel_keeps_its_width_and_names_every_error(hostile_run):
    panel = batchinfer("report", hostile_run).out
    assert "Errors" in panel
    assert "and 10 other texts" in panel
    assert len(panel) < 10_000


@pytest.mark.parametrize("sql", ["SELECT error('\x1b[2J<script>')", 'SELECT * FROM "\x1b[31m\u202e"', "\x1b[2J"])
def test_an_error_message_is_harmless_too(hostile_run, sql):
    ended = batchinfer("report", hostile_run, "--sql", sql)
    assert ended.code == 2
    assert acting(ended.err) == set()


def test_json_keeps_texts_as_they_are(hostile_run):
    sql = "SELECT text FROM outputs WHERE status = 'ok' ORDER BY row"
    out = batchinfer("report", hostile_run, "--json", "--sql", sql).out
    assert [row["text"] for row in json.loads(out)] == HOSTILE


def test_a_real_job_with_hostile_prompts_and_ids_is_reported(tmp_path):
    prompts = [text[:200] for text in HOSTILE] + [LONG, None]
    ids = [text[:100] for text in HOSTILE] + ["long", "\x1b[31mnull"]
    write_shard(tmp_path / "prompts" / "<b>a\u202e.parquet", {"id": ids, "prompt": prompts})
    ended = batchinfer("run", write_job(tmp_path, input={"id": "id"}, sampling={"max_tokens": 2}))
    assert ended.code == 3
    assert acting(ended.out) == set()
    assert acting(ended.err) <= {"\r"}  # the progress line goes back to its start
    assert batchinfer("report", tmp_path / "run", "--html", tmp_path / "page.html").code == 0
    assert acting((tmp_path / "page.html").read_text()) == set()


# ---- page


@pytest.mark.parametrize("text", HOSTILE)
def test_shown_text_has_no_element_of_its_own(text):
    found = shown(text, 200)
    inner = found.replace("<bdi>", "").replace("</bdi>", "").replace("<br>", "").split(" <span class")[0]
    assert not set(inner) & set("<>\"'")
    assert acting(found) == set()
    assert len(found) < 3_000
    assert ("characters in all" in found) == (len(text) > 200)


def test_the_page_of_hostile_rows_is_inert(browser: Browser, hostile_run, tmp_path):
    file = tmp_path / "page.html"
    assert batchinfer("report", hostile_run, "--html", file).code == 0
    document = file.read_text()
    assert acting(document) == set()
    assert len(document) < 400_000
    browser.open(file.as_uri(), width=375)
    assert browser.evaluate("window.owned") is None
    assert browser.evaluate("document.title").startswith("batchinfer report: <i>run\\x1b[1m")
    elements = set(browser.evaluate("[...new Set([...document.querySelectorAll('*')].map(e => e.localName))]"))
    assert not elements & {"script", "img", "iframe", "a", "i", "b", "object", "form", "input", "font"}
    assert browser.evaluate("[...document.querySelectorAll('*')].flatMap(e => e.getAttributeNames())"
                            ".filter(n => n.startsWith('on') || n === 'style' || n === 'src')") == []  # fmt: skip
    assert browser.complaints() == []
    assert [url for url in browser.requested() if not url.startswith("data:")] == [file.as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") <= 375
    assert browser.evaluate("document.querySelectorAll('h1').length") == 1
    texts = browser.evaluate("[...document.querySelectorAll('td.text')].map(cell => cell.textContent)")
    assert HOSTILE[0] in texts
    assert any(text.startswith("\\x1b[2J\\x1b[31mred") for text in texts)
    assert any(text.startswith("\\u202egnp.exe") for text in texts)
    assert any(text.endswith("… cut, 1,000,003 characters in all") for text in texts)


def test_only_the_start_of_a_long_text_is_read(hostile_run):
    data = read_page_data(hostile_run)
    assert max(len(row.text) for row in [*data.slowest, *data.failed]) == TEXT_CHARS
    assert max(row.text_chars for row in data.slowest) == len(LONG)


def test_the_policy_of_the_page_forbids_what_could_get_through(browser: Browser, hostile_run, tmp_path):
    # as if the escaping had a hole: even then nothing runs and nothing is loaded
    document = page([read_page_data(hostile_run)])
    file = tmp_path / "hole.html"
    file.write_text(document.replace("</main>", f"{HOSTILE[0]}{HOSTILE[1]}{HOSTILE[4]}</main>"))
    browser.open(file.as_uri())
    assert browser.evaluate("document.scripts.length") == 1
    assert browser.evaluate("window.owned") is None
    assert any("Content Security Policy" in complaint for complaint in browser.complaints())
    loaded = {event["params"]["requestId"] for event in browser.events if event["method"] == "Network.responseReceived"}
    sent = [event["params"] for event in browser.events if event["method"] == "Network.requestWillBeSent"]
    assert [
        one["request"]["url"] for one in sent if one["requestId"] in loaded and "example" in one["request"]["url"]
    ] == []
