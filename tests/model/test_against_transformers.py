"""Whole jobs on random checkpoints give transformers' greedy tokens and logprobs, all prompts packed together."""

import json
import shutil

import pyarrow as pa
import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config

from batchinfer.model.config import load_model_config
from support.checkpoints import MODELS, make_checkpoint, split_into_shards
from support.jobs import batchinfer, outputs, write_job, write_shard
from support.paths import RANDOM_MODEL

NUM_NEW = 64
LENGTHS = (5, 64, 1, 131, 30, 65, 12, 200)


def make_prompts():
    """Token lists; some begin with the same tokens, inside and across pages."""
    generator = torch.Generator().manual_seed(2)
    shared = torch.randint(0, 96, (100,), generator=generator).tolist()
    prompts = [torch.randint(0, 96, (length,), generator=generator).tolist() for length in LENGTHS]
    return prompts + [shared + prompt for prompt in prompts[:4]]


MORE = {  # what is particular to them is in others, too, and their logits in test_model
    *("v3-odd-sizes", "v3-yarn", "v3-no-q-lora", "v2-yarn", "youtu-yarn", "kimi-k2", "kimi-k25-yarn", "glm-dsa"),
    *("qwen3-tied", "qwen3-moe-normed", "llama-dynamic"),
}


QUICK = {"v3", "v2-greedy", "glm", "qwen3", "qwen3-moe", "llama"}  # a model of each family; the others in make test-all


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in MORE else () if name in QUICK else pytest.mark.all)
        for name in MODELS
    ],
)
def test_greedy_tokens_and_logprobs_of_a_job_equal_those_of_transformers(tmp_path, name):
    theirs = make_checkpoint(tmp_path / "model", name)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(RANDOM_MODEL / file, tmp_path / "model" / file)
    if name == "v3-groups":
        split_into_shards(tmp_path / "model", 3)
    prompts = make_prompts()
    write_shard(tmp_path / "prompts" / "a.parquet", {"ids": pa.array(prompts, pa.list_(pa.int32()))})
    job = write_job(
        tmp_path,
        input={"prompt": None, "token_ids": "ids"},
        model={"path": "model"},
        sampling={"max_tokens": NUM_NEW, "ignore_eos": True, "logprobs": 0},
        cluster={"prefill_tokens": 150},
    )
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    rows = outputs(tmp_path / "run")["a.parquet"]
    assert any(row["cached_tokens"] >= 100 for row in rows)
    for prompt, row in zip(prompts, rows, strict=True):
        tokens = row["token_ids"]
        assert len(tokens) == NUM_NEW
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        # each token is transformers' best after the same tokens, so its own greedy run gives the same
        assert tokens == logits.argmax(-1).tolist()
        found = [one["logprob"] for one in row["logprobs"]]
        assert found == pytest.approx(logits.log_softmax(-1).amax(-1).tolist(), abs=1e-4)


@pytest.mark.parametrize("config", [DeepseekV3Config(), DeepseekV2Config(num_experts_per_tok=6)], ids=["v3", "v2"])
def test_every_key_that_transformers_writes_is_known(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert load_model_config(tmp_path).unknown_keys == ()
