"""A run folder on a file system that lacks what runs rely on is refused before anything is done.

The kernel itself refuses the system call (a seccomp filter in the command's process): no file system without hard
links or rename can be mounted everywhere.
"""

import os
import platform
import subprocess
import sys

import pytest

from batchinfer.records import ConfigError
from batchinfer.run.store import probe
from batchinfer.rundir import RunDir
from support.jobs import batchinfer, write_job, write_questions

# numbers of system calls: those that make hard links, and those that rename
CALLS = {
    "x86_64": {"links": [86, 265], "rename": [82, 264, 316]},
    "aarch64": {"links": [37], "rename": [38, 276]},
}

PROGRAM = """
import ctypes, struct, sys
from batchinfer.program import program
refused = [int(number) for number in sys.argv.pop(1).split(",")]
LOAD, JUMP_EQUAL, RETURN, ALLOW, ERRNO, EPERM = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000, 1
step = struct.Struct("HBBI")
steps = [step.pack(LOAD, 0, 0, 0)]  # the number of the system call
steps += [step.pack(JUMP_EQUAL, len(refused) - place, 0, number) for place, number in enumerate(refused)]
steps += [step.pack(RETURN, 0, 0, ALLOW), step.pack(RETURN, 0, 0, ERRNO | EPERM)]
code = ctypes.create_string_buffer(b"".join(steps))
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0, "no new privileges"
assert libc.prctl(22, 2, ctypes.byref(Filter(len(steps), ctypes.addressof(code)))) == 0, "seccomp"
program()
"""


def without(calls, *arguments):
    """Run the command where the kernel refuses these system calls."""
    if sys.platform != "linux" or platform.machine() not in CALLS:
        pytest.skip(f"NOT TESTED: numbers of system calls are known for Linux on {', '.join(CALLS)} only")
    numbers = ",".join(map(str, CALLS[platform.machine()][calls]))
    command = [sys.executable, "-c", PROGRAM, numbers, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    write_questions(folder / "prompts", (2,))
    return write_job(folder)


@pytest.mark.parametrize(("calls", "named"), [("links", "no exclusive create"), ("rename", "no rename")])
def test_plan_says_what_the_file_system_lacks(job, calls, named):
    refused = without(calls, "plan", job)
    assert refused.returncode == 2, refused.stderr
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"error: the file system of output.dir {job.parent / 'run'} has {named}")
    assert "output.publish" in line
    assert os.listdir(job.parent / "run") == ["plan.lock"]


def test_work_says_it_too_on_another_machine(job):
    assert batchinfer("plan", job).code == 0
    refused = without("links", "work", job)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: the file system of output.dir")
    assert not (job.parent / "run" / "units").exists()


def test_the_probe_leaves_nothing_behind(tmp_path):
    probe.check_file_system(RunDir(tmp_path))
    assert os.listdir(tmp_path) == []


def test_what_a_killed_probe_leaves_behind_is_no_run(job):
    folder = job.parent / "other"
    (folder / ".probe-abc").mkdir(parents=True)
    assert batchinfer("plan", job, "--set", "output.dir=other").code == 0


def test_a_folder_that_shows_old_content_is_refused(tmp_path, monkeypatch):
    """A cache that does not see a rename, which no file system of this machine has: here it is read as it was."""
    monkeypatch.setattr(
        probe.Path, "read_text", lambda path: "old" if path.name == "renamed" else path.read_bytes().decode()
    )
    with pytest.raises(ConfigError, match="does not show what was written to it last"):
        probe.check_file_system(RunDir(tmp_path))
