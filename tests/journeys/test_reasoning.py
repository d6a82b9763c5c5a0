"""Thinking before an answer: separated from the text, limited by a budget, and followed by a constraint."""

from __future__ import annotations

import json
import re
import shutil

import pyarrow as pa
import pytest

from batchinfer.data.tokenizer import load_tokenizer
from support.jobs import batchinfer, output_bytes, outputs, question, write_job, write_shard
from support.paths import RANDOM_MODEL

NUM_ROWS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The random model with tokens for thinking: two that it uses often anyway, so that it thinks and ends it."""
    folder = shutil.copytree(RANDOM_MODEL, tmp_path_factory.mktemp("thinking") / "model")
    text = (folder / "tokenizer.json").read_text()
    tokenizer = json.loads(text)
    ids = tokenizer["model"]["vocab"]
    names = {ids[token]: token for token in ids}
    for place, token in ((1000, "<think>"), (1001, "</think>")):
        del tokenizer["model"]["vocab"][names[place]]
        tokenizer["model"]["vocab"][token] = place
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": place, "content": token, **flags})
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in tokenizer["model"]["merges"]]
    gone = {names[1000], names[1001]}
    tokenizer["model"]["merges"] = [merge for merge in merges if not {*merge, "".join(merge)} & gone]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def run(folder, model, name, *, sampling=None, how=None, output=None, suffix="<think>", **cluster):
    prompts = [f"{question(row)}{suffix}" for row in range(NUM_ROWS)]
    columns = {"id": [*range(NUM_ROWS)], "prompt": prompts}
    if how is not None:
        columns["how"] = how
    write_shard(folder / "prompts" / "part-0.parquet", columns)
    job = write_job(
        folder,
        name=f"{name}.toml",
        input={"id": "id", "sampling": "how" if how is not None else None},
        model={"path": str(model), "dtype": "float32"},
        sampling={"max_tokens": 40, "temperature": 1.0, "seed": 3, **(sampling or {})},
        output={"dir": name, **(output or {})},
        cluster=cluster,
    )
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    (rows,) = outputs(folder / name).values()
    return rows


END = {"logit_bias": {"1001": 4.0}}  # so that it often ends its thinking


def test_thinking_has_columns_of_its_own_and_truncation_is_visible(tmp_path, model):
    plain = run(tmp_path, model, "plain", sampling=END)
    assert "reasoning" not in plain[0]
    rows = run(tmp_path, model, "apart", sampling=END, output={"reasoning": "auto"})
    tokenizer = load_tokenizer(model)
    ended = cut = 0
    for whole, row in zip(plain, rows, strict=True):
        assert row["token_ids"] == whole["token_ids"]
        if 1001 in row["token_ids"]:
            ended += 1
            at = row["token_ids"].index(1001)
            assert row["reasoning_tokens"] == at + 1
            assert row["reasoning"] == tokenizer.decode(row["token_ids"][:at]).strip()
            assert whole["text"].endswith(row["text"])
            assert "</think>" not in row["reasoning"]
        else:
            cut += 1
            assert row["finish_reason"] in ("length", "stop")
            assert row["text"] == ""
            assert row["reasoning_tokens"] == len(row["token_ids"])
    assert ended > 3
    assert cut > 0
    known = json.loads(batchinfer("report", tmp_path / "apart", "--json").out)["reasoning"]
    mean = sum(row["reasoning_tokens"] for row in rows) / NUM_ROWS
    thoughts = [row["finish_reason"] for row in rows if row["reasoning_tokens"] == row["completion_tokens"]]
    counts = {"cut": thoughts.count("length"), "ended": thoughts.count("stop")}
    assert sum(counts.values()) == cut
    shares = {f"{name}_share": count / NUM_ROWS for name, count in counts.items()}
    assert known == {"rows": NUM_ROWS, "mean_tokens": mean, **counts, **shares}


@pytest.mark.parametrize(
    "suffix", ["", " What is <think> for?", pytest.param("<think>hm</think>", marks=pytest.mark.slow)]
)
def test_an_answer_that_does_not_begin_in_thinking_is_all_text(tmp_path, model, suffix):
    how = {"output": {"reasoning": "auto"}, "suffix": suffix, "sampling": {"logit_bias": {"1000": -100.0}}}
    rows = run(tmp_path, model, "text", **how)
    assert {row["reasoning"] for row in rows} == {None}
    assert {row["reasoning_tokens"] for row in rows} == {0}


def test_by_deepseek_r1_every_answer_begins_in_thinking_unless_its_prompt_ended_it(tmp_path, model):
    rows = run(tmp_path, model, "r1", output={"reasoning": "deepseek_r1"}, suffix="")
    assert all(row["reasoning"] for row in rows)
    rows = run(tmp_path, model, "r1-ended", output={"reasoning": "deepseek_r1"}, suffix="</think>\n")
    assert {row["reasoning"] for row in rows} == {None}


def test_a_message_that_is_continued_may_be_in_its_thinking(tmp_path, model):
    (tmp_path / "prompts").mkdir()
    chats = [[{"role": "assistant", "content": content}] for content in ("<think>Hm,", "<think>Hm.</think>So")]
    lines = [json.dumps({"id": row, "messages": chat}) for row, chat in enumerate(chats)]
    (tmp_path / "prompts" / "part-0.jsonl").write_text("\n".join(lines))
    job = write_job(
        tmp_path,
        input={"files": ["prompts/*.jsonl"], "messages": "messages", "prompt": None, "continue_final_message": True},
        model={"path": str(model)},
        sampling={"max_tokens": 4, "logit_bias": {"1000": -100.0}},
        output={"reasoning": "auto"},
    )
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    (rows,) = outputs(tmp_path / "run").values()
    assert [row["reasoning"] is None for row in rows] == [False, True]


def test_a_constraint_begins_after_the_thinking_however_the_job_is_run(tmp_path, model):
    asked = {"choice": ["yes", "no"]}
    kind = pa.struct(
        [("structured_outputs", pa.struct([("choice", pa.list_(pa.string()))])), ("thinking_budget", pa.int32())]
    )
    how = pa.array([{"structured_outputs": asked, "thinking_budget": row} for row in range(NUM_ROWS)], kind)
    rows = run(tmp_path, model, "one", how=how, output={"reasoning": "auto"})
    for row in rows:
        assert row["text"] in asked["choice"]
        assert row["reasoning_tokens"] <= row["row"] + 1
        assert re.search(r"[^yesno]", row["reasoning"]) or row["row"] < 3
    for name, cluster in {
        "2": {"prefill_ranks": 2},
        "1+2": {"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 2},
    }.items():
        run(tmp_path, model, name, how=how, output={"reasoning": "auto"}, **cluster)
        assert output_bytes(tmp_path / name) == output_bytes(tmp_path / "one")


@pytest.mark.all  # make test: however the job is run, above
def test_a_constraint_begins_after_thinking_that_the_answer_begins_itself(tmp_path, model):
    choice = {"structured_outputs": {"choice": ["yes", "no"]}}
    for bias, thinks in ((100.0, True), (-100.0, False)):
        how = {**choice, "logit_bias": {"1000": bias, "1001": 4.0}, "thinking_budget": 12}
        rows = run(tmp_path, model, f"by {bias}", sampling=how, output={"reasoning": "auto"}, suffix="")
        assert {row["text"] for row in rows} <= {"yes", "no"}
        assert (
            {row["token_ids"][0] == 1000 for row in rows} == {row["reasoning"] is not None for row in rows} == {thinks}
        )
    rows = run(tmp_path, model, "nobody looks", sampling={**choice, "logit_bias": {"1000": 100.0}}, suffix="")
    assert {row["text"] for row in rows} <= {"yes", "no"}
    rows = run(tmp_path, model, "nobody looks for it", sampling=choice)
    assert {row["text"] for row in rows} <= {"yes", "no"}


def test_a_tokenizer_without_an_end_of_thinking_is_refused(tmp_path):
    write_shard(tmp_path / "prompts" / "part-0.parquet", {"id": [1], "prompt": ["x"]})
    ended = batchinfer("plan", write_job(tmp_path, output={"reasoning": "deepseek_r1"}))
    assert ended.code == 2
    assert "output.reasoning is 'deepseek_r1', but the model's tokenizer has no token </think>" in ended.err
    words = "thinking_budget is 9, but the model's tokenizer has no token </think> or [/THINK]; leave it out"
    ended = batchinfer("plan", write_job(tmp_path, sampling={"thinking_budget": 9}))
    assert (ended.code, f"sampling.{words}" in ended.err) == (2, True)
    how = pa.array([{"thinking_budget": None}, {"thinking_budget": 9}], pa.struct([("thinking_budget", pa.int32())]))
    write_shard(tmp_path / "prompts" / "part-0.parquet", {"id": [1, 2], "prompt": ["x", "y"], "how": how})
    job = write_job(tmp_path, input={"id": "id", "sampling": "how"})
    assert batchinfer("run", job).code == 3
    assert [row["error"] for row in outputs(tmp_path / "run")["part-0.parquet"]] == [None, f"how.{words}"]
