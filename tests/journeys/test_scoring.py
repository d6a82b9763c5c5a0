"""Log-probabilities of prompts and of choices: those of transformers, however they are computed, each prompt once."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from batchinfer.plan.summary import read_summary
from batchinfer.rundir import RunDir
from support.checkpoints import edit_config, make_checkpoint
from support.jobs import answers, batchinfer, outputs, write_job, write_shard
from support.paths import RANDOM_MODEL

CLOSE = 1e-4
LENGTHS = (1, 2, 63, 64, 65, 130, 700, 3000)
LAYOUTS = {
    "one": {},
    "small steps": {"prefill_tokens": 96},
    "two": {"prefill_ranks": 2, "decode_ranks": 2, "overlap": True},
    "apart": {"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 1, "prefill_tokens": 512},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = shutil.copytree(RANDOM_MODEL, tmp_path_factory.mktemp("scoring") / "model")
    edit_config(folder, max_position_embeddings=4096)
    return folder


@pytest.fixture(scope="module")
def theirs(model):
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def logprobs_of(theirs, tokens):
    """[tokens, vocabulary] float64, of the token that comes next."""
    with torch.no_grad():
        return theirs(torch.tensor([tokens])).logits[0].double().log_softmax(-1)


def some_tokens(number, seed=0):
    """A prompt; all begin alike."""
    system, own = random.Random(0), random.Random(f"{seed} {number}")
    return [(system if place < 60 else own).randrange(1000) for place in range(number)]


def run(folder, model, name, *, columns, inputs, sampling, **parts):
    write_shard(folder / "prompts" / "part-0.parquet", columns)
    job = write_job(
        folder,
        name=f"{name}.toml",
        input={"prompt": None, "token_ids": "ids", **inputs},
        model={"path": str(model), "dtype": "float32"},
        sampling=sampling,
        output={"dir": name},
        **parts,
    )
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    (rows,) = outputs(folder / name).values()
    return rows


@pytest.mark.parametrize("max_tokens", [0, pytest.param(3, marks=pytest.mark.all)])  # make test: 0
def test_prompt_logprobs_are_those_of_transformers_in_every_layout_with_a_cold_and_a_warm_store(
    tmp_path, model, theirs, max_tokens
):
    prompts = [some_tokens(length) for length in LENGTHS]
    columns = {"id": [*range(len(prompts))], "ids": prompts, "how": [{"prompt_logprobs": 5}, *[None] * 7]}
    found = {}
    for name, cluster in LAYOUTS.items() if max_tokens else [("one", {}), ("warm", {})]:
        run(
            tmp_path,
            model,
            name,
            columns=columns,
            inputs={"sampling": "how"},
            sampling={"max_tokens": max_tokens, "prompt_logprobs": 2},
            cluster=cluster,
            kv={"dir": str(tmp_path / "kv"), "persist": "all", "reuse": "always"},
        )
        found[name] = answers(tmp_path / name)
    rows = found["one"]
    for name, others in found.items():
        assert others == rows, name
    for prompt, row in zip(prompts, rows, strict=True):
        first, *scored = row["prompt_logprobs"]
        assert first is None
        assert [item["token_id"] for item in scored] == prompt[1:]
        expected = logprobs_of(theirs, prompt)[:-1]
        for token, item, logprobs in zip(prompt[1:], scored, expected, strict=True):
            assert item["logprob"] == pytest.approx(float(logprobs[token]), abs=CLOSE)
            assert [top["logprob"] for top in item["top"]] == pytest.approx(logprobs.topk(2).values.tolist(), abs=CLOSE)
        assert row["finish_reason"] == "length"
        assert len(row["token_ids"]) == max_tokens
        assert row["prompt_tokens"] == len(prompt)


@pytest.mark.all  # make test: the scores themselves, above
def test_a_generation_is_the_same_with_its_prompt_scored(tmp_path, model):
    columns = {"id": [*range(4)], "ids": [some_tokens(80 + row) for row in range(4)]}
    sampling = {"max_tokens": 6, "temperature": 1.0, "n": 2, "logprobs": 1}
    plain = run(tmp_path, model, "plain", columns=columns, inputs={}, sampling=sampling)
    scored = run(tmp_path, model, "scored", columns=columns, inputs={}, sampling={**sampling, "prompt_logprobs": 0})
    for before, after in zip(plain, scored, strict=True):
        assert (after.pop("prompt_logprobs") is None) == (after["sample"] == 1), "told once for all samples"
        del before["cached_tokens"], after["cached_tokens"]
        assert after == before


def test_choices_are_scored_as_transformers_scores_them_and_each_prompt_is_computed_once(tmp_path, model, theirs):
    prompts = [some_tokens(length) for length in (1, 40, 64, 65, 300)]
    draw = random.Random(1)
    lists = [[[draw.randrange(1000) for _ in range(1 + place % 4)] for place in range(3 + row)] for row in range(5)]
    lists[0].append(lists[0][0])
    columns = {"id": [*range(5)], "ids": prompts, "options": lists}
    found = {}
    for name, cluster in LAYOUTS.items():
        run(
            tmp_path,
            model,
            name,
            columns=columns,
            inputs={"choices": "options"},
            sampling={"max_tokens": 0},
            cluster=cluster,
        )
        found[name] = answers(tmp_path / name)
        assert found[name] == found["one"], name
    for prompt, choices, row in zip(prompts, lists, found["one"], strict=True):
        sums, greedy = [], []
        for choice in choices:
            logprobs = logprobs_of(theirs, prompt + choice)[len(prompt) - 1 : -1]
            sums.append(float(logprobs[range(len(choice)), choice].sum()))
            greedy.append(logprobs.argmax(-1).tolist() == choice)
        lengths = [len(choice) for choice in choices]
        means = [total / length for total, length in zip(sums, lengths, strict=True)]
        assert row["choice_logprobs"] == pytest.approx(sums, abs=CLOSE)
        assert (row["choice_num_tokens"], row["choice_is_greedy"]) == (lengths, greedy)
        assert (row["choice"], row["choice_normalized"]) == (sums.index(max(sums)), means.index(max(means)))
        assert (row["text"], row["status"], row["prompt_tokens"]) == ("", "ok", sum(len(prompt) + n for n in lengths))
    plan = read_summary(RunDir(tmp_path / "one"))
    assert plan["duplicates"] == 1, "a choice that is there twice"
    assert plan["rows"] == 5
    report = json.loads(batchinfer("report", tmp_path / "one", "--json").out)
    assert (report["rows"], report["rows_ok"], report["output_tokens"], report["wasted_tokens"]) == (5, 5, 0, 0)
    # of a choice its tokens run, and the prompt's last one, under whose logits the first of them is scored
    first_tokens = sum(len(set(map(tuple, choices))) + sum(map(len, choices)) for choices in lists)
    assert report["computed_tokens"] <= max(map(len, prompts)) + sum(map(len, prompts)) + first_tokens - 60 * 4


@pytest.mark.all  # make test: the scores themselves, above
@pytest.mark.parametrize("num_tokens", [2048, pytest.param(8000, marks=pytest.mark.slow)])
def test_a_long_prompt_needs_no_room_for_its_logits(tmp_path, num_tokens):
    make_checkpoint(tmp_path / "model", vocab_size=129_280, max_position_embeddings=8192)
    script = f"""
