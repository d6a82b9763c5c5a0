"""float32 in C++ against plain PyTorch: seconds of the sample job's model steps, by turns in one run; medians.

Both give the same answers, which is checked. The limit of the machine is not what such a small model meets: most of a
plain PyTorch step passes between operations.

    python tests/bench/float32.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import duckdb

sys.path.insert(0, str(Path(__file__).parent))

from ranks import CORES, ROOT, rows_of, run_job

BACKENDS = {"C++": "auto", "plain PyTorch": "reference"}
LAYOUTS = {f"1 rank, {CORES} threads": (1, CORES), "2 ranks": (2, max(1, CORES // 2))}


def seconds_of_steps(run: Path) -> dict[str, float]:
    """Per kind of step the seconds of all of them, the busiest rank's."""
    steps = f"read_parquet('{run}/stats/steps/*.parquet')"
    of_ranks = f"SELECT kind, rank, sum(duration_s) AS seconds FROM {steps} GROUP BY ALL"
    return dict(duckdb.execute(f"SELECT kind, max(seconds) FROM ({of_ranks}) GROUP BY kind").fetchall())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each")
    parser.add_argument("--job", type=Path, default=ROOT / "jobs" / "demo.toml")
    options = parser.parse_args()
    for layout, (num_ranks, threads) in LAYOUTS.items():
        seconds: dict[tuple[str, str], list[float]] = {}
        answers = {}
        for turn in range(options.rounds):
            for name, backend in BACKENDS.items():
                with tempfile.TemporaryDirectory() as scratch:
                    settings = {"prefill_ranks": str(num_ranks), "backend": backend}
                    run = run_job(options.job, Path(scratch) / str(turn), settings, threads, "float32")
                    answers[name] = rows_of(run)
                    of_run = seconds_of_steps(run)
                    for kind, total in (*of_run.items(), ("all", sum(of_run.values()))):
                        seconds.setdefault((name, kind), []).append(total)
        medians = {key: statistics.median(values) for key, values in seconds.items()}
        equal = sum(ours == theirs for ours, theirs in zip(*answers.values(), strict=True))
        print(f"{layout}: tokens of {equal} of {len(answers['C++'])} rows equal")
        for kind in ("prefill", "decode", "all"):
            fast, plain = medians["C++", kind], medians["plain PyTorch", kind]
            print(f"  {kind:<8} C++ {fast * 1e3:8.1f} ms   plain PyTorch {plain * 1e3:8.1f} ms   {plain / fast:5.1f}x")


if __name__ == "__main__":
    main()
