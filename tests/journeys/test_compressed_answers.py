"""Answers of DeepSeek V4 by jobs: as those of transformers, the same bytes in any company, prefixes computed once."""

import shutil

import pyarrow as pa
import pytest
import torch

from batchinfer.report.read import read_report
from support.compressed_models import KINDS, published_tensors, random_model, write_compressed
from support.jobs import answers, batchinfer, write_job, write_shard
from support.paths import RANDOM_MODEL
from support.tiers import first_in_make_test

NUM_NEW, NUM_OTHERS = 64, 70
LENGTHS = (3, 130, 900, 1, 2, 6, 127, 257, 515, 897)
NUM_ALONE = 3  # of these


def prompts_of(draw):
    """Return prompts of these lengths, then others, most of which leave the longest ones at arbitrary places."""
    prompts = [torch.randint(2, 96, (length,), generator=draw).tolist() for length in LENGTHS]
    others = []
    for number in range(NUM_OTHERS):
        cut, tail = (int(torch.randint(1, most, (1,), generator=draw)) for most in (890, 40))
        end = torch.randint(2, 96, (tail,), generator=draw).tolist()
        others.append((prompts[2], prompts[-1], prompts[-2])[number % 3][:cut] + end)
    return prompts, others


def run(folder, name, prompts, num_new, **cluster):
    write_shard(folder / f"{name}-prompts" / "a.parquet", {"ids": pa.array(prompts, pa.list_(pa.int32()))})
    job = write_job(
        folder,
        name=f"{name}.toml",
        input={"files": [f"{name}-prompts/*"], "prompt": None, "token_ids": "ids"},
        model={"path": "model"},
        output={"dir": name},
        sampling={"max_tokens": num_new, "ignore_eos": True, "logprobs": 1},
        cluster=cluster,
    )
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    return [(row["token_ids"], row["logprobs"]) for row in answers(folder / name)]


@pytest.mark.parametrize("kind", first_in_make_test(["small-window", *sorted(KINDS.keys() - {"small-window"})]))
def test_64_greedy_tokens_are_those_of_transformers_alone_and_among_70_others(tmp_path, kind):
    theirs = random_model(**KINDS[kind])
    write_compressed(tmp_path / "model", published_tensors(theirs), **KINDS[kind])
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(RANDOM_MODEL / file, tmp_path / "model" / file)
    prompts, others = prompts_of(torch.Generator().manual_seed(59))
    among = run(tmp_path, "among", prompts + others, NUM_NEW, prefill_tokens=512, decode_requests=80)
    alone = run(tmp_path, "alone", prompts[:NUM_ALONE], NUM_NEW, decode_requests=1, prefill_tokens=1024)
    assert among[:NUM_ALONE] == alone
    for prompt, (tokens, logprobs) in zip(prompts, among[: len(prompts)], strict=True):
        with torch.no_grad():
            given = torch.tensor([prompt + tokens[:-1]])
            wanted = theirs(given, use_cache=False).logits[0, len(prompt) - 1 :].log_softmax(-1)
        assert wanted.argmax(-1).tolist() == tokens
        chosen = [one["logprob"] for one in logprobs]
        assert len(chosen) == NUM_NEW
        assert (wanted.max(-1).values - torch.tensor(chosen)).abs().max() < 1e-4
    figures = read_report(tmp_path / "among").values
    optimum = figures["input_tokens"] - figures["optimal_cached_tokens"]
    computed = figures["input_tokens"] - figures["cached_tokens"] + figures["recomputed_tokens"]
    assert optimum <= computed <= 1.02 * optimum < 0.2 * figures["input_tokens"]
