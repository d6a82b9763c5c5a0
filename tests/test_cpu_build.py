"""The C++ operations are built once, by one process, and whatever ends a build leaves nothing in the way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchinfer_kernels.cpu import build

KERNELS = Path(build.__file__).parents[2]
ROOT = Path(__file__).parents[1]


# The build, in processes of their own. Most get a compiler that is a script: what it makes is not loaded.

ASK = "from batchinfer_kernels.cpu import build; print(build.why_not())"
MAKE = "from batchinfer_kernels.cpu import build; print(build.library())"


@pytest.fixture
def supported():
    try:
        build._check_processor()
    except build.BuildError as error:
        pytest.skip(f"the C++ operations cannot run here: {error}")


def start(code, cache, **environment):
    variables = {
        **os.environ,
        "PYTHONPATH": f"{KERNELS}{os.pathsep}{ROOT}",
        "XDG_CACHE_HOME": str(cache),
        **environment,
    }
    return subprocess.Popen(
        [sys.executable, "-c", code], env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def answer(process):
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    lines = [line for line in output.splitlines() if not line.startswith("compiling the C++ operations")]
    return "\n".join(lines).strip()


def write_compiler(folder, body):
    """A compiler that notes each call in `calls`, then does `body` ($out: the file to make)."""
    path = folder / "compiler"
    path.unlink(missing_ok=True)  # one that still runs cannot be written to
    path.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/calls\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done\n{body}\n'
    )
    path.chmod(0o755)
    return str(path)


def num_calls(folder):
    return len((folder / "calls").read_text().splitlines())


def entries(cache):
    return sorted(path.suffix or path.name for path in (cache / "batchinfer/kernels").iterdir())


NUM_COMMANDS = len(list(build.SOURCES.glob("*.cpp"))) + 1


@pytest.mark.usefixtures("supported")
def test_without_a_compiler_the_reason_says_so(tmp_path):
    reason = answer(start(ASK, tmp_path, PATH=str(tmp_path), CXX=""))
    assert reason == "no C++ compiler on this machine (c++, g++, clang++); install one or set CXX"


@pytest.mark.usefixtures("supported")
def test_a_cache_that_cannot_be_written_is_the_reason(tmp_path):
    (tmp_path / "file").touch()
    reason = answer(start(ASK, tmp_path / "file", CXX=write_compiler(tmp_path, "touch $out")))
    assert reason == f"the cache folder {tmp_path}/file/batchinfer/kernels cannot be used: Not a directory"


@pytest.mark.usefixtures("supported")
def test_a_compiler_that_fails_is_the_reason_and_is_asked_again_next_time(tmp_path):
    compiler = write_compiler(tmp_path, "echo 'kernels.h:1: error: no such word' >&2; exit 3")
    for attempt in (1, 2):
        reason = answer(start(ASK, tmp_path, CXX=compiler))
        assert reason == f"{compiler} failed with code 3: kernels.h:1: error: no such word"
        assert num_calls(tmp_path) >= attempt
    assert entries(tmp_path) == [".failed", ".lock"]
    write_compiler(tmp_path, "touch $out")
    assert answer(start(MAKE, tmp_path, CXX=compiler)).endswith(".so")


@pytest.mark.usefixtures("supported")
def test_a_library_that_cannot_be_loaded_is_a_reason(tmp_path):
    reason = answer(start(ASK, tmp_path, CXX=write_compiler(tmp_path, "echo nonsense > $out")))
    assert ".so" in reason
    assert "\n" not in reason


@pytest.mark.usefixtures("supported")
def test_processes_that_start_at_once_build_once(tmp_path):
    compiler = write_compiler(tmp_path, "sleep 0.5; touch $out")
    paths = {answer(process) for process in [start(MAKE, tmp_path, CXX=compiler) for _ in range(4)]}
    assert len(paths) == 1
    assert num_calls(tmp_path) == NUM_COMMANDS
    assert entries(tmp_path) == [".lock", ".so"]


def test_a_build_that_failed_while_others_waited_is_not_tried_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", write_compiler(tmp_path, "touch $out"))
    failed = (build._cache_folder() / build._digest()).with_suffix(".failed")
    failed.parent.mkdir(parents=True)
    failed.write_text("not today")
    os.utime(failed, (time.time() + 1000,) * 2)  # after this process began to ask
    with pytest.raises(build.BuildError, match="not today"):
        build.library()
    assert not (tmp_path / "calls").exists()
    os.utime(failed, (0, 0))  # long ago
    assert build.library().exists()


@pytest.mark.usefixtures("supported")
def test_a_build_that_was_killed_leaves_nothing_in_the_way(tmp_path):
    slow = start(MAKE, tmp_path, CXX=write_compiler(tmp_path, "sleep 60"))
    deadline = time.monotonic() + 60
    while not (tmp_path / "calls").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    slow.send_signal(signal.SIGKILL)
    slow.communicate()
    assert any("building" in path.name for path in (tmp_path / "batchinfer/kernels").iterdir())
    assert answer(start(MAKE, tmp_path, CXX=write_compiler(tmp_path, "touch $out"))).endswith(".so")
    assert entries(tmp_path) == [".lock", ".so"]


@pytest.mark.usefixtures("supported", "cpp")
def test_a_built_library_needs_no_compiler_and_no_writing(tmp_path):
    built = build.library()
    folder = tmp_path / "batchinfer/kernels"
    folder.mkdir(parents=True)
    shutil.copy(built, folder / built.name)
    folder.chmod(0o555)
    assert answer(start(ASK, tmp_path, PATH=str(tmp_path))) == "None"
    assert [path.name for path in folder.iterdir()] == [built.name]


@pytest.mark.usefixtures("supported", "cpp")
def test_a_damaged_library_is_built_again(tmp_path):
    built = build.library()
    folder = tmp_path / "batchinfer/kernels"
    folder.mkdir(parents=True)
    (folder / built.name).write_bytes(built.read_bytes()[:1000])
    again = start(ASK, tmp_path, CXX=write_compiler(tmp_path, f"cp {built} $out"))
    said, last = answer(again).splitlines()[0], (folder / built.name).read_bytes()
    assert "cannot be loaded" in said
    assert "building it again" in said
    assert last == built.read_bytes()
    assert num_calls(tmp_path) == NUM_COMMANDS
    assert answer(start(ASK, tmp_path, PATH=str(tmp_path))) == "None"


@pytest.mark.usefixtures("supported", "cpp")
def test_a_library_that_stays_damaged_is_a_reason(tmp_path):
    folder = tmp_path / "batchinfer/kernels"
    folder.mkdir(parents=True)
    (folder / build.library().name).write_bytes(b"not a library")
    said = answer(start(ASK, tmp_path, CXX=write_compiler(tmp_path, "touch $out")))
    assert said.splitlines()[-1] not in ("", "None")
    assert num_calls(tmp_path) == NUM_COMMANDS


def test_nothing_is_built_for_float32(tmp_path):
    code = "import torch, batchinfer_kernels.backend as b; b.select('linear', dtype=torch.float32); print('imported')"
    assert answer(start(code, tmp_path, CXX=write_compiler(tmp_path, "touch $out"))) == "imported"
    assert not (tmp_path / "calls").exists()
    assert not (tmp_path / "batchinfer").exists()
