"""The controller's processor time per request and per step, with a rank that computes nothing.

    python tests/bench/controller_host.py [--rows 20000] [--slots 256] [--profile]

A job of short prompts is planned. The controller then claims units, reads and deals requests, sends them, takes the
reports of every step and writes the results, as in a run. The rank's steps end at once, in another process.
Times are those of the processor (user and system), so a busy machine changes them little.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from outside_the_model import write_prompts  # noqa: E402

from batchinfer import own_process  # noqa: E402
from support.jobs import start  # noqa: E402
from support.scripted_ranks import ScriptedGroup, controller_of  # noqa: E402

WARM_ROWS = 300


def run(folder: Path, num_rows: int, num_slots: int, profile: cProfile.Profile | None = None) -> tuple[float, int]:
    """Return the processor seconds of the controller of a job, and the number of its steps."""
    job = write_prompts(folder, "short", num_rows)
    planning = start("plan", job)
    _, err = planning.communicate()
    if planning.returncode:
        sys.exit(err)
    group = ScriptedGroup(num_slots)
    with controller_of(job, group) as controller:
        before_s = time.process_time()
        if profile is None:
            controller.run()
        else:
            profile.runcall(controller.run)
        return time.process_time() - before_s, group.num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    options = parser.parse_args()
    own_process.configure_interpreter()  # as a command does
    profile = cProfile.Profile(time.process_time) if options.profile else None
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder) / "warm", WARM_ROWS, options.slots)  # imports, compiled functions
        used_s, num_steps = run(Path(folder) / "timed", options.rows, options.slots, profile)
    print(
        f"{options.rows:,} requests, {num_steps:,} steps: {1e6 * used_s / options.rows:.1f} us a request, "
        f"{1e3 * used_s / num_steps:.2f} ms a step, each with all that the controller does"
    )
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
