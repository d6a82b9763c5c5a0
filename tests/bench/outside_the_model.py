"""Where the time of a job of many short prompts goes: what share of it is not spent in model steps or loading.

10,000 distinct texts of some 130 tokens, 48 output tokens each, the sample model in bfloat16 on one rank. The parts
follow one another and add up to the seconds from the shell to the end of the command:

    starting    the command itself: Python and its imports
    planning    reading, checking and tokenising the rows, ordering them; the rank starts and loads meanwhile
    loading     what the rank still needs once the plan stands
    in steps    of the model
    between     them: dealing requests, agreeing, reporting
    writing     from the end of the last step on: results, outputs, statistics, the report

    python tests/bench/outside_the_model.py [--rows 10000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import duckdb

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from jobs import start, write_job, write_shard  # noqa: E402

MODEL = TESTS.parent / "sample_data" / "model"
WORDS, NUM_OUTPUT = (25, 55), 48
PARTS = ("starting", "planning", "loading", "in steps", "between", "writing")


def write_prompts(folder: Path, num_rows: int) -> Path:
    """A job of texts of random words out of the README; returns the job file."""
    rng = random.Random(0)
    words = [word for word in (TESTS.parent / "README.md").read_text().split() if word.isalpha()]
    texts = [f"Row {row}: {' '.join(rng.choices(words, k=rng.randint(*WORDS)))}" for row in range(num_rows)]
    write_shard(folder / "prompts" / "a.parquet", {"id": list(range(num_rows)), "prompt": texts}, row_group_size=1000)
    return write_job(
        folder,
        model={"path": str(MODEL), "dtype": "bfloat16"},
        sampling={"max_tokens": NUM_OUTPUT, "ignore_eos": True},
    )


def run_once(job: Path) -> dict[str, float]:
    """Seconds of each part, of tokenising (a part of planning), and of all."""
    run = job.parent / "run"
    shutil.rmtree(run, ignore_errors=True)
    started_s = time.time()
    process = start("run", job, "--trace")
    _, err = process.communicate()
    ended_s = time.time()
    if process.returncode:
        sys.exit(err)
    steps = f"read_parquet('{run}/stats/steps/*.parquet')"
    sql = f"SELECT min(start_s), max(start_s + duration_s), sum(duration_s) FROM {steps}"
    ((first_s, last_s, steps_s),) = duckdb.execute(sql).fetchall()
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    plan = next(event for event in events if event["name"] == "plan")
    plan_s, planned_s = plan["ts"] / 1e6, (plan["ts"] + plan["dur"]) / 1e6
    rows = re.search(r"tokenise: ([\d,]+) of .*\(([\d,.]+)/s", err)
    assert rows is not None, err
    num_rows, rate = (float(figure.replace(",", "")) for figure in rows.groups())
    return {
        "starting": plan_s - started_s,
        "planning": planned_s - plan_s,
        "loading": first_s - planned_s,
        "in steps": steps_s,
        "between": last_s - first_s - steps_s,
        "writing": ended_s - last_s,
        "tokenising": num_rows / rate,
        "wall": ended_s - started_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        job = write_prompts(Path(scratch), options.rows)
        runs = [run_once(job) for _ in range(options.rounds)]
    middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    for name in PARTS:
        note = f"   of it tokenising {middle['tokenising']:.2f} s" if name == "planning" else ""
        print(f"{name:<10}{middle[name]:>8.2f} s{middle[name] / middle['wall']:>8.1%}{note}")
    outside = statistics.median(1 - (run["in steps"] + run["loading"]) / run["wall"] for run in runs)
    print(f"{'wall':<10}{middle['wall']:>8.2f} s, {outside:.1%} of it neither in steps nor loading")


if __name__ == "__main__":
    main()
