"""Decode with drafted tokens and without, by turns in one process: the sample model, its own prompts, a rank by itself.

A pair of turns runs the same prompts with and without, with so many requests running at once; printed are output tokens
per second of processor time of this process, and the medians over pairs of the one by the other: by the clock others on
the machine count, too. Counted are decode steps, each with what lies between it and the step before. The rule keeps
what it has learned from one turn to the next, as in a longer job.

    OMP_NUM_THREADS=1 python tests/bench/speculation.py [--running 1 2 4 16 64] [--pairs 7] [--prompts 96] [--model DIR]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from batchinfer.config import SamplingConfig
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.model.transformer import Transformer
from batchinfer.rank.draft_rule import DraftRule
from batchinfer.rank.drafter import Drafter
from batchinfer.records import Request, RequestKey
from support.one_rank import Feed, run_rank
from support.paths import SAMPLE_MODEL, SAMPLE_PROMPTS


class TimedFeed(Feed):
    """Notes the processor time at the end of each step."""

    def __init__(self, requests: list[Request]) -> None:
        super().__init__(requests)
        self.ends_s: list[float] = []

    def send(self, report: Any) -> None:
        super().send(report)
        self.ends_s.append(time.process_time())

    def decode_rate(self) -> float:
        """Output tokens per second, over decode steps, each with what the rank did since the step before it."""
        tokens, seconds = 0, 0.0
        for record, before_s, end_s in zip(self.records[1:], self.ends_s, self.ends_s[1:], strict=False):
            if record.kind == "decode":
                tokens += record.output_tokens
                seconds += end_s - before_s
        return tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--running", type=int, nargs="+", default=[1, 2, 4, 16, 64])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=1, help="times each prompt is asked: longer turns")
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--model", type=Path, default=SAMPLE_MODEL, help="whose tokens are those of the sample model")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    model = Transformer.load(options.model, dtype=getattr(torch, options.dtype), mtp=True)
    tokenizer, messages = load_tokenizer(SAMPLE_MODEL), []
    for shard in sorted(SAMPLE_PROMPTS.glob("*.parquet")):
        messages += pq.read_table(shard, columns=["messages"]).column(0).to_pylist()
    chats = [ids for ids in tokenizer.encode_chats(messages[: options.prompts]) if isinstance(ids, list)]
    sampling = SamplingConfig(max_tokens=options.max_tokens).to_sampling()
    chats *= options.repeat
    requests = [Request(RequestKey(0, row, 0), 0, ids, sampling, sampling_key=row) for row, ids in enumerate(chats)]
    print(f"{len(requests)} prompts, {options.pairs} pairs of turns, {options.dtype}")
    for running in options.running:
        rule, pairs = DraftRule(), []

        def make_drafter(context: Any, rule: DraftRule = rule) -> Drafter:
            return Drafter.of(context, rule)

        for _ in range(options.pairs):
            without, drafted = (
                run_rank(
                    *(model, tokenizer, requests),
                    feed=TimedFeed(requests),
                    decode_requests=running,
                    make_drafter=how,
                )
                for how in (None, make_drafter)
            )
            assert {k: v.token_ids for k, v in without.done.items()} == {
                k: v.token_ids for k, v in drafted.done.items()
            }
            pairs.append((without.decode_rate(), drafted.decode_rate()))
        num_drafted = sum(record.drafted_tokens for record in drafted.records)
        share = sum(record.accepted_tokens for record in drafted.records) / max(1, num_drafted)
        plain, on = (statistics.median(rates) for rates in zip(*pairs, strict=True))
        ratios = [with_drafts / plain for plain, with_drafts in pairs]
        print(
            f"{running:3} running: {plain:8,.0f} tok/s without, {on:8,.0f} with, x {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}); {num_drafted} drafted in the last turn, {share:.0%} accepted",
            flush=True,
        )


if __name__ == "__main__":
    main()
