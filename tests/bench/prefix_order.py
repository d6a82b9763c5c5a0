"""The gain by the prefix plan: a job in random order on few KV pages, in the plan's order and in its own.

Few-shot prompts of the sample model's vocabulary: instructions, examples, questions, shuffled. Both orders run on the
same engine, which shares every prefix that is still in its pages (least recently used ones go first). They run in turn,
several times; medians are compared, of the seconds between the first step and the last. The machine's own limit is the
same job with all prefixes computed once: prompt tokens that had to be computed stand beside it.

    python tests/bench/prefix_order.py [--rounds 3] [--share-of-kv 0.05]
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import duckdb
import numpy as np

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from batchinfer.config import PAGE_TOKENS  # noqa: E402
from batchinfer.model.config import load_model_config  # noqa: E402
from batchinfer.plan.prefix import in_memory  # noqa: E402
from support.jobs import batchinfer, write_job, write_shard  # noqa: E402

MODEL = TESTS.parent / "sample_data" / "model"
NUM_NEW = 8


def few_shot_job(rng: random.Random) -> list[list[int]]:
    """Six instructions, eight sets of examples to each, twelve questions to each set; 530 tokens a prompt."""
    prompts = []
    for _ in range(6):
        instruction = tokens(rng, 200)
        for _ in range(8):
            examples = instruction + tokens(rng, 300)
            prompts += [examples + tokens(rng, rng.randint(15, 45)) for _ in range(12)]
    rng.shuffle(prompts)
    return prompts


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, 250) for _ in range(count)]


@contextlib.contextmanager
def input_order() -> Iterator[None]:
    """Planner and engine keep the order of the input."""

    def plan_prefixes(token_ids: np.ndarray, offsets: np.ndarray, *, block_tokens: int) -> in_memory.PrefixPlan:
        order = np.arange(len(offsets) - 1)
        shared = in_memory._shared_with_predecessor(np.asarray(token_ids), np.asarray(offsets), order)
        return in_memory.prefix_plan(order, shared, np.diff(offsets))

    def keep_order(shared_tokens: np.ndarray, *_: object, **__: object) -> np.ndarray:
        return np.arange(len(shared_tokens))

    with (
        mock.patch("batchinfer.plan.prefix.streamed.plan_prefixes", plan_prefixes),
        mock.patch("batchinfer.controller.rank_queues.longest_first", keep_order),
    ):
        yield


def run_once(folder: Path, name: str, page_bytes: int) -> tuple[float, int]:
    """(seconds between the first step and the last, prompt tokens computed) of one run."""
    job = write_job(
        folder,
        name=f"{name}.toml",
        input={"id": "id", "prompt": None, "token_ids": "token_ids"},
        model={"path": str(MODEL), "dtype": "float32"},
        sampling={"max_tokens": NUM_NEW, "ignore_eos": True},
        cluster={"page_bytes": page_bytes},
        output={"dir": name},
    )
    ended = batchinfer("run", job)
    if ended.code:
        sys.exit(ended.err)
    steps = f"read_parquet('{folder / name}/stats/steps/*.parquet')"
    sql = f"""
        SELECT max(start_s + duration_s) - min(start_s), sum(new_tokens) FILTER (kind = 'prefill') FROM {steps}
    """
    ((seconds, computed),) = duckdb.execute(sql).fetchall()
    return float(seconds), int(computed)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share-of-kv", type=float, default=0.05, help="page budget by the KV of all requests")
    options = parser.parse_args()
    prompts = few_shot_job(random.Random(0))
    num_pages = sum(-(-(len(prompt) + NUM_NEW - 1) // PAGE_TOKENS) for prompt in prompts)
    page_bytes = PAGE_TOKENS * load_model_config(MODEL).kv_bytes_per_token(4)
    budget = int(options.share_of_kv * num_pages) * page_bytes
    found: dict[str, list[tuple[float, int]]] = {"prefix order": [], "input order": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_shard(folder / "prompts" / "part-0.parquet", {"id": list(range(len(prompts))), "token_ids": prompts})
        for turn in range(options.rounds):
            found["prefix order"].append(run_once(folder, f"prefix-{turn}", budget))
            with input_order():
                found["input order"].append(run_once(folder, f"input-{turn}", budget))
    print(f"{len(prompts)} prompts, {sum(map(len, prompts)):,} tokens, KV pages for {options.share_of_kv:.0%} of them")
    for name, runs in found.items():
        seconds, computed = statistics.median(run[0] for run in runs), runs[0][1]
        print(f"  {name:<14}{seconds:>8.2f} s  {computed:>9,} prompt tokens computed")
    ratios = [slow[0] / fast[0] for fast, slow in zip(found["prefix order"], found["input order"], strict=True)]
    print(f"  input order takes {statistics.median(ratios):.2f} times as long (of each round: ", end="")
    print(", ".join(f"{ratio:.2f}" for ratio in ratios) + ")")


if __name__ == "__main__":
    main()
