"""Whole jobs in random order on few KV pages: each distinct prefix is still computed once."""

from __future__ import annotations

import json
import random

import pytest

from batchinfer.config import PAGE_TOKENS
from batchinfer.model.config import load_model_config
from support.jobs import batchinfer, write_job, write_shard
from support.paths import RANDOM_MODEL
from support.tiers import first_in_make_test

SHARE_OF_KV = 0.05  # of what all requests together would take
NUM_NEW = 4


def system_prompts(rng):
    """Ten instructions, many questions to each."""
    instructions = [tokens(rng, 150) for _ in range(10)]
    return [rng.choice(instructions) + tokens(rng, rng.randint(5, 30)) for _ in range(240)]


def few_shot_tree(rng):
    """An instruction, examples of eight tasks, variants of each, questions."""
    top = tokens(rng, 60)
    tasks = [top + tokens(rng, rng.randint(40, 120)) for _ in range(8)]
    variants = [task + tokens(rng, 30) for task in tasks for _ in range(3)]
    return [rng.choice(variants) + tokens(rng, rng.randint(3, 20)) for _ in range(240)]


def conversations(rng):
    """Return conversations of which every turn is a separate request, with all turns before."""
    prompts = []
    for _ in range(40):
        history = tokens(rng, 20)
        for _ in range(rng.randint(2, 7)):
            history = history + tokens(rng, rng.randint(10, 40))
            prompts.append(history)
    return prompts


def tokens(rng, count):
    return [rng.randrange(10, 1000) for _ in range(count)]


@pytest.mark.parametrize(
    ("make", "ranks"),
    first_in_make_test([(system_prompts, 2), (few_shot_tree, 1), (few_shot_tree, 2), (conversations, 2)]),
)
def test_each_distinct_prefix_is_computed_once(tmp_path, make, ranks):
    rng = random.Random(5)
    prompts = make(rng)
    rng.shuffle(prompts)
    write_shard(tmp_path / "prompts" / "part-0.parquet", {"id": list(range(len(prompts))), "token_ids": prompts})
    num_pages = sum(-(-(len(prompt) + NUM_NEW - 1) // PAGE_TOKENS) for prompt in prompts)
    page_bytes = PAGE_TOKENS * load_model_config(RANDOM_MODEL).kv_bytes_per_token(4)
    job = write_job(
        tmp_path,
        input={"id": "id", "prompt": None, "token_ids": "token_ids"},
        model={"path": str(RANDOM_MODEL), "dtype": "float32"},
        sampling={"max_tokens": NUM_NEW, "ignore_eos": True},
        cluster={"prefill_ranks": ranks, "page_bytes": int(SHARE_OF_KV * num_pages) * page_bytes},
        output={"dir": "run"},
    )
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    sql = "SELECT sum(new_tokens)::BIGINT AS computed, max(pages_used) AS pages FROM steps WHERE kind = 'prefill'"
    (steps,) = json.loads(batchinfer("report", tmp_path / "run", "--json", "--sql", sql).out)
    (run,) = json.loads(batchinfer("report", tmp_path / "run", "--json", "--sql", "SELECT * FROM run").out)
    assert steps["pages"] <= SHARE_OF_KV * num_pages
    assert run["distinct_tokens"] < 0.6 * sum(map(len, prompts))
    ratio = (steps["computed"] - run["replicated_tokens"]) / run["distinct_tokens"]
    print(f"\n{make.__name__}, {ranks} ranks: (computed - replicated) / distinct = {ratio:.4f}")
    assert ratio <= 1.01
