"""Ctrl-C ends pytest and every process that its tests have started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found in /proc")

TIMEOUT_S = 120.0
MARK = "CTRL_C_TEST"
# A long job, whose ranks run until they are stopped, as a process of its own and in the process of the test.
TESTS = """
import pytest
from support.jobs import batchinfer, start, write_job, write_questions

@pytest.mark.parametrize("number", [1, 2])
def test_long_job(number, tmp_path):
    write_questions(tmp_path / "prompts", (40,))
    sampling = {"max_tokens": 2000, "ignore_eos": True}
    job = write_job(tmp_path, sampling=sampling, cluster={"prefill_ranks": 2, "backend": "reference"})
    COMMAND
"""
COMMANDS = {"in this process": 'batchinfer("run", job).code', "as a process": 'start("run", job).communicate()'}


def marked(mark: str) -> dict[int, str]:
    """Return the command lines of all processes that have inherited the mark, by process id."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # the process has ended, or belongs to another user
            continue
    return {pid: command for pid, command in found.items() if command}  # zombies have none


def wait_until_ranks_run(pytest_process: subprocess.Popen[str], folder: Path) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not list(folder.rglob("units/*/[0-9]*/claim.json")):
        assert pytest_process.poll() is None, pytest_process.communicate()[0]
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("how", "options"),
    [("in this process", ["-p", "no:xdist"]), ("as a process", ["-n", "2"])],
    ids=["one process", "two workers"],
)
def test_ctrl_c_ends_pytest_and_leaves_no_process(how, options, tmp_path):
    file = tmp_path / "test_long_job.py"
    file.write_text(TESTS.replace("COMMAND", COMMANDS[how]))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = [str(ROOT / "tests"), environment.get("PYTHONPATH", "")]
    environment |= {MARK: str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, path))}
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", *options]
    command += [f"--basetemp={tmp_path / 'base'}", str(file)]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as ran:
        wait_until_ranks_run(ran, tmp_path)
        ran.send_signal(signal.SIGINT)
        said, _ = ran.communicate(timeout=TIMEOUT_S)
    assert ran.returncode == pytest.ExitCode.INTERRUPTED, said
    deadline_s = time.monotonic() + 10
    while marked(str(tmp_path)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert marked(str(tmp_path)) == {}
