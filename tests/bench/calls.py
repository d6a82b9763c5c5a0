"""Calls from Python: what the first and the next ones take; whether a long one is as quick and small as the command.

    python tests/bench/calls.py [--sizes sample small] [--rows 20000] [--rounds 3]

Seconds of a call: until its first prefill step began, and until the caller has the rows. The long job is on the sample
model, with output tokens to the limit; memory is the largest sum of what all processes of the job hold, shared once.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from bench_models import make_model  # noqa: E402

import batchinfer  # noqa: E402
from support.jobs import output_bytes, write_job, write_shard  # noqa: E402

SAMPLE_MODEL = TESTS.parent / "sample_data" / "model"
SHORT = ["The ferry", "The baker"]
LONG = {"max_tokens": 48, "ignore_eos": True}


def call(answer: Callable[..., Any], folder: Path) -> str:
    """Seconds of a call until its first step, and until its end."""
    started_s = time.time()
    answer(SHORT, max_tokens=4, output=folder)
    ended_s = time.time()
    first_s = max(row["first_prefill_s"] for row in ds.dataset(folder / "stats" / "nodes").to_table().to_pylist())
    return f"{first_s - started_s:5.2f} {ended_s - started_s:5.2f}"


def compare_calls(name: str, path: Path, dtype: str, scratch: Path) -> None:
    """Run one round: a separate run, then four calls of a model."""

    def generate(data: Any, **settings: Any) -> Any:
        return batchinfer.generate(data, model=path, dtype=dtype, **settings)

    shown = [f"generate {call(generate, scratch / 'own')}"]
    with batchinfer.Model(path, dtype=dtype) as model:
        shown += [f"call {number + 1} {call(model.generate, scratch / str(number))}" for number in range(4)]
    print(f"{name:8} {'   '.join(shown)}", flush=True)


def held_bytes(pid: int) -> int:
    """Memory of a process's descendants; what several of them share counts once (PSS)."""
    total = 0
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            try:
                found = re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{child}/smaps_rollup").read_text(), re.M)
                total += (int(found[1]) * 1024 if found else 0) + held_bytes(int(child))
            except OSError:  # it has just ended
                continue
    return total


def measured(run: Callable[[], object]) -> tuple[float, float]:
    """(seconds, GB at most)."""
    over, most = threading.Event(), [0]

    def watch() -> None:
        while not over.wait(0.2):
            most.append(held_bytes(os.getpid()))

    thread = threading.Thread(target=watch)
    thread.start()
    started_s = time.time()
    run()
    seconds = time.time() - started_s
    over.set()
    thread.join()
    return seconds, max(most) / 1e9


def compare_long(rows: int, rounds: int, scratch: Path) -> None:
    """The same job by the command, by generate and by a Model that is loaded, in turn."""
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefgh ", k=120)) for _ in range(rows)]
    write_shard(scratch / "prompts" / "a.parquet", {"id": range(rows), "prompt": texts}, row_group_size=4096)
    model = {"path": str(SAMPLE_MODEL), "dtype": "bfloat16"}
    found: dict[str, list[tuple[float, float]]] = {"command": [], "generate": [], "Model": []}
    for turn in range(rounds):
        folders = {name: scratch / f"{name}-{turn}" for name in found}
        job = write_job(scratch, model=model, sampling=LONG, output={"dir": str(folders["command"])})
        command = [sys.executable, "-m", "batchinfer", "run", str(job)]
        found["command"].append(measured(lambda: subprocess.run(command, check=True, capture_output=True)))  # noqa: B023
        own = {"model": SAMPLE_MODEL, "dtype": "bfloat16", "output": folders["generate"], **LONG}
        found["generate"].append(measured(lambda: batchinfer.generate(texts, **own)))  # noqa: B023
        with batchinfer.Model(SAMPLE_MODEL, dtype="bfloat16") as held:
            held.generate(SHORT, max_tokens=2)
            call = lambda: held.generate(texts, output=folders["Model"], **LONG)  # noqa: B023, E731
            found["Model"].append(measured(call))
        answers = [list(output_bytes(folder).values()) for folder in folders.values()]
        assert answers[1] == answers[2]
        for name, values in found.items():
            print(f"turn {turn + 1}: {name:8} {values[-1][0]:6.1f} s, {values[-1][1]:.2f} GB at most", flush=True)
    for name, values in found.items():
        seconds, gigabytes = (statistics.median(column) for column in zip(*values, strict=True))
        print(f"median: {name:8} {seconds:6.1f} s, {gigabytes:.2f} GB at most")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="*", default=["sample", "small"])
    parser.add_argument("--rows", type=int, default=20000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.sizes:
            path = SAMPLE_MODEL if name == "sample" else make_model(Path(folder) / name, name)
            for turn in range(asked.rounds):
                compare_calls(name, path, "bfloat16", Path(folder) / f"{name}-{turn}")
        if asked.rows:
            compare_long(asked.rows, asked.rounds, Path(folder))


if __name__ == "__main__":
    main()
