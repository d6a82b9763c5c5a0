"""Decode attention to chosen keys against dense attention of the same shapes, C++, by turns; decides no test.

The core of one layer of DeepSeek-V3.2: 128 heads over latents of 512 + 64, an indexer of 64 heads of 128, 2,048 keys a
query. Sparse: rotating the indexer's queries, scores, the choice and attention; both without the projections.

    python tests/bench/sparse_attention.py [--turns 5] [--threads 2] [--dtype bfloat16] [--requests 4]
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

HEADS, LATENT, ROTARY = 128, 512, 64
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(build.explain() if (reason := build.why_not()) is None else reason)
    for context in CONTEXTS:
        compare(context, arguments.requests, getattr(torch, arguments.dtype), arguments.turns)


if __name__ == "__main__":
    main()
