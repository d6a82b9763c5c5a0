"""Decode attention of many requests to one shared prefix: latents as they lie, or keys and values expanded once a step.

The absorbed form, which decode takes, multiplies each query with latents; the plain form makes per-head keys and values
of the prefix first, which pays where enough queries meet them. One layer, C++, bfloat16, one thread, by turns, in
processor time; the plain form's queries are a chunk of prefill behind the prefix. Left out is what joining both parts
of a request's attention would take. Decides no test.

    python tests/bench/attention_forms.py [--prefix 2048] [--queries 32 64 128 256] [--turns 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from batchinfer_kernels.cpu import build, ops
from batchinfer_kernels.reference.mla import PAGE_TOKENS, PagedKeys

# heads, latent, rotary, width of a head's key without it and of its value
SHAPES = {"small": (16, 256, 32, 64), "release": (16, 512, 64, 128), "V3": (128, 512, 64, 128)}


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def compare(name: str, prefix: int, num_queries: int, turns: int) -> None:
    """Print medians of both forms."""
    heads, latent, rotary, width = SHAPES[name]
    num_pages = prefix // PAGE_TOKENS
    pages = torch.randn(num_pages + -(-num_queries // PAGE_TOKENS), PAGE_TOKENS, latent + rotary).bfloat16()
    shared = torch.arange(num_pages).expand(num_queries, num_pages).contiguous()
    kv_tokens = torch.full((num_queries,), prefix)
    absorbed_q = torch.randn(num_queries, heads, latent + rotary).bfloat16()
    plain_q = torch.randn(num_queries, heads, width + rotary).bfloat16()
    kv_up = ops.pack(torch.randn(heads, 2 * width, latent).bfloat16() / latent**0.5)
    chunk = PagedKeys(
        pages,
        torch.arange(len(pages))[None],
        torch.tensor([prefix + num_queries]),
        torch.arange(prefix, prefix + num_queries),
    )

    def absorbed() -> None:
        keys = PagedKeys(pages, shared, kv_tokens, kv_tokens - 1)
        ops.mla_decode(absorbed_q, keys, latent_dim=latent, scale=0.06)

    def plain() -> None:
        ops.mla_prefill(plain_q, chunk, kv_up, torch.tensor([num_queries]), v_dim=width, scale=0.07)

    times = [[seconds(run) for run in (absorbed, plain)] for _ in range(turns + 1)][1:]
    ratio = statistics.median(absorbed_s / plain_s for absorbed_s, plain_s in times)
    absorbed_s, plain_s = (statistics.median(column) for column in zip(*times, strict=True))
    print(
        f"{name:<8}{num_queries:>4} queries, {prefix:,} keys: absorbed {1e3 * absorbed_s:8.1f} ms, plain "
        f"{1e3 * plain_s:8.1f} ms; absorbed / plain {ratio:.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prefix", type=int, default=2048, help="tokens, a multiple of 64")
    parser.add_argument("--queries", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(build.explain() if (reason := build.why_not()) is None else reason)
    for name in SHAPES:
        for num_queries in options.queries:
            compare(name, options.prefix, num_queries, options.turns)


if __name__ == "__main__":
    main()
