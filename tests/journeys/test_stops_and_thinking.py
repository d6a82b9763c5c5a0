"""Whole jobs with stop strings and other ends, within a model's thinking and behind it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.jobs import batchinfer, output_bytes, outputs, write_job
from support.scripted_model import REROUTED, THINKING, write_scripted_model

MOST_TOKENS = 20
# first "E" "ND" "E " then an emoji in two halves
PLAIN = ("<u>", "E", "ND", "E ", b"\xf0\x9f", b"\x98\x80", "z", "</s>")
THOUGHT = "first step\n\nsecond"
WHOLE = "first step\n\nsecond </think>answer\n\nmore"
Row = tuple[str, dict[str, Any], tuple[Any, ...], tuple[Any, ...]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("scripted")


@pytest.fixture(scope="module")
def ids(folder):
    """The model's tokens: it thinks and answers; where the prompt says nothing a line break comes before <think>."""
    return write_scripted_model(folder / "model", THINKING, ("<a>", "\n", "<think>"), PLAIN)


@pytest.fixture(scope="module")
def rows(ids) -> dict[str, Row]:
    """By name: prompt, sampling, and (text, reasoning, finish_reason, stop_reason, tokens) by "auto" and by "none"."""
    stop: dict[str, Any] = {"stop": ["\n\n"]}
    never_ends = {"logit_bias": {str(ids["</think>"]): -100.0, str(ids["</s>"]): REROUTED}}
    step = ids["step\n\n"]
    in_thinking = ("first step", None, "stop", "\n\n", 2)
    no_thinking = ("ENDE 😀z", None, "stop", None, 7)
    return {
        "no stop": (
            *("<think>", {}),
            ("answer\n\nmore", THOUGHT, "stop", None, 7),
            (WHOLE, None, "stop", None, 7),
        ),
        "stop": ("<think>", stop, ("answer", THOUGHT, "stop", "\n\n", 5), in_thinking),
        "stop, included": (
            *("<think>", stop | {"include_stop_str_in_output": True}),
            ("answer\n\n", THOUGHT, "stop", "\n\n", 5),
            ("first step\n\n", None, "stop", "\n\n", 2),
        ),
        "two stops": (
            *("<think>", {"stop": ["n", "swer", "second"]}),
            ("a", THOUGHT, "stop", "n", 5),
            ("first step\n\nseco", None, "stop", "n", 3),
        ),
        "schema": (
            *("<think>", stop | {"structured_outputs": {"choice": ["yes"]}}),
            ("yes", THOUGHT, "stop", None, 7),
            ("yes", None, "stop", None, 3),
        ),
        "budget": (
            *("<think>", stop | {"thinking_budget": 2}),
            ("answer", "first step", "stop", "\n\n", 4),
            in_thinking,
        ),
        "thinks by itself": (
            *("<a>", {"stop": ["\n"]}),
            ("answer", THOUGHT, "stop", "\n", 7),
            ("", None, "stop", "\n", 1),
        ),
        "never ends its thinking": (
            *("<think>", stop | never_ends),
            ("", THOUGHT, "stop", None, 4),
            in_thinking,
        ),
        "stop token": (
            *("<think>", {"stop_token_ids": [step]}),
            ("", "first", "stop", str(step), 2),
            ("first ", None, "stop", str(step), 2),
        ),
        "the mark as a stop token": (
            *("<think>", {"stop_token_ids": [ids["</think>"]]}),
            ("", THOUGHT, "stop", str(ids["</think>"]), 4),
            ("first step\n\nsecond ", None, "stop", str(ids["</think>"]), 4),
        ),
        "cut": (
            *("<think>", stop | {"max_tokens": 3}),
            ("", THOUGHT, "length", None, 3),
            in_thinking,
        ),
        "cut at the mark": (
            *("<think>", stop | {"max_tokens": 4}),
            ("", THOUGHT, "length", None, 4),
            in_thinking,
        ),
        "cut at one": (
            *("<think>", stop | {"max_tokens": 1}),
            ("", "first", "length", None, 1),
            ("first ", None, "length", None, 1),
        ),
        "min_tokens": (
            *("<think>", stop | {"min_tokens": 5}),
            ("answer\n\nmore", THOUGHT, "stop", None, 7),
            (WHOLE, None, "stop", None, 7),
        ),
        "thinking ended by the prompt": (
            *("<think></think>", stop),
            ("answer", None, "stop", "\n\n", 1),
            ("answer", None, "stop", "\n\n", 1),
        ),
        "pieces": ("<u>", {"stop": ["ENDE", "END"]}, *2 * [("", None, "stop", "END", 2)]),
        "emoji": ("<u>", {"stop": ["😀"]}, *2 * [("ENDE ", None, "stop", "😀", 5)]),
        "half an emoji": ("<u>", {"stop": ["\ufffd"]}, *2 * [no_thinking]),
        "too early": ("<u>", {"stop": ["END"], "min_tokens": 2}, *2 * [no_thinking]),
    }


