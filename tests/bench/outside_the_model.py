"""The time of a job of 10,000 rows by part: the share in which the model neither computes nor loads.

Two jobs of distinct texts, in bfloat16 on one rank:

    short    some 130 prompt tokens, 48 output tokens each, the sample model: overhead weighs as much as it can
    mixed    32 to 1,024 prompt tokens, 16 to 128 output tokens, random weights: `tiny` of bench_models.py and its
             unshared lengths, with the sample tokenizer's vocabulary

The parts follow one another and add up to the seconds from the shell to the end of the command:

    starting    the command itself, until the rank's process is started
    loading     until the rank has loaded; the rows are checked, tokenised and ordered meanwhile
    planning    what of that is left when the rank has loaded
    in steps    of the model
    between     them: dealing requests, agreeing, reporting
    writing     from the end of the last step on: results, outputs, statistics, the report

    python tests/bench/outside_the_model.py [--jobs short mixed] [--rows 10000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import duckdb
import numpy as np

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from bench_models import make_model  # noqa: E402

from support.jobs import start, write_job, write_shard  # noqa: E402

MODEL = TESTS.parent / "sample_data" / "model"
VOCABULARY, TOKENS_PER_WORD = 1024, 3.0
SHORT, SHORT_OUTPUT = (110, 150), (48, 48)
MIXED, MIXED_OUTPUT = (32, 1024), (16, 128)
PARTS = ("starting", "loading", "planning", "in steps", "between", "writing")
OF_THE_MODEL = ("loading", "in steps")


def write_prompts(folder: Path, kind: str, num_rows: int) -> Path:
    """A job of texts of random words out of the README; returns the job file."""
    rng = random.Random(0)
    words = [word for word in (TESTS.parent / "README.md").read_text().split() if word.isalpha()]
    prompt_tokens, output_tokens = (SHORT, SHORT_OUTPUT) if kind == "short" else (MIXED, MIXED_OUTPUT)
    low, high = np.log(prompt_tokens)
    lengths = [round(np.exp(rng.uniform(low, high)) / TOKENS_PER_WORD) for _ in range(num_rows)]
    columns = {
        "id": list(range(num_rows)),
        "prompt": [f"Row {row}: {' '.join(rng.choices(words, k=length))}" for row, length in enumerate(lengths)],
        "sampling": [{"max_tokens": rng.randint(*output_tokens)} for _ in range(num_rows)],
    }
    write_shard(folder / "prompts" / "a.parquet", columns, row_group_size=1000)
    model = MODEL if kind == "short" else make_model(folder / "model", "tiny", vocab_size=VOCABULARY)
    return write_job(
        folder,
        input={"sampling": "sampling"},
        model={"path": str(model), "dtype": "bfloat16"},
        sampling={"ignore_eos": True},
    )


def run_once(job: Path) -> dict[str, float]:
    """Seconds of each part, of planning (also behind loading), and of all."""
    run = job.parent / "run"
    shutil.rmtree(run, ignore_errors=True)
    started_s = time.time()
    process = start("run", job, "--trace")
    _, err = process.communicate()
    ended_s = time.time()
    if process.returncode:
        sys.exit(err)
    steps = f"read_parquet('{run}/stats/steps/*.parquet')"
    sql = f"SELECT max(start_s + duration_s), sum(duration_s) FROM {steps}"
    ((last_s, steps_s),) = duckdb.execute(sql).fetchall()
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    spans = {event["name"]: (event["ts"] / 1e6, event["dur"] / 1e6) for event in events if event["ph"] == "X"}
    ranks_s, loading_s = spans["start and load"]
    loaded_s, plan_s = ranks_s + loading_s, sum(spans["plan"])
    return {
        "starting": ranks_s - started_s,
        "loading": loading_s,
        "planning": max(0.0, plan_s - loaded_s),
        "in steps": steps_s,
        "between": last_s - max(loaded_s, plan_s) - steps_s,
        "writing": ended_s - last_s,
        "all of planning": spans["plan"][1],
        "wall": ended_s - started_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", nargs="+", choices=("short", "mixed"), default=("short", "mixed"))
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for kind in options.jobs:
        with tempfile.TemporaryDirectory() as scratch:
            job = write_prompts(Path(scratch), kind, options.rows)
            runs = [run_once(job) for _ in range(options.rounds)]
        print(f"{kind}, {options.rows:,} rows")
        middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        for name in PARTS:
            note = f"   {middle['all of planning']:.2f} s of planning beside it" if name == "loading" else ""
            print(f"  {name:<10}{middle[name]:>8.2f} s{middle[name] / middle['wall']:>8.1%}{note}")
        outside = statistics.median(1 - sum(run[name] for name in OF_THE_MODEL) / run["wall"] for run in runs)
        print(f"  {'wall':<10}{middle['wall']:>8.2f} s, {outside:.1%} of it neither in steps nor loading", flush=True)


if __name__ == "__main__":
    main()
