"""Attention to chosen keys against dense attention of the same shapes, C++, by turns; decides no test.

The core of one layer of DeepSeek-V3.2: 128 heads over latents of 512 + 64, an indexer of 64 heads of 128, 2,048 keys a
query. Sparse: rotating the indexer's queries, scores, the choice and attention; all without the projections. Of prefill
the last tokens of a prompt: dense in the plain form, sparse in the absorbed one with its way there and back.

    python tests/bench/sparse_attention.py [--turns 5] [--threads 2] [--dtype bfloat16] [--requests 4] [--prefill 2048]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from batchinfer_kernels.cpu import build, ops
from batchinfer_kernels.reference.mla import PAGE_TOKENS, PagedKeys
from batchinfer_kernels.reference.sparse import IndexedKeys, IndexQueries

HEADS, NOPE, LATENT, ROTARY = 128, 128, 512, 64
INDEX_HEADS, INDEX_DIM, TOPK = 64, 128, 2048
CONTEXTS = (2_049, 4_096, 8_192, 16_384, 32_768)


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(context: int, num_requests: int, dtype: torch.dtype, turns: int) -> None:
    """Print medians of one context length."""
    num_pages, width = -(-context // PAGE_TOKENS), LATENT + ROTARY
    pages = torch.randn(num_requests * num_pages, PAGE_TOKENS, width + INDEX_DIM).to(dtype)
    dense_pages = pages[..., :width].contiguous()
    table = torch.randperm(len(pages)).view(num_requests, num_pages)
    kv_tokens = torch.full((num_requests,), context)
    q = torch.randn(num_requests, HEADS, width).to(dtype)
    index_q = torch.randn(num_requests, INDEX_HEADS, INDEX_DIM).to(dtype)
    angles = torch.rand(num_requests, ROTARY // 2)
    queries = IndexQueries(index_q, torch.randn(num_requests, INDEX_HEADS), angles.cos(), angles.sin(), False)
    keys = IndexedKeys(pages[..., width:], table, torch.arange(num_requests), kv_tokens - 1)
    options = {"latent_dim": LATENT, "scale": 0.06}

    def dense() -> None:
        ops.mla_decode(q, PagedKeys(dense_pages, table, kv_tokens, kv_tokens - 1), **options)

    def choose() -> torch.Tensor:
        return ops.choose_keys(queries, keys, topk=TOPK, scale=INDEX_DIM**-0.5)

    slots = choose()

    def attend() -> None:
        ops.mla_sparse(q, pages[..., :width], slots, **options)

    times = [[seconds(run) for run in (dense, choose, attend)] for _ in range(turns + 1)][1:]
    ratio = statistics.median(one[0] / (one[1] + one[2]) for one in times)
    dense_s, choose_s, attend_s = (statistics.median(column) for column in zip(*times, strict=True))
    print(
        f"{context:6,} tokens x {num_requests}: dense {1e3 * dense_s:7.1f} ms, choosing {1e3 * choose_s:6.1f}, "
        f"attention {1e3 * attend_s:6.1f}; dense / sparse {ratio:.2f}"
    )


def compare_prefill(context: int, num_tokens: int, dtype: torch.dtype, turns: int) -> None:
    """Print medians of the last `num_tokens` of one prompt, all of which see more keys than they attend to."""
    num_pages, width = -(-context // PAGE_TOKENS), LATENT + ROTARY
    pages, table = torch.randn(num_pages, PAGE_TOKENS, width + INDEX_DIM).to(dtype), torch.randperm(num_pages)[None]
    positions, counts = torch.arange(context - num_tokens, context), torch.tensor([num_tokens])
    q = torch.randn(num_tokens, HEADS, NOPE + ROTARY).to(dtype)
    weights = [
        torch.randn(HEADS, *shape).to(dtype) / 22 for shape in ((2 * NOPE, LATENT), (LATENT, NOPE), (NOPE, LATENT))
    ]
    kv_up, key_up, value_up = map(ops.pack, weights)
    index_q = torch.randn(num_tokens, INDEX_HEADS, INDEX_DIM).to(dtype)
    angles = torch.rand(num_tokens, ROTARY // 2)
    queries = IndexQueries(index_q, torch.randn(num_tokens, INDEX_HEADS), angles.cos(), angles.sin(), False)
    index_keys = IndexedKeys(pages[..., width:], table, torch.zeros(num_tokens, dtype=torch.int64), positions)
    keys = PagedKeys(pages[..., :width].contiguous(), table, torch.tensor([context]), positions)

    def dense() -> None:
        ops.mla_prefill(q, keys, kv_up, counts, v_dim=NOPE, scale=0.07)

    def sparse() -> None:
        slots = ops.choose_keys(queries, index_keys, topk=TOPK, scale=INDEX_DIM**-0.5)
        for rows in torch.arange(num_tokens).split(256):
            q_nope, q_rope = q[rows].split([NOPE, ROTARY], dim=-1)
            absorbed = torch.cat([ops.batched_linear(q_nope.transpose(0, 1), key_up).transpose(0, 1), q_rope], dim=-1)
            out = ops.mla_sparse(absorbed, pages[..., :width], slots[rows], latent_dim=LATENT, scale=0.07)
            ops.batched_linear(out.transpose(0, 1), value_up)

    times = [[seconds(run) for run in (dense, sparse)] for _ in range(turns)]
    ratio = statistics.median(dense_s / sparse_s for dense_s, sparse_s in times)
    dense_s, sparse_s = (statistics.median(column) for column in zip(*times, strict=True))
    print(
        f"prefill of the last {num_tokens:,} of {context:6,} tokens: dense {dense_s:.2f} s, sparse {sparse_s:.2f} s; "
        f"dense / sparse {ratio:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--prefill", type=int, default=0, metavar="TOKENS", help="measure prefill of so many instead")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(build.explain() if (reason := build.why_not()) is None else reason)
    dtype = getattr(torch, arguments.dtype)
    for context in CONTEXTS:
        if not arguments.prefill:
            compare(context, arguments.requests, dtype, arguments.turns)
        elif context >= arguments.prefill + TOPK:
            compare_prefill(context, arguments.prefill, dtype, arguments.turns)


if __name__ == "__main__":
    main()