import resource, torch
from pathlib import Path
from batchinfer.model.step import PrefillSpan, StepInput
from batchinfer.model.transformer import Transformer
model = Transformer.load(Path({str(tmp_path / "model")!r}), dtype=torch.float32)
def step(first, count, scored):
    return StepInput(
        tokens=torch.arange(first, first + count), positions=torch.arange(first, first + count),
        slots=torch.arange(first, first + count), logit_rows=torch.arange(count) if scored else torch.arange(0),
        prefill=(PrefillSpan(0, count, first + count, torch.arange(-(-(first + count) // 64))),),
        scored=torch.arange(first + 1, first + count + 1) if scored else None, num_alternatives=5 if scored else 0,
    )
pages = model.new_pages(125)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model.forward(step(0, {num_tokens}, False), pages)
before = peak()
found = model.forward(step(0, {num_tokens}, True), pages).scores
assert found.logprobs.shape == ({num_tokens},) and found.top_tokens.shape == ({num_tokens}, 5)
print((peak() - before) // 1024)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    whole_mib = num_tokens * 129_280 * 4 >> 20
    assert int(ended.stdout) < whole_mib // 8, f"{ended.stdout} MiB more"


@pytest.mark.parametrize(
    ("inputs", "sampling", "words"),
    [
        ({}, {"prompt_logprobs": 101}, ["sampling.prompt_logprobs", "100"]),
        ({"choices": "options"}, {"max_tokens": 0, "prompt_logprobs": 1}, ["prompt_logprobs", "input.choices"]),
        ({"choices": "options"}, {"max_tokens": 1}, ["sampling.max_tokens", "input.choices", "0"]),
        ({"choices": "nowhere"}, {"max_tokens": 0}, ["input.choices", "'nowhere'"]),
    ],
)
def test_wrong_scoring_is_one_sentence(tmp_path, inputs, sampling, words):
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": ["x"], "options": [[" y"]]})
    ended = batchinfer("plan", write_job(tmp_path, input=inputs, sampling=sampling))
    assert ended.code == 2
    assert len(ended.err.strip().splitlines()) == 1
    for word in words:
        assert word in ended.err


def test_a_column_that_outputs_have_cannot_be_kept_too(tmp_path):
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": ["x"], "options": [[" y"]], "choice": [1]})
    job = write_job(
        tmp_path, input={"choices": "options"}, sampling={"max_tokens": 0}, output={"keep_columns": ["choice"]}
    )
    ended = batchinfer("plan", job)
    assert ended.code == 2
    assert "'choice'" in ended.err
