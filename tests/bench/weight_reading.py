"""The speed of reading weights in products with few rows, as in decode, compared with memory and arithmetic.

A weight larger than most caches meets some rows: in bfloat16 by the instruction for pairs and in float32 (the bits
are the same; the operations measure which to take), in 8 and in 4 bits. GB/s count each weight once.

    python tests/bench/weight_reading.py [--rows 1 8 64] [--depth 1024] [--threads 2 1] [--bytes 268435456]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from limits import read_bytes_per_s

from batchinfer_kernels.cpu import build, ops

ROWS = (1, 2, 4, 8, 16, 32, 64)
ROUNDS = 7
AS_MEASURED, IN_FLOAT32, BY_PAIRS = -1, 0, 1


def shortest_s(work: Callable[[], object]) -> float:
    """Return the shortest of some rounds: a busy machine only makes rounds longer."""
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--depth", type=int, default=1024)
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads(), 1])
    parser.add_argument("--bytes", type=int, default=1 << 28, help="of the weight in bfloat16")
    options = parser.parse_args()
    plain = torch.randn(options.bytes // 2 // options.depth, options.depth).bfloat16()
    weights = {
        "float32": (ops.pack(plain), 2.0, IN_FLOAT32),
        "pairs": (ops.pack(plain), 2.0, BY_PAIRS),
        "8 bits": (ops.pack(plain, eight_bit=True), 1.0, AS_MEASURED),
        "4 bits": (ops.pack(plain, four_bit=True), 0.5625, AS_MEASURED),
    }
    library = ops.library()
    if build.instructions().tiles:
        print("bfloat16 goes in tiles here, in both of its columns")
    else:
        print(f"bfloat16 goes {'by pairs' if library.pairs_are_quick() else 'in float32'} here")
    for num_threads in options.threads:
        torch.set_num_threads(num_threads)
        print(f"\n{num_threads} threads, memory read {read_bytes_per_s() / 1e9:.1f} GB/s; GB/s and GFLOP/s\n")
        print(f"{'rows':>5}" + "".join(f"{name:>16}" for name in weights), flush=True)
        for num_rows in options.rows:
            x = torch.randn(num_rows, options.depth).bfloat16()
            line = f"{num_rows:>5}"
            for weight, bytes_each, pairs in weights.values():
                library.choose_pairs(pairs)
                seconds = shortest_s(partial(ops.linear, x, weight))
                rate, flops = plain.numel() * bytes_each / seconds, 2.0 * num_rows * plain.numel() / seconds
                line += f"{rate / 1e9:>8.1f}{flops / 1e9:>8.0f}"
            print(line, flush=True)
    library.choose_pairs(AS_MEASURED)


if __name__ == "__main__":
    main()
