"""The engine on one machine: seconds and tokens/s of whole workloads, compared with the machine's limits.

Random-weight models (bench_models.py) in bfloat16, one rank with all threads. A workload's time runs from the start of
its first step to the end of its last; loading does not count. Beside it stands the limit (limits.py): what its
products and attention would take at the rate at which this machine multiplies large matrices in bfloat16, or in float32
where that is quicker (Intel's processors without AMX), in decode what reading the weights takes where that is longer,
at the rate at which it reads memory. Both rates are measured before and after the runs, and the larger ones count.

    python tests/bench/engine.py [--sizes tiny small] [--rounds 3] [--dtype bfloat16 | fp8]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow as pa

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from bench_models import SIZES, make_model, workload  # noqa: E402
from limits import gemm_flops, read_bytes_per_s, work_of  # noqa: E402
from peer_server import Requests  # noqa: E402

from support.jobs import Ended, batchinfer, write_job, write_shard  # noqa: E402


def run_once(
    folder: Path,
    model: Path,
    requests: Requests,
    command: Callable[..., Ended] = batchinfer,
    *,
    dtype: str = "bfloat16",
) -> dict[str, float]:
    """Seconds of one run: in all, in prefill and in decode steps; of the command, and of it to its last output row.

    Output tokens, too.

    Args:
        command: runs batchinfer, in this process by default.
    """
    shutil.rmtree(folder / "run", ignore_errors=True)
    how = pa.array([{"max_tokens": count} for _, count in requests], pa.struct([("max_tokens", pa.int32())]))
    write_shard(folder / "prompts" / "a.parquet", {"token_ids": [prompt for prompt, _ in requests], "how": how})
    job = write_job(
        folder,
        input={"prompt": None, "token_ids": "token_ids", "sampling": "how"},
        model={"path": str(model), "dtype": dtype},
        sampling={"max_tokens": 128, "ignore_eos": True},
    )
    started = time.time()
    ended = command("run", job)
    command_s = time.time() - started
    if ended.code:
        sys.exit(ended.err)
    sql = f"""
        SELECT max(start_s + duration_s) - min(start_s) AS steps, sum(output_tokens) AS tokens,
               sum(duration_s) FILTER (kind = 'prefill') AS prefill, sum(duration_s) FILTER (kind = 'decode') AS decode
        FROM read_parquet('{folder}/run/stats/steps/*.parquet')
    """
    names = ("steps", "tokens", "prefill", "decode")
    found = dict(zip(names, map(float, duckdb.execute(sql).fetchall()[0]), strict=True))
    # the time of the rename that made the outputs visible
    written_s = max(file.stat().st_ctime for file in (folder / "run" / "outputs").iterdir()) - started
    return {**found, "command": command_s, "written": written_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "fp8"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for size in options.sizes:
            model = make_model(Path(scratch) / size, size)
            for kind in ("shared", "unshared"):
                requests = workload(size, kind)
                flops, bytes_per_s = gemm_flops(), read_bytes_per_s()
                runs = [
                    run_once(Path(scratch) / f"{size}-{kind}", model, requests, dtype=options.dtype)
                    for _ in range(options.rounds)
                ]
                middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
                flops, bytes_per_s = max(flops, gemm_flops()), max(bytes_per_s, read_bytes_per_s())
                work = work_of(size, requests, 1 if options.dtype == "fp8" else 2)
                limit_s, products_s = work.limit_s(flops, bytes_per_s), work.products_s(flops)
                print(
                    f"{size} {kind:<9}{middle['steps']:>8.2f} s in steps (prefill {middle['prefill']:.2f}, decode "
                    f"{middle['decode']:.2f}), {middle['command']:.2f} s in all, "
                    f"{middle['tokens'] / middle['steps']:,.0f} output tokens/s, "
                    f"{limit_s / middle['steps']:.1%} of the limit ({limit_s:.2f} s; products alone {products_s:.2f}) "
                    f"at {flops / 1e9:,.0f} GFLOP/s, {bytes_per_s / 1e9:,.1f} GB/s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
