"""Faults on purpose: a job worth disturbing, failed rows, ranks killed at random moments."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.checked_json import publish_json, read_json
from batchinfer.controller.units import result_table
from batchinfer.data.tokenizer_process import MOST_STARTS
from batchinfer.plan import packing
from batchinfer.records import Completion, DamagedFileError, RequestKey
from batchinfer.run.units.result_files import write_results
from support.jobs import Ended, batchinfer, output_bytes, start, write_job, write_questions

# many small steps and commits, in plain PyTorch: in C++ all is done before it can be disturbed
SLOW = {"decode_requests": 3, "commit_seconds": 0.05, "backend": "reference"}
LONG = {"max_tokens": 24, "ignore_eos": True}
MIXED = {**LONG, "temperature": 0.7}
UNIT_TOKENS = 300  # of small jobs that are to have several units
TWO = ("--set", "cluster.prefill_ranks=2")
_APART = ("--set", "cluster.mode=disaggregated")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one": (),
    "two": TWO,
    "four": ("--set", "cluster.prefill_ranks=4"),
    "apart": (*_APART, "--set", "cluster.prefill_ranks=1", "--set", "cluster.decode_ranks=1"),
    "apart 2 + 2": (*_APART, "--set", "cluster.prefill_ranks=2", "--set", "cluster.decode_ranks=2"),
    "gloo": (*TWO, "--set", "cluster.exchange=gloo"),
}


def make_reference(folder: Path, counts: tuple[int, ...] = (12, 9, 6)) -> tuple[Path, dict[str, bytes]]:
    """A folder with job.toml, and the job's output files from one rank that nothing disturbed."""
    write_questions(folder / "prompts", counts)
    job = write_job(folder, cluster=SLOW, sampling=MIXED)
    assert batchinfer("run", job).code == 0
    return folder, output_bytes(folder / "run")


def plan_units(job: Path, run: Path, *options: str) -> Path:
    """The job planned into more units than one, in this run folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "MIN_UNIT_TOKENS", UNIT_TOKENS)
        assert batchinfer("plan", job, *options, "--set", f"output.dir={run}").code == 0
    return run


def fail_some(run: Path, num_failed: int) -> list[tuple[int, int]]:
    """Make error rows of some results, as if these requests had brought the ranks down; their (shard, row)."""
    failed: list[tuple[int, int]] = []
    new_names = {}
    for path in sorted(run.glob("units/*/*/part-*.parquet")):
        table = pq.read_table(path)
        if len(failed) == num_failed or len(table) < 2:
            continue
        rows = table.to_pylist()
        rows[0] = _given_up(rows[0])
        failed.append((rows[0]["shard"], rows[0]["row"]))
        path.unlink()
        write_results(path.parent, int(path.stem.split("-")[1]), pa.Table.from_pylist(rows, schema=table.schema))
        new_names[path] = next(path.parent.glob(f"{path.stem.rpartition('-')[0]}-*"))
    assert len(failed) == num_failed
    for mark in (run / "done").iterdir():
        content = read_json(mark)
        files = [new_names.get(run / name, run / name) for name in content["files"]]
        sizes = {str(file.relative_to(run)): file.stat().st_size for file in files}
        publish_json(mark, {**content, "files": sizes})
    return failed


def _given_up(row: dict[str, Any]) -> dict[str, Any]:
    """The result of the same request as a controller writes it when the request has brought the ranks down."""
    completion = Completion(
        key=RequestKey(row["shard"], row["row"], row["sample"]),
        unit=row["unit"],
        text="",
        token_ids=[],
        finish_reason="error",
        stop_reason=None,
        prompt_tokens=row["prompt_tokens"],
        cached_memory_tokens=0,
        cached_disk_tokens=0,
        kv_tokens_sum=0,
        error="the rank died",
    )
    return result_table([completion]).to_pylist()[0]


def descendants(pid: int) -> list[int]:
    """Processes below `pid`, as /proc shows them now."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        if fields[0] not in "ZX":
            parents[int(stat.parent.name)] = int(fields[1])
    found, frontier = [], {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier}
        found += sorted(frontier)
    return found


def rank_processes(pid: int) -> list[int]:
    """Processes below `pid` that run a rank's program: the one that ranks may be forked from, then the ranks."""
    found = []
    for process in descendants(pid):
        with suppress(OSError):  # ended meanwhile
            if b"batchinfer.rank.main" in Path(f"/proc/{process}/cmdline").read_bytes():
                found.append(process)
    return found


def ranks_of(pid: int) -> list[int]:
    """Ranks below `pid`, without the process that they may be forked from."""
    found = rank_processes(pid)
    forking = {process for process in found if not set(found).isdisjoint(descendants(process))}
    return [process for process in found if process not in forking]


def wait_until(condition: Callable[[], Any], process: subprocess.Popen[str], timeout_s: float = 200.0) -> Any:
    """Wait for something to become true while the process runs."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def ended(process: subprocess.Popen[str]) -> Ended:
    """Wait for the process and return how it ended."""
    out, err = process.communicate(timeout=400)
    return Ended(process.returncode, out, err)


def kill_the_command(
    job: Path, options: tuple[str, ...], rng: random.Random, *, num_kills: int, longest_s: float
) -> None:
    """Start the whole command `num_kills` times and kill each after a while, unless it has ended."""
    for _ in range(num_kills):
        process = start("run", job, *options)
        try:
            process.wait(timeout=rng.uniform(0.3, longest_s))
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()


def run_while_killing(
    job: Path, run: Path, options: tuple[str, ...], *, num_kills: int, seed: int
) -> tuple[Ended, int]:
    """Run the job and kill its descendants at random moments.

    Before the run is planned there are fewer than MOST_STARTS kills: its tokenizer process is not started more often.

    Returns:
        How the job ended, and how often somebody was killed.
    """
    rng, num_killed = random.Random(seed), 0
    process = start("run", job, "--set", f"output.dir={run}", *options)
    for _ in range(num_kills):
        if num_killed == MOST_STARTS - 1:
            wait_until(lambda: process.poll() is not None or _is_planned(run), process)
        try:
            process.wait(timeout=rng.uniform(0.2, 6.0 if num_killed else 1.5))
            break
        except subprocess.TimeoutExpired:  # it is still running: kill something
            pass
        below = descendants(process.pid)
        if below:
            os.kill(rng.choice(below), signal.SIGKILL)
            num_killed += 1
    return ended(process), num_killed


def _is_planned(run: Path) -> bool:
    try:
        return bool(read_json(run / "run.json", "state")["state"] != "planning")
    except DamagedFileError:  # it is not there yet
        return False
