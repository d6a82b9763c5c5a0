"""Planning many tokenised prompts in bounded memory: prompts/s, peak memory and growth, and the machine's limits.

Makes a run folder of prompts with common beginnings (few-shot tree, 200 tokens on average) a tenth as large as asked
for, then the whole, and plans each in a process of its own: from tokens/*.parquet to plan/*.parquet, as the planner
does. Needs some 1.2 GB of disk per million prompts, deleted at the end.

    python tests/bench/prefix_stream.py [NUM_PROMPTS] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from batchinfer.plan.planner import PREFIX_MEMORY_BYTES  # noqa: E402
from support.prompt_corpus import few_shot_prompts, write_tokens  # noqa: E402

BYTES_PER_PROMPT = 1200  # on disk: tokens, sorted runs and the plan
PROBE_BYTES = 1 << 30
SORTS = ("read and sort", "merge")  # the steps of the prefix plan itself


def plan(num_prompts: int, scratch: Path) -> dict[str, Any]:
    """Run tests/support/plan_process.py for `num_prompts` prompts and return its figures, with the machine's load."""
    started = time.monotonic()
    run, _ = write_tokens(scratch / f"run-{num_prompts}", few_shot_prompts(num_prompts))
    print(f"{num_prompts:,} prompts generated in {time.monotonic() - started:,.0f} s", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "support.plan_process", str(run.root), str(PREFIX_MEMORY_BYTES)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=TESTS)
    shutil.rmtree(run.root)
    if ended.returncode:
        sys.exit(ended.stderr)
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def print_plan(found: dict[str, Any]) -> None:
    num_prompts, seconds = found["num_prompts"], found["seconds"]
    prefix_s, total_s = sum(seconds[step] for step in SORTS), sum(seconds.values())
    print(f"{num_prompts:,} prompts, {found['num_tokens']:,} tokens, {found['distinct_tokens']:,} distinct")
    print(f"  prefix plan (read, sort, merge)  {num_prompts / prefix_s:>12,.0f} prompts/s  {prefix_s:,.1f} s")
    print(f"  the whole, requests written      {num_prompts / total_s:>12,.0f} prompts/s  {total_s:,.1f} s")
    print(f"  processor seconds                {found['cpu_s']:>12,.1f} s")
    print(f"  peak memory                      {found['peak_bytes'] / 2**20:>12,.0f} MiB")
    print(f"  sorted runs on disk              {found['disk_bytes'] / 2**20:>12,.0f} MiB")
    print("  " + ", ".join(f"{step} {value:,.1f} s" for step, value in seconds.items()), flush=True)


def print_machine(num_prompts: int, scratch: Path) -> None:
    """Print the machine's limits for any plan: its disk, and a sort of as many plain numbers."""
    block = np.random.default_rng(0).bytes(1 << 24)
    file = scratch / "probe"
    started = time.monotonic()
    with open(file, "wb") as probe:
        for _ in range(PROBE_BYTES // len(block)):
            probe.write(block)
        os.fsync(probe.fileno())
        written = time.monotonic()
        os.posix_fadvise(probe.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with open(file, "rb", buffering=0) as probe:
        while probe.read(1 << 24):
            pass
    read = time.monotonic()
    file.unlink()
    keys = np.random.default_rng(0).integers(0, 2**63, num_prompts, dtype=np.uint64)
    begun = time.monotonic()
    np.argsort(keys, kind="stable")
    sorting_s = time.monotonic() - begun
    cores = len(os.sched_getaffinity(0))
    print(f"this machine: {cores} cores, load {os.getloadavg()[0]:.1f} (1.0 is one busy core)")
    speeds = [PROBE_BYTES / seconds / 1e6 for seconds in (written - started, read - written)]
    print(f"  disk write {speeds[0]:,.0f} MB/s, read {speeds[1]:,.0f} MB/s")
    print(f"  numpy stable argsort of {num_prompts:,} plain 64-bit numbers: {sorting_s:,.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("num_prompts", type=int, nargs="?", default=10_000_000)
    parser.add_argument("--folder", type=Path, help="for the files (default: the system's temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        scratch = Path(folder)
        needed, free = options.num_prompts * BYTES_PER_PROMPT + PROBE_BYTES, shutil.disk_usage(scratch).free
        if needed > free:
            sys.exit(
                f"{options.num_prompts:,} prompts need {needed:,} bytes in {scratch}, {free:,} are free; ask for fewer"
            )
        print_machine(options.num_prompts, scratch)
        small, large = (plan(number, scratch) for number in (options.num_prompts // 10, options.num_prompts))
    print_plan(small)
    print_plan(large)
    times = sum(large["seconds"].values()) / sum(small["seconds"].values())
    cpu_times = large["cpu_s"] / small["cpu_s"]
    print(f"ten times the prompts: {times:.1f} times the seconds, {cpu_times:.1f} times the processor seconds")


if __name__ == "__main__":
    main()
