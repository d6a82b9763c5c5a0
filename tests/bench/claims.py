"""The cost for a shared file system when many tasks claim many units: calls per unit, and their growth.

Simulated tasks, real claims, leases and marks on a real file system (tests/support/claimants.py). Nothing is computed;
what a task does between two claims is only drawn. Heartbeats come on top: one call per task and 5 seconds.

    python tests/bench/claims.py [--folder FOLDER] [100000x1000 ...]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.claimants import Cost, Counter, claim_all

SIZES = ("1000x10", "10000x10", "10000x100", "100000x100", "100000x1000")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", default=SIZES, metavar="UNITSxTASKS")
    parser.add_argument("--folder", type=Path, help="on the file system to measure; default: the temporary folder")
    options = parser.parse_args()
    counter = Counter()
    print(f"{'units':>8} {'tasks':>6} {'claims/s':>9} {'calls/unit':>11}   most frequent calls per unit", flush=True)
    for size in options.sizes:
        num_units, _, num_tasks = size.partition("x")
        with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
            print(_line(claim_all(Path(scratch), int(num_units), int(num_tasks), counter)), flush=True)


def _line(cost: Cost) -> str:
    calls = sorted(cost.calls.items(), key=lambda item: -item[1])[:6]
    named = ", ".join(f"{name} {count / cost.units:.1f}" for name, count in calls)
    rate = cost.units / cost.seconds
    return f"{cost.units:>8,} {cost.controllers:>6,} {rate:>9,.0f} {cost.calls_per_unit:>11.1f}   {named}"


if __name__ == "__main__":
    main()
