"""Ranks against threads, on the sample job: how much of one rank's speed several ranks reach on the same cores.

Every layout runs several times, in turn, so that what else the machine does hits all alike; medians are compared. Speed
is tokens (prompt tokens computed and output tokens) per second between the first and the last step. Also prints how
much of communication was waiting and how much was hidden, and how many rows are equal to one rank's in bfloat16.

    python tests/bench/ranks.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import duckdb
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[2]
CORES = len(os.sched_getaffinity(0))

# name -> (settings, threads per rank)
LAYOUTS: dict[str, tuple[dict[str, str], int]] = {
    f"1 rank, {CORES} threads": ({}, CORES),
    "1 rank, 1 thread": ({}, 1),
    "2 ranks": ({"prefill_ranks": "2"}, max(1, CORES // 2)),
    "2 ranks, overlap": ({"prefill_ranks": "2", "overlap": "true"}, max(1, CORES // 2)),
    "2 ranks, no overlap": ({"prefill_ranks": "2", "overlap": "false"}, max(1, CORES // 2)),
    "2 ranks, gloo": ({"prefill_ranks": "2", "exchange": "gloo"}, max(1, CORES // 2)),
    "2 ranks, gloo, overlap": ({"prefill_ranks": "2", "exchange": "gloo", "overlap": "true"}, max(1, CORES // 2)),
    "2 ranks, gloo, no overlap": (
        {"prefill_ranks": "2", "exchange": "gloo", "overlap": "false"},
        max(1, CORES // 2),
    ),
    "1 + 1 ranks, prefill apart": (
        {"mode": "disaggregated", "prefill_ranks": "1", "decode_ranks": "1"},
        max(1, CORES // 2),
    ),
}


def run_job(job: Path, folder: Path, settings: dict[str, str], threads: int, dtype: str) -> Path:
    """Run the job once; returns the run folder."""
    sets = {f"cluster.{key}": value for key, value in settings.items()}
    sets |= {"output.dir": str(folder), "model.dtype": dtype}
    options = [item for key, value in sets.items() for item in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "batchinfer", "run", str(job), *options]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 3):
        sys.exit(done.stderr)
    return folder


def tokens_per_s(run: Path) -> float:
    """Tokens per second between the start of the first step and the end of the last."""
    steps = f"read_parquet('{run}/stats/steps/*.parquet')"
    sql = f"SELECT sum(new_tokens) / (max(start_s + duration_s) - min(start_s)) FROM {steps}"
    return float(duckdb.execute(sql).fetchall()[0][0])


def comm_shares(run: Path) -> str:
    """Return the shares of communication: waiting for the other rank, moving, and hidden parts of the moving."""
    steps = f"read_parquet('{run}/stats/steps/*.parquet')"
    sql = f"SELECT sum(comm_s), sum(wait_comm_s), sum(hidden_comm_s) FROM {steps}"
    ((comm_s, wait_s, hidden_s),) = duckdb.execute(sql).fetchall()
    if not comm_s:
        return ""
    moving_s = comm_s - wait_s
    split = f"{wait_s / comm_s:.0%} waiting, of {moving_s:.2f} s moving {hidden_s / moving_s:.0%} hidden"
    return f"   communication {comm_s:.2f} s: {split}"


def rows_of(run: Path) -> list[list[int]]:
    """The tokens of every output row, in order."""
    files = sorted((run / "outputs").rglob("*.parquet"))
    return [tokens for file in files for tokens in pq.read_table(file)["token_ids"].to_pylist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each layout")
    parser.add_argument("--job", type=Path, default=ROOT / "jobs" / "demo.toml")
    options = parser.parse_args()
    speeds: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    shares: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(options.rounds):
            for name, (settings, threads) in LAYOUTS.items():
                folder = Path(scratch) / f"{number}-{len(speeds[name])}-{list(LAYOUTS).index(name)}"
                run = run_job(options.job, folder, {"prefill_ranks": "1", **settings}, threads, "float32")
                speeds[name].append(tokens_per_s(run))
                shares[name] = comm_shares(run)
        medians = {name: statistics.median(values) for name, values in speeds.items()}
        first = next(iter(medians.values()))
        print(f"sample job in float32, {CORES} cores, medians of {options.rounds} runs taken in turn")
        for name, median in medians.items():
            spread = f"{min(speeds[name]):,.0f} - {max(speeds[name]):,.0f}"
            print(f"  {name:28} {median:9,.0f} tokens/s ({spread})   x {median / first:.2f}{shares[name]}")
        one, *others = (
            rows_of(run_job(options.job, Path(scratch) / f"bfloat16-{index}", settings, 1, "bfloat16"))
            for index, settings in enumerate(
                ({"prefill_ranks": "1"}, {"prefill_ranks": "2"}, {"prefill_ranks": "2", "decode_requests": "16"})
            )
        )
        for what, rows in zip(("2 ranks", "2 ranks, batches of 16"), others, strict=True):
            equal = sum(left == right for left, right in zip(one, rows, strict=True))
            print(f"bfloat16: {equal} of {len(one)} rows equal with {what} ({equal / len(one):.4f})")


if __name__ == "__main__":
    main()
