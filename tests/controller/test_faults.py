"""Ranks that die: the job goes on and nothing is lost or doubled; only a request that is the cause becomes an error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from support.faults import LAYOUTS, TWO, ended, make_reference, ranks_of, wait_until
from support.jobs import batchinfer, output_bytes, outputs, start


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return make_reference(tmp_path_factory.mktemp("reference"))


SLOW = pytest.mark.slow  # what a quicker case shows, too


@pytest.mark.parametrize("layout", ["two", pytest.param("gloo", marks=SLOW)])
def test_a_killed_rank_is_named_and_started_again(reference, layout):
    folder, expected = reference
    run = folder / f"named-{layout}"
    process = start("run", folder / "job.toml", "--set", f"output.dir={run}", *LAYOUTS[layout])
    wait_until(lambda: list(run.glob("units/*/[0-9]*/part-*.parquet")), process)
    killed = ranks_of(process.pid)[-1]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{killed}").exists(), process)
    wait_until(lambda: len(ranks_of(process.pid)) == 2, process)
    done = ended(process)
    assert done.code == 0, done.err
    assert "was killed by SIGKILL" in done.err
    assert "rank 1" in done.err
    assert output_bytes(run) == expected
    metrics = json.loads(batchinfer("report", run, "--json").out)
    assert metrics["rows_error"] == 0
    assert metrics["wasted_tokens"] > 0
    assert "restarts" in batchinfer("report", run).out
    assert metrics["cached_tokens"] == metrics["optimal_cached_tokens"]


@pytest.mark.parametrize("layout", [pytest.param("one", marks=SLOW), "two", pytest.param("gloo", marks=SLOW)])
def test_a_rank_that_does_not_answer_is_replaced_after_the_deadline(reference, layout):
    folder, expected = reference
    run = folder / f"stopped-{layout}"
    options = (*LAYOUTS[layout], "--set", "cluster.collective_seconds=3.0")
    process = start("run", folder / "job.toml", "--set", f"output.dir={run}", *options)
    wait_until(lambda: list(run.glob("units/*/[0-9]*/part-*.parquet")), process)
    os.kill(ranks_of(process.pid)[0], signal.SIGSTOP)
    done = ended(process)
    assert done.code == 0, done.err
    assert "starting the ranks again" in done.err
    assert output_bytes(run) == expected


def test_when_the_controller_is_killed_its_ranks_end(reference):
    folder, _ = reference
    process = start("run", folder / "job.toml", "--set", "output.dir=orphans", *TWO)
    wait_until(lambda: list((folder / "orphans").glob("units/*/[0-9]*/part-*.parquet")), process)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.all  # make test: test_resume sends the signal to the controller alone
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=SLOW), signal.SIGTERM])
def test_a_signal_to_the_whole_process_group_stops_gracefully(reference, number):
    folder, expected = reference
    run = folder / f"group-{number}"
    job = folder / "job.toml"
    command = [sys.executable, "-m", "batchinfer", "run", str(job), "--set", f"output.dir={run}", *TWO]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_until(lambda: list(run.glob("units/*/[0-9]*/part-*.parquet")), process)
    os.killpg(process.pid, number)
    done = ended(process)
    assert done.code == 75, done.err
    assert "died" not in done.err
    again = batchinfer("run", job, "--set", f"output.dir={run}", *TWO)
    assert again.code == 0, again.err
    assert output_bytes(run) == expected


# Something in the ranks that goes wrong with certain rows; it stands in no product file, ranks find it by PYTHONPATH.
TRAP = """
import os, signal
if "BATCHINFER_RANK_NUMBER" in os.environ:
    from batchinfer.rank import prefill
    plain = prefill.Prefill._built
    def trapped(self, chunks, *rest, **options):
        if any((chunk.sequence.request.key.shard, chunk.sequence.request.key.row) in ROWS for chunk in chunks):
            ACTION
        return plain(self, chunks, *rest, **options)
    prefill.Prefill._built = trapped
"""


def set_trap(folder: Path, monkeypatch, text: str) -> None:
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(textwrap.dedent(text))
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


KILL, RAISE = "os.kill(os.getpid(), signal.SIGKILL)", "raise RuntimeError('no luck with this one')"


# some seven starts of all ranks until the cause is found; a few more with more rows
@pytest.mark.parametrize(
    ("layout", "action", "shards", "bad"),
    [
        ("one", KILL, (2,), {(0, 4)}),
        pytest.param("one", RAISE, (1, 2), {(0, 5), (1, 1)}, marks=SLOW),
        pytest.param("two", KILL, (0, 1, 2), {(0, 5), (2, 1)}, marks=SLOW),
    ],
    ids=["killed", "raised", "many"],
)
def test_only_the_requests_that_bring_the_ranks_down_become_error_rows(
    reference, tmp_path, monkeypatch, layout, action, shards, bad
):
    folder, _ = reference
    set_trap(tmp_path / "trap", monkeypatch, TRAP.replace("ROWS", repr(bad)).replace("ACTION", action))
    run, named = tmp_path / "run", "SIGKILL" if action is KILL else "no luck with this one"
    files = json.dumps([f"prompts/part-{shard}.parquet" for shard in shards])
    options = ("--set", f"output.dir={run}", "--set", f"input.files={files}", *LAYOUTS[layout])
    done = batchinfer("run", folder / "job.toml", *options)
    assert done.code == 3, done.err
    expected, seen = outputs(folder / "run"), outputs(run)
    assert list(seen) == [f"part-{shard}.parquet" for shard in shards]
    for index, name in enumerate(seen):
        for good, row in zip(expected[name], seen[name], strict=True):
            if (index, row["row"]) in bad:
                assert row["status"] == "error"
                assert "only this request was running" in row["error"]
                assert named in row["error"]
                assert row["completion_tokens"] == 0
            else:  # what was cached depends on the other shards
                assert row | {"cached_tokens": 0} == good | {"cached_tokens": 0}


def test_ranks_that_never_start_end_the_job_with_the_reason(reference, tmp_path, monkeypatch):
    folder, expected = reference
    trap = """
    import os
    if "BATCHINFER_RANK_NUMBER" in os.environ:
        from batchinfer.model.transformer import Transformer
        def broken(*args, **options):
            raise RuntimeError("the moon is in the wrong place")
        Transformer.load = broken
    """
    set_trap(tmp_path / "trap", monkeypatch, trap)
    run = tmp_path / "run"
    done = batchinfer("run", folder / "job.toml", "--set", f"output.dir={run}", *TWO)
    assert done.code == 1
    assert "the moon is in the wrong place" in done.err
    assert "3 times in a row" in done.err
    monkeypatch.undo()
    assert batchinfer("run", folder / "job.toml", "--set", f"output.dir={run}", *TWO).code == 0
    assert output_bytes(run) == expected
