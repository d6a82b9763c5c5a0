"""Single steps of the bench models: seconds, the share of each operation, and of what the machine can do.

A decode step of many requests (alone, and in groups that share most of their pages) and a prefill step, without the
engine around them, in a process that keeps memory as a rank does. The limit of a step is the larger of the time in
which its weights can be read and the time in which its products can be multiplied (in bfloat16 or float32, whichever
is quicker), both at rates measured in the same run. Under each decode step stand what its logits take, which is a part
of it, and what sampling from them takes, which is not.

    python tests/bench/model_steps.py [--sizes tiny small] [--dtype bfloat16 fp8] [--threads N] [--ops]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from bench_models import SIZES, make_model  # noqa: E402
from limits import (  # noqa: E402
    body_flops,
    gemm_flops,
    last_layer_flops,
    read_bytes_per_s,
    weight_bytes,
)

from batchinfer.config import PAGE_TOKENS, SamplingConfig  # noqa: E402
from batchinfer.launch.rank_process import MALLOC  # noqa: E402
from batchinfer.model import transformer  # noqa: E402
from batchinfer.model.attention_kinds import kind_of  # noqa: E402
from batchinfer.model.fused.screened_head import STEPS_BEFORE, ScreenedHead  # noqa: E402
from batchinfer.model.logit_changes import LogitChanges  # noqa: E402
from batchinfer.model.mla import Attention  # noqa: E402
from batchinfer.model.moe import MoeMlp  # noqa: E402
from batchinfer.model.ops import Ops  # noqa: E402
from batchinfer.model.sampling import SamplingRows, sample  # noqa: E402
from batchinfer.model.step import PrefillSpan, StepInput  # noqa: E402
from batchinfer.model.transformer import Transformer  # noqa: E402
from batchinfer.parallel.dispatch import LocalDispatcher  # noqa: E402

BATCH = {"tiny": 256, "small": 64, "release": 64}
CONTEXT, SHARED_PAGES, GROUP = 490, 6, 8
PREFILL_TOKENS, CHUNK_TOKENS = 4096, 512
FIRST_TOKEN = 8
SAMPLINGS = {
    "greedy": SamplingConfig(max_tokens=1),
    "temperature 0.6, top_p 0.95": SamplingConfig(max_tokens=1, temperature=0.6, top_p=0.95),
    "top_k 50": SamplingConfig(max_tokens=1, temperature=1.0, top_k=50),
    "temperature 0.6, top_k 20, top_p 0.95": SamplingConfig(max_tokens=1, temperature=0.6, top_k=20, top_p=0.95),
    "greedy, log-probabilities of five": SamplingConfig(max_tokens=1, logprobs=5),
}
SCREENED = ("greedy", "temperature 0.6, top_k 20, top_p 0.95")
LIKELY = 8.0  # times random logits: few tokens are likely, as with trained models


class OpSeconds:
    """Seconds in each operation of a model whose layers run operation by operation."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def model(self, folder: Path, *, eight_bit: bool) -> Transformer:
        """Load a model whose operations are timed."""
        ops = Ops.select("auto", torch.bfloat16, eight_bit=eight_bit)
        timed = {
            field.name: self._timed(field.name, getattr(ops, field.name))
            for field in fields(ops)
            if callable(getattr(ops, field.name)) and field.name not in ("pack", "pack_router")
        }
        plain = Transformer.load(folder, dtype=torch.bfloat16, eight_bit=eight_bit)
        composed = {"build": lambda *given: Attention(*given[:-1])}  # not fused
        transformer.kind_of = lambda config: replace(kind_of(config), **composed)
        transformer.moe_of = MoeMlp
        experts = LocalDispatcher(plain.config.n_routed_experts, gathers=False)
        return Transformer(plain.config, plain.weights, [experts] * plain.num_moe_layers, replace(ops, **timed))

    def _timed(self, name: str, run: Callable) -> Callable:
        def timed(*args: object, **options: object) -> object:
            started = time.perf_counter()
            result = run(*args, **options)
            self.seconds[name] += time.perf_counter() - started
            return result

        return timed