def run(folder, rows: dict[str, Row], name: str, *, reasoning: str = "auto", **cluster: Any) -> dict[str, tuple]:
    """Run the rows as a job, two samples of each; return what came out by the row's id."""
    lines = [
        {"id": row, "prompt": f"<s>{prompt}", "how": {"max_tokens": MOST_TOKENS} | sampling}
        for row, (prompt, sampling, *_) in rows.items()
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = write_job(
        folder,
        name=f"{name}.toml",
        input={"files": ["rows.jsonl"], "sampling": "how"},
        model={"path": "model"},
        sampling={"max_tokens": MOST_TOKENS, "n": 2},
        output={"dir": name, "reasoning": reasoning},
        cluster=cluster,
    )
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    (found,) = outputs(folder / name).values()
    assert len(found) == 2 * len(rows)
    keys = ("text", "reasoning", "finish_reason", "stop_reason", "completion_tokens")
    by_sample = [{row["id"]: tuple(row.get(key) for key in keys) for row in found[sample::2]} for sample in (0, 1)]
    assert by_sample[0] == by_sample[1]
    for row in found:
        assert row["completion_tokens"] == len(row["token_ids"])
        assert row.get("reasoning_tokens", 0) <= row["completion_tokens"]
        most_tokens = rows[row["id"]][1].get("max_tokens", MOST_TOKENS)
        assert (row["completion_tokens"] == most_tokens) or row["finish_reason"] == "stop"
    return by_sample[0]


@pytest.fixture(scope="module")
def apart(folder, rows) -> dict[str, tuple]:
    return run(folder, rows, "apart", speculate="off")


def test_stop_strings_count_behind_thinking_that_is_kept_apart(rows, apart):
    assert apart == {name: expected for name, (_, _, expected, _) in rows.items()}


def test_the_report_tells_answers_that_ended_in_their_thinking_from_those_cut_in_it(folder, rows, apart):
    figures = json.loads(batchinfer("report", folder / "apart", "--json").out)
    thinking = [row for row in outputs(folder / "apart")["rows.parquet"] if row["reasoning_tokens"]]
    assert len(thinking) == 2 * 14
    cut, ended = 2 * 3, 2 * 3
    mean = sum(row["reasoning_tokens"] for row in thinking) / len(thinking)
    assert figures["reasoning"] == {
        "rows": len(thinking),
        "mean_tokens": mean,
        "cut": cut,
        "cut_share": cut / len(thinking),
        "ended": ended,
        "ended_share": ended / len(thinking),
    }
    lines = [" ".join(line.split()) for line in batchinfer("report", folder / "apart").out.splitlines()]
    assert "cut in their thinking 21.4 % 6 without an answer" in lines
    assert "ended in their thinking 21.4 % 6 without an answer" in lines
    assert figures["output_tokens"] == 2 * sum(tokens for _, _, (*_, tokens), _ in rows.values())
    assert figures["wasted_tokens"] == 0


def test_stop_strings_count_everywhere_where_thinking_is_text(folder, rows):
    found = run(folder, rows, "text", reasoning="none")
    assert found == {name: expected for name, (*_, expected) in rows.items()}
    assert json.loads(batchinfer("report", folder / "text", "--json").out)["reasoning"]["rows"] == 0


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("drafts", {"speculate": "auto", "decode_requests": 2}),
        ("1+2", {"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 2}),
    ],
)
def test_however_the_job_is_run(folder, rows, apart, name, cluster):
    assert run(folder, rows, name, **cluster) == apart
    assert output_bytes(folder / name) == output_bytes(folder / "apart")
