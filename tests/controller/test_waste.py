"""What a kill costs: at most what was not committed, and the report counts it as wasted tokens.

What ranks really run is counted in the ranks themselves, in a file of its own, beside all that the program keeps.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import textwrap
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from support.faults import MIXED, descendants, ended, wait_until
from support.jobs import batchinfer, output_bytes, start, write_job, write_questions

# Stands in no product file; ranks find it by PYTHONPATH. A rank stops itself after TRAP_STOP_AFTER steps.
COUNTER = """
import os, signal
if "BATCHINFER_RANK_NUMBER" in os.environ:
    from batchinfer.protocol import channel, feed
    channel.Channel.send_on = lambda self, at_fault: None  # what is sent is on its way
    plain, steps = feed.Feed.send, []
    def counted(self, report, num_running=0):
        plain(self, report, num_running)
        self.send_steps()
        steps.append(report.record.new_tokens)
        with open(os.environ["TRAP_STEPS"], "a") as file:
            file.write(f"{report.record.new_tokens}\\n")
        if len(steps) == int(os.environ["TRAP_STOP_AFTER"]):
            os.kill(os.getpid(), signal.SIGSTOP)
    feed.Feed.send = counted
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A job of one unit that commits only at its end unless told otherwise, and its outputs."""
    folder = tmp_path_factory.mktemp("reference")
    write_questions(folder / "prompts", (12, 9, 6))
    # plain PyTorch takes its time: in C++ all would be done before something could be committed
    cluster = {"decode_requests": 3, "commit_seconds": 3600.0, "backend": "reference"}
    job = write_job(folder, cluster=cluster, sampling=MIXED)
    assert batchinfer("run", job).code == 0
    return job, output_bytes(folder / "run")


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """Counts what ranks run; a function that says how much that was so far, step by step."""
    (tmp_path / "counter").mkdir()
    (tmp_path / "counter" / "sitecustomize.py").write_text(textwrap.dedent(COUNTER))
    paths = [str(tmp_path / "counter"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("TRAP_STEPS", str(tmp_path / "steps"))
    monkeypatch.setenv("TRAP_STOP_AFTER", "0")

    def read() -> list[int]:
        path = tmp_path / "steps"
        return list(map(int, path.read_text().split())) if path.exists() else []

    return read


def noted_steps(run: Path) -> int:
    """Steps that the controller knows of, committed or not; -1 if it took a journal away meanwhile."""
    try:
        journals = [path.read_text().count("\n") for path in run.glob("stats/steps/*.journal")]
    except FileNotFoundError:
        return -1
    return sum(journals) + rows_of(run, "stats/steps/*.parquet")


def rows_of(run: Path, files: str) -> int:
    return sum(pq.read_metadata(path).num_rows for path in run.glob(files))


def metrics_of(run: Path) -> dict:
    return json.loads(batchinfer("report", run, "--json").out)


@pytest.mark.all  # make test: a killed rank, below
@pytest.mark.parametrize("commit_s", [pytest.param(3600.0, marks=pytest.mark.slow), 0.05])
def test_what_a_killed_controller_had_computed_since_the_last_commit_counts_as_wasted(
    reference, tmp_path, monkeypatch, counted, commit_s
):
    job, outputs = reference
    calm = json.loads(
        batchinfer("report", job.parent / "run", "--json", "--sql", "SELECT sum(new_tokens) n FROM steps").out
    )
    run = tmp_path / "run"
    options = ("--set", f"output.dir={run}", "--set", f"cluster.commit_seconds={commit_s}")
    monkeypatch.setenv("TRAP_STOP_AFTER", "40")
    first = start("run", job, *options)
    # the rank has stopped after its 40th step, and the controller knows all of them
    wait_until(lambda: len(counted()) == 40 and noted_steps(run) == 40, first)
    (rank,) = descendants(first.pid)
    first.kill()
    os.kill(rank, signal.SIGKILL)
    first.communicate()
    kept = rows_of(run, "units/*/[0-9]*/part-*.parquet")
    assert kept > 0 if commit_s < 1 else kept == 0
    # how many depends on when the last commit was, which may have come after the last step
    lost_steps = 40 - rows_of(run, "stats/steps/*.parquet")
    assert lost_steps == 40 if commit_s > 1 else lost_steps < 40

    monkeypatch.setenv("TRAP_STOP_AFTER", "0")
    again = batchinfer("run", job, *options)
    assert again.code == 0, again.err
    assert output_bytes(run) == outputs
    metrics = metrics_of(run)
    needed = calm[0]["n"]
    assert metrics["wasted_tokens"] == sum(counted()) - needed > 0
    if commit_s > 1:  # all that ran before the kill was in vain
        assert metrics["wasted_tokens"] == sum(counted()[:40])
    assert metrics["rows_error"] == 0
    assert rows_of(run, "stats/steps/*-lost.parquet") == lost_steps
    if lost_steps:  # what finishing again meets once more
        assert len(list(run.glob("stats/steps/*.journal"))) == 1
    # finishing again counts nothing twice
    (run / "stats" / "run.parquet").unlink()
    assert batchinfer("finish", run).code == 0
    assert metrics_of(run)["wasted_tokens"] == metrics["wasted_tokens"]


def test_a_killed_rank_loses_what_was_running_and_the_report_counts_it(reference, tmp_path, monkeypatch, counted):
    job, outputs = reference
    calm = json.loads(
        batchinfer("report", job.parent / "run", "--json", "--sql", "SELECT sum(new_tokens) n FROM steps").out
    )
    run = tmp_path / "run"
    monkeypatch.setenv("TRAP_STOP_AFTER", "40")
    process = start("run", job, "--set", f"output.dir={run}")
    wait_until(lambda: len(counted()) == 40 and noted_steps(run) == 40, process)
    (rank,) = descendants(process.pid)
    # the next one must not stop: it is told so in a file that is read when it starts
    (tmp_path / "counter" / "sitecustomize.py").write_text(
        textwrap.dedent(COUNTER).replace('int(os.environ["TRAP_STOP_AFTER"])', "0")
    )
    os.kill(rank, signal.SIGKILL)
    done = ended(process)
    assert done.code == 0, done.err
    assert output_bytes(run) == outputs
    assert metrics_of(run)["wasted_tokens"] == sum(counted()) - calm[0]["n"] > 0


def test_finished_requests_are_durable_within_commit_seconds(reference, tmp_path):
    """By the dates of result files; a machine that is busy with other things may take a little longer."""
    job, _ = reference
    run, commit_s = tmp_path / "run", 0.02
    done = batchinfer("run", job, "--set", f"output.dir={run}", "--set", f"cluster.commit_seconds={commit_s}")
    assert done.code == 0, done.err
    parts = sorted(run.glob("units/*/[0-9]*/part-*.parquet"))
    assert len(parts) > 2
    steps = json.loads(batchinfer("report", run, "--json", "--sql", "SELECT start_s FROM steps ORDER BY 1").out)
    hiccup_s = max(after["start_s"] - before["start_s"] for before, after in itertools.pairwise(steps))
    waits = [
        path.stat().st_mtime - finished_s
        for path in parts
        for finished_s in pq.read_table(path, columns=["finished_s"])["finished_s"].to_pylist()
    ]
    print(f"{len(parts)} commits, longest wait {max(waits):.2f} s, step {hiccup_s:.2f} s")
    assert max(waits) < commit_s + hiccup_s + 2.0
