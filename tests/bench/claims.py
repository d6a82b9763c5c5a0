"""What it costs a shared file system when many tasks claim many units: calls per unit, and how they grow.

Simulated tasks, real claims, leases and marks on a real file system (tests/claimants.py). Nothing is computed; what a
task does between two claims is only drawn. Heartbeats come on top: one call per unit held and 5 seconds.

    python tests/bench/claims.py [--folder FOLDER] [--units 100000] [--tasks 1000]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from claimants import Cost, Counter, claim_all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the file system to measure; default: the temporary folder")
    parser.add_argument("--units", type=int, default=100_000)
    parser.add_argument("--tasks", type=int, default=1_000)
    options = parser.parse_args()
    units, tasks = options.units, options.tasks
    counter = Counter()
    sizes = [(units // 100, max(1, tasks // 100)), (units // 10, max(1, tasks // 100)), (units // 10, tasks // 10)]
    print(f"{'units':>8} {'tasks':>6} {'claims/s':>9} {'calls/unit':>11}   most frequent calls per unit", flush=True)
    for num_units, num_tasks in [*sizes, (units // 10, tasks), (units, tasks // 10), (units, tasks)]:
        with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
            print(_line(claim_all(Path(scratch), num_units, num_tasks, counter)), flush=True)


def _line(cost: Cost) -> str:
    calls = sorted(cost.calls.items(), key=lambda item: -item[1])[:6]
    named = ", ".join(f"{name} {count / cost.units:.1f}" for name, count in calls)
    rate = cost.units / cost.seconds
    return f"{cost.units:>8,} {cost.workers:>6,} {rate:>9,.0f} {cost.calls_per_unit:>11.1f}   {named}"


if __name__ == "__main__":
    main()
