"""Times of steps, requests and sessions go on steadily while the machine's clock is set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import duckdb
import pytest

from batchinfer import clock
from batchinfer.launch.rank_process import RankEnvironment
from support.jobs import batchinfer, write_job, write_questions

HOUR_S = 3600
# a process's clock is set half a second after its first look at it; ranks find this by PYTHONPATH
SET_CLOCK = """
import time
def set_later(plain, shift, first=[]):
    first.append(time.monotonic())
    return lambda: plain() + shift * (time.monotonic() > first[0] + 0.5)
time.time, time.time_ns = set_later(time.time, {shift}), set_later(time.time_ns, {shift} * 10**9)
"""


def test_it_is_unix_time_until_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert clock.unix_s() == pytest.approx(time.time(), abs=5)
    before = clock.unix_ns()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert 0 <= clock.unix_ns() - before < 10 * 10**9


def test_a_rank_has_the_time_of_the_process_that_starts_it() -> None:
    # an hour off: by its own look at the clock it would not be
    variables = RankEnvironment(0).variables([0]) | {clock.VARIABLE: str(clock.DIFFERENCE_NS - HOUR_S * 10**9)}
    told = [sys.executable, "-c", "from batchinfer import clock; print(clock.unix_s())"]
    said = subprocess.run(told, env={**os.environ, **variables}, capture_output=True, check=True).stdout
    assert float(said) == pytest.approx(time.time() - HOUR_S, abs=60)
    assert RankEnvironment(0).variables([0])[clock.VARIABLE] == str(clock.DIFFERENCE_NS)


@pytest.mark.parametrize("shift", [-HOUR_S, HOUR_S])
def test_a_clock_that_is_set_during_a_run_changes_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    write_questions(tmp_path / "prompts", (6,))
    code = SET_CLOCK.format(shift=shift)
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    for name in ("time", "time_ns"):
        monkeypatch.setattr(time, name, getattr(time, name))  # restores it
    exec(code)
    assert batchinfer("run", write_job(tmp_path, cluster={"backend": "reference"})).code == 0
    report = json.loads(batchinfer("report", tmp_path / "run", "--json").out)
    assert 0 < report["busy_s"] < report["wall_s"] < HOUR_S / 2
    assert 0 < report["startup_s"] < report["wall_s"]
    assert report["steps_outside_s"] is None
    columns = "max(finished_s) - min(admitted_s), min(first_token_s - admitted_s), min(finished_s - first_token_s)"
    sql = f"SELECT {columns} FROM '{tmp_path}/run/stats/requests.parquet'"
    (seconds,) = duckdb.connect().execute(sql).fetchall()
    assert 0 < seconds[0] < report["wall_s"]
    assert min(seconds[1:]) >= 0
