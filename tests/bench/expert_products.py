"""Experts of a decode step alone, in each dtype: the rate of reading their weights, as a share of memory's rate.

Shapes of GLM-4.7-Flash: 64 experts of 2048 x 1536, 4 per token, drawn for each token. Layers take
turns that are more memory than any cache holds. Memory is read in the same run by turns (a sum of float32).

    python tests/bench/expert_products.py [--requests 48] [--rounds 15] [--layers 4] [--dtype int4 fp8 bfloat16]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from limits import read_bytes_per_s

from batchinfer_kernels.cpu import ops
from batchinfer_kernels.cpu.packed import Packed

HIDDEN, WIDTH, NUM_EXPERTS, TOPK = 2048, 1536, 64, 4
BITS: dict[str, dict[str, bool]] = {"bfloat16": {}, "fp8": {"eight_bit": True}, "int4": {"four_bit": True}}


def layer(dtype: str) -> tuple[Packed, Packed]:
    """Gate with up, and down, of one layer's experts; one expert's weights again and again, each in its own memory."""
    gate_up = torch.randn(2 * WIDTH, HIDDEN).bfloat16() / HIDDEN**0.5
    down = torch.randn(HIDDEN, WIDTH).bfloat16() / WIDTH**0.5
    packed = []
    for weight, is_paired in ((gate_up, True), (down, False)):
        one = ops.pack(weight, is_paired=is_paired, **BITS[dtype])
        room = Packed.empty(NUM_EXPERTS, one.num_columns, one.depth, kind=one.kind, is_paired=is_paired)
        room.data.copy_(one.data.expand_as(room.data))
        packed.append(room)
    return packed[0], packed[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", nargs="+", default=["int4", "fp8", "bfloat16"], choices=BITS)
    options = parser.parse_args()
    torch.manual_seed(0)
    chosen_TK = torch.rand(options.requests, NUM_EXPERTS).topk(TOPK, dim=1).indices
    entries, order_M = chosen_TK.flatten().sort(stable=True)
    counts_E, tokens_M = torch.bincount(entries, minlength=NUM_EXPERTS), order_M // TOPK
    num_busy = int((counts_E > 0).sum())
    x = torch.randn(options.requests, HIDDEN).bfloat16()
    print(f"{options.requests} requests, {num_busy} of {NUM_EXPERTS} experts busy, {torch.get_num_threads()} threads")
    for dtype in options.dtype:
        layers = [layer(dtype) for _ in range(options.layers)]
        num_bytes = sum(weight.data.nbytes for weights in layers for weight in weights) * num_busy / NUM_EXPERTS
        rates, memory = [], []
        for _ in range(options.rounds):
            memory.append(read_bytes_per_s())
            start = time.perf_counter()
            for gate_up, down in layers:
                ops.grouped_mlp(x, counts_E, gate_up, down, tokens_M)
            rates.append(num_bytes / (time.perf_counter() - start))
        best, middle = max(rates), statistics.median(rates)
        print(
            f"{dtype:<9}{num_bytes / options.layers / 1e6:>8.0f} MB a layer  "
            f"{num_bytes / best / options.layers * 1e3:>6.2f} ms at best  {best / 1e9:>6.1f} GB/s, of "
            f"{max(memory) / 1e9:.1f}: {best / max(memory):.0%}; medians {middle / 1e9:.1f} of "
            f"{statistics.median(memory) / 1e9:.1f}: {middle / statistics.median(memory):.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