def decode_step(size: str, *, shared: bool) -> StepInput:
    """One token of each request; in groups of GROUP they share their first pages."""
    batch, num_pages = BATCH[size], -(-(CONTEXT + 1) // PAGE_TOKENS)
    table = torch.arange(batch * num_pages).view(batch, num_pages)
    if shared:
        for first in range(0, batch, GROUP):
            table[first : first + GROUP, :SHARED_PAGES] = table[first, :SHARED_PAGES].clone()
    positions = torch.full((batch,), CONTEXT)
    return StepInput(
        tokens=torch.randint(FIRST_TOKEN, SIZES[size]["vocab_size"], (batch,)),
        positions=positions,
        slots=table[:, -1] * PAGE_TOKENS + positions % PAGE_TOKENS,
        logit_rows=torch.arange(batch),
        page_table=table,
        kv_tokens=positions + 1,
    )


def prefill_step(size: str) -> StepInput:
    """Whole prompts of CHUNK_TOKENS tokens."""
    starts = range(0, PREFILL_TOKENS, CHUNK_TOKENS)
    pages = torch.arange(CHUNK_TOKENS // PAGE_TOKENS)
    return StepInput(
        tokens=torch.randint(FIRST_TOKEN, SIZES[size]["vocab_size"], (PREFILL_TOKENS,)),
        positions=torch.arange(CHUNK_TOKENS).repeat(len(starts)),
        slots=torch.arange(PREFILL_TOKENS),
        logit_rows=torch.arange(CHUNK_TOKENS - 1, PREFILL_TOKENS, CHUNK_TOKENS),
        prefill=tuple(PrefillSpan(start, CHUNK_TOKENS, CHUNK_TOKENS, start // PAGE_TOKENS + pages) for start in starts),
    )


def flops(size: str, kind: str) -> float:
    """Return the FLOP of a step; attention over latents in decode, over keys and values in prefill."""
    c = SIZES[size]
    body, head, per_pair = body_flops(size)
    if kind == "prefill":
        prompts, layers = PREFILL_TOKENS // CHUNK_TOKENS, c["num_hidden_layers"]
        seen = PREFILL_TOKENS * (CHUNK_TOKENS + 1) / 2 * (layers - 1) + prompts * CHUNK_TOKENS
        spared = (PREFILL_TOKENS - prompts) * last_layer_flops(size)
        return PREFILL_TOKENS * body + prompts * head + seen / layers * per_pair - spared
    per_key = 2.0 * c["num_hidden_layers"] * c["num_attention_heads"] * (2 * c["kv_lora_rank"] + c["qk_rope_head_dim"])
    return BATCH[size] * (body + head + (CONTEXT + 1) * per_key)


def median_seconds(work: Callable[[], object], rounds: int) -> float:
    work()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def print_end_of_step(model: Transformer, logits: torch.Tensor, step_s: float, rounds: int) -> None:
    """Print the time of the product with the head, and of sampling, compared with the step without sampling."""
    num_rows, ops = len(logits), Ops.select("auto", torch.bfloat16)
    hidden = torch.randn(num_rows, model.config.hidden_size).bfloat16()
    product_s = median_seconds(lambda: ops.linear(hidden, model.weights.lm_head, float32_out=True), rounds)
    print(f"    logits {product_s * 1e3:.1f} ms, {product_s / step_s:.1%} of the step")
    first = np.zeros(num_rows, dtype=np.int64)
    for name, config in SAMPLINGS.items():
        rows = SamplingRows.of([config.to_sampling()] * num_rows, list(range(num_rows)))
        for some, said in ((logits, ""), (LIKELY * logits, ", few likely")):
            sampling_s = median_seconds(partial(sample, some, rows, first, model.logit_ops), rounds)
            share = sampling_s / (step_s + sampling_s)
            print(f"    sampling, {name}{said}: {sampling_s * 1e3:.1f} ms, {share:.1%} of both")


def print_screened_head(model: Transformer, step: StepInput, pages: torch.Tensor, rounds: int) -> None:
    """Print what tokens take without the logits of all words, as ranks pick them, as a share of the step."""
    head = ScreenedHead.of(model)
    if head is None:
        print("    tokens take all logits here")
        return
    without, positions = step.without_logits, np.zeros(len(step.tokens), dtype=np.int64)
    states = model.forward(without, pages).states
    assert states is not None
    layers_s = median_seconds(partial(model.forward, without, pages), rounds)
    for name in SCREENED:
        rows = SamplingRows.of([SAMPLINGS[name].to_sampling()] * len(positions), list(range(len(positions))))
        screened = None
        for _ in range(STEPS_BEFORE + 1):
            screened = head.choose_rows(rows, [])
        assert screened is not None
        sample_s = median_seconds(partial(head.sample, states, screened, rows, positions, LogitChanges()), rounds)
        share = sample_s / (layers_s + sample_s)
        print(f"    {name}, without all logits: {sample_s * 1e3:.1f} ms, {share:.1%} of a step that ends in them")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "fp8"], choices=["bfloat16", "fp8"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ops", action="store_true", help="run layers operation by operation, timed one by one")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.inference_mode(), tempfile.TemporaryDirectory() as scratch:
        for size in options.sizes:
            folder = make_model(Path(scratch) / size, size)
            for dtype in options.dtype:
                ops = OpSeconds()
                eight_bit = dtype == "fp8"
                if options.ops:
                    model = ops.model(folder, eight_bit=eight_bit)
                else:
                    model = Transformer.load(folder, dtype=torch.bfloat16, eight_bit=eight_bit)
                pages = model.new_pages(BATCH[size] * -(-(CONTEXT + 1) // PAGE_TOKENS)).normal_()
                steps = {
                    "decode": decode_step(size, shared=False),
                    "decode, shared": decode_step(size, shared=True),
                    "prefill": prefill_step(size),
                }
                for kind, step in steps.items():
                    multiply_s = flops(size, kind) / gemm_flops()
                    read_s = weight_bytes(size, 1 if dtype == "fp8" else 2) / read_bytes_per_s()
                    ops.seconds.clear()
                    seconds = median_seconds(partial(model.forward, step, pages), options.rounds)
                    print(
                        f"{size} {dtype:<9}{kind:<15}{len(step.tokens):>6} tokens {seconds * 1e3:>9.1f} ms, "
                        f"{max(multiply_s, read_s) / seconds:>6.1%} of the limit (products {multiply_s * 1e3:.1f} ms "
                        f"at their rate, weights {read_s * 1e3:.1f} ms)",
                        flush=True,
                    )
                    if options.ops:
                        for name, total in ops.seconds.most_common(8):
                            print(f"    {name:<20}{total / (options.rounds + 1) * 1e3:>9.2f} ms")
                    if kind.startswith("decode"):
                        print_end_of_step(model, model.forward(step, pages).logits, seconds, options.rounds)
                        print_screened_head(model, step, pages, options.rounds)


if __name__ == "__main__":
    if "GLIBC_TUNABLES" not in os.environ:  # read when a process starts
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "GLIBC_TUNABLES": MALLOC})
    main()
