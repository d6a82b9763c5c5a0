"""Grouped-query attention in C++ against this machine's limits: reading memory, and products; decides no test.

One layer in bfloat16, one thread, in processor time, the best of some turns. Decode: requests with keys and values in
more memory than caches hold; the share is of what summing such memory reads per second. Prefill: the last tokens of a
prompt; the shares are of a square product and of latent attention in the plain form over keys of the same width,
without making these keys.

    python tests/bench/grouped_heads.py [--context 2048] [--turns 5] [--only qwen3-30b-a3b]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from batchinfer_kernels.cpu import build, ops
from batchinfer_kernels.reference.gqa import GqaForm
from batchinfer_kernels.reference.mla import PAGE_TOKENS, PagedKeys

# query heads, key heads, head width
SHAPES = {
    "llama-8b": (32, 8, 128),
    "qwen3-30b-a3b": (32, 4, 128),
    "gpt-oss": (64, 8, 64),
    "minimax-m2": (48, 8, 128),
    "glm-4.5": (96, 8, 128),
    "qwen3-235b": (64, 4, 128),
}
READ_BYTES = 256 << 20
CHUNK = 256


def best_s(run: Callable[[], object], turns: int) -> float:
    """Return the least processor time of a call, of some behind a first one."""
    run()
    times = []
    for _ in range(turns):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def decode(name: str, context: int, turns: int, bytes_per_s: float) -> None:
    """Print the rate of one decode step of as many requests as fill the memory."""
    num_heads, num_kv_heads, head_dim = SHAPES[name]
    num_pages, row = -(-context // PAGE_TOKENS), 2 * num_kv_heads * head_dim
    num_requests = max(1, READ_BYTES // (num_pages * PAGE_TOKENS * row * 2))
    pages = torch.randn(num_requests * num_pages, PAGE_TOKENS, row).bfloat16()
    table = torch.randperm(len(pages)).view(num_requests, num_pages)
    lengths = torch.full((num_requests,), context)
    keys = PagedKeys(pages, table, lengths, lengths - 1)
    q = torch.randn(num_requests, num_heads, head_dim).bfloat16()
    for window in (None, 128):
        form = GqaForm(num_kv_heads, head_dim**-0.5, window)
        took = best_s(lambda form=form: ops.gqa_decode(q, keys, form), turns)
        rate = num_requests * min(context, window or context) * row * 2 / took
        print(
            f"decode  {name:<14} {num_requests:4} x {context:,} tokens, window {window}: {1e3 * took:7.2f} ms, "
            f"{rate / 1e9:5.1f} GB/s, {rate / bytes_per_s:.0%} of reading",
            flush=True,
        )


def prefill(name: str, context: int, turns: int, flops: float) -> None:
    """Print the rate of the last tokens of a prompt, and that of latent attention."""
    num_heads, num_kv_heads, head_dim = SHAPES[name]
    num_pages = -(-context // PAGE_TOKENS)
    table, counts = torch.randperm(num_pages)[None], torch.tensor([CHUNK])
    positions = torch.arange(context - CHUNK, context)
    q = torch.randn(CHUNK, num_heads, head_dim).bfloat16()
    flop = 4.0 * num_heads * head_dim * float((positions + 1).sum())

    def keys_of(width: int) -> PagedKeys:
        pages = torch.randn(num_pages, PAGE_TOKENS, width).bfloat16()
        return PagedKeys(pages, table, torch.tensor([context]), positions)

    own, form = keys_of(2 * num_kv_heads * head_dim), GqaForm(num_kv_heads, head_dim**-0.5)
    rate = flop / best_s(lambda: ops.gqa_prefill(q, own, counts, form), turns)
    # a latent of two values costs next to nothing to make keys from
    latents, kv_b = keys_of(head_dim), ops.pack(torch.randn(num_heads, 2 + head_dim, 2).bfloat16())
    options = {"v_dim": head_dim, "scale": head_dim**-0.5}
    plain = flop / best_s(lambda: ops.mla_prefill(q, latents, kv_b, counts, **options), turns)
    print(
        f"prefill {name:<14} {CHUNK} of {context:,} tokens: {rate / 1e9:6.1f} GFLOP/s, "
        f"{rate / flops:.0%} of a product, {rate / plain:.0%} of latent attention",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", choices=SHAPES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(build.explain() if (reason := build.why_not()) is None else reason)
    memory, square = torch.ones(READ_BYTES // 4), torch.randn(1536, 1536).bfloat16()
    packed = ops.pack(square)
    bytes_per_s = READ_BYTES / best_s(memory.sum, 2 * options.turns)
    flops = 2 * 1536**3 / best_s(lambda: ops.linear(square, packed), 2 * options.turns)
    print(f"limits: reading {bytes_per_s / 1e9:.1f} GB/s, a product {flops / 1e9:.0f} GFLOP/s")
    for name in [options.only] if options.only else SHAPES:
        decode(name, options.context, options.turns, bytes_per_s)
        prefill(name, options.context, options.turns, flops)


if __name__ == "__main__":
    main()
