"""The commands for a GPU machine, tested without a GPU: refusals, transferred files and returned files."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from support.cuda_stand_ins import needs_interpreter
from support.paths import ROOT

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
import parcel
from accelerator import folder_of

pytestmark = pytest.mark.all  # make test: test_gpu_check, test_gpu_figures

OK, FAILED, UNUSABLE, UNFINISHED = 0, 1, 2, 3
WHEELS = [line for line in (ROOT / "tests/gpu/wheels.txt").read_text().splitlines() if line and line[0] != "#"]


def bash(script, *arguments, **environment):
    return subprocess.run(
        ["bash", str(ROOT / "tests/gpu" / script), *map(str, arguments)],
        env=os.environ | {"PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


# ---- run.sh


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_stops_where_there_is_no_gpu(tmp_path):
    done = bash("run.sh", "--call", "1", tmp_path / "results")
    assert done.returncode == UNUSABLE
    assert "needs a Hopper GPU" in done.stderr
    assert not (tmp_path / "results").exists()


def test_options_that_are_wrong_are_named(tmp_path):
    for arguments, sentence in (
        (["--only", "slices"], "there is no section 'slices'"),
        (["--minutes", "soon"], "--minutes takes a number above 0"),
        (["--call", "4"], "--call takes 1, 2, 3, job, ranks or stream"),
        (["--fast"], "there is no option --fast"),
    ):
        done = bash("run.sh", *arguments)
        assert done.returncode == UNUSABLE
        assert sentence in done.stderr
    done = bash("run.sh", "--rehearse", tmp_path / "results", tmp_path)
    assert done.returncode == UNUSABLE
    assert "has no *.whl files" in done.stderr


@pytest.mark.all  # make test: all that must travel, below
@needs_interpreter
def test_it_says_what_time_did_not_allow_and_packs_what_there_is(tmp_path):
    done = bash("run.sh", "--rehearse", "--minutes", "0.1", tmp_path / "results")
    assert done.returncode == UNFINISHED, done.stderr
    for section in (
        "compile",
        "tests-operations",
        "slice",
        "check",
        "tests-engine",
        "profile",
        "counters",
        "job",
        "ranks",
        "stream",
    ):
        assert f"== {section}: not run, time is up" in done.stdout
    assert (tmp_path / "results" / "rehearsal" / "summary.md").read_text() == "Nothing has been measured.\n"
    parcel.unpack(tmp_path / "results.tar.xz", tmp_path / "back")
    assert (tmp_path / "back" / "rehearsal" / "machine.txt").exists()


@pytest.mark.all  # make test: tests that cannot run, below
@needs_interpreter
def test_sections_that_nobody_asked_for_say_nothing(tmp_path):
    done = bash("run.sh", "--rehearse", "--minutes", "0.1", "--only", "slice", tmp_path / "results")
    assert [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("==")] == ["== slice"]
    assert not (tmp_path / "results" / "rehearsal" / "counters.txt").exists()


@needs_interpreter
def test_tests_that_cannot_run_count_as_not_run(tmp_path):
    """pytest says 5 where a module that is missing skips all tests."""
    (tmp_path / "msgspec.py").write_text("raise ModuleNotFoundError('msgspec')")
    arguments = ["--rehearse", "--call", "3", "--only", "tests-engine", tmp_path / "results"]
    done = bash("run.sh", *arguments, PYTHONPATH=str(tmp_path))
    assert done.returncode == UNFINISHED, done.stdout
    assert "NO msgspec here" in done.stdout
    assert "== tests-engine: NOT RUN, see the reasons above" in done.stdout


@pytest.mark.slow
@needs_interpreter
def test_all_three_calls_go_on_from_each_other(tmp_path):
    for call in (1, 2, 3):
        done = bash("run.sh", "--rehearse", "--call", call, tmp_path / "results")
        assert done.returncode == OK, done.stdout + done.stderr
        parcel.unpack(tmp_path / "results.tar.xz", tmp_path / "back")
        (tmp_path / "results").rename(tmp_path / f"call-{call}")
        (tmp_path / "back").rename(tmp_path / "results")
    summed_up = (tmp_path / "results" / "rehearsal" / "summary.md").read_text()
    assert "| decode EP144 | 4 |" in summed_up
    assert "| prefill EP32 | 80 |" in summed_up
    assert " checks, 0 failed" in summed_up
    assert {path.name for path in (tmp_path / "results" / "rehearsal").glob("trace-*")} == {
        "trace-decode.json.gz",
        "trace-prefill.json.gz",
    }


@pytest.mark.slow  # make test: test_gpu_job; make test-all: test_staged_ranks
@needs_interpreter
@pytest.mark.parametrize(("call", "compared"), [("job", "the job"), ("ranks", "one rank")])
def test_calls_of_jobs_run_from_a_bare_copy_and_keep_what_is_done(tmp_path, call, compared):
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, files):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes((ROOT / name).read_bytes())
    command = ["bash", "tests/gpu/run.sh", "--rehearse", "--call", call, str(tmp_path / "results")]
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for turn in range(2):
        done = subprocess.run(
            command,
            cwd=tmp_path / "tree",
            env=environment | nowhere | {"PYTHON": sys.executable},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == OK, done.stdout + done.stderr
        assert ("of weights written" in done.stdout) is (turn == 0)
        assert f"12 of 12 answers are those of {compared}, to the byte" in done.stdout
        assert "FAILED" not in done.stdout
    model = tmp_path / "results" / "rehearsal"
    assert "12 of 12 answers" in (model / "summary.md").read_text()
    assert sum(path.stat().st_size for path in model.iterdir()) < 200_000


def test_every_gpu_model_has_a_folder_of_its_own():
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H800")
    assert [folder_of(name) for name in names] == ["nvidia-h100-80gb-hbm3", "nvidia-h200", "nvidia-h800"]


# ---- results as one archive


@pytest.mark.all  # make test: all that must travel, below
def test_compiled_kernels_come_back_where_results_lie_elsewhere(tmp_path):
    kernel = tmp_path / "results" / "caches" / "triton" / "KEY"
    kernel.mkdir(parents=True)
    for name in ("k.cubin", "k.json", "k.ttir", "k.ptx"):
        (kernel / name).write_text(name)
    files = {path.name: str(path) for path in kernel.iterdir()}
    (kernel / "__grp__k.json").write_text(json.dumps({"child_paths": files}))
    compiled = tmp_path / "results" / "caches" / "deep_gemm" / "cache" / "kernel.1"
    compiled.mkdir(parents=True)
    (compiled / "kernel.cu").write_text("source")
    (tmp_path / "results" / "nvidia-h200").mkdir()
    (tmp_path / "results" / "nvidia-h200" / "slice.jsonl").write_text("{}\n")
    assert parcel.main(["pack", str(tmp_path / "results"), str(tmp_path / "out" / "a.tar.xz")]) == OK
    assert parcel.main(["unpack", str(tmp_path / "out" / "a.tar.xz"), str(tmp_path / "back")]) == OK
    back = tmp_path / "back" / "caches" / "triton" / "KEY"
    assert {path.name for path in back.iterdir()} == {"k.cubin", "k.json", "__grp__k.json"}
    moved = json.loads((back / "__grp__k.json").read_text())["child_paths"]
    assert moved == {name: str(back / name) for name in ("k.cubin", "k.json")}
    assert (tmp_path / "back" / "caches" / "deep_gemm" / "cache" / "kernel.1" / "kernel.cu").exists()
    assert (tmp_path / "back" / "nvidia-h200" / "slice.jsonl").read_text() == "{}\n"


@pytest.mark.all  # make test: test_what_is_missing_too_large_or_foreign_is_said
def test_archives_that_cannot_be_used_are_named(tmp_path, capsys):
    (tmp_path / "no.tar.xz").write_text("no archive")
    with tarfile.open(tmp_path / "outside.tar.xz", "w:xz") as file:
        file.addfile(tarfile.TarInfo("../outside"), io.BytesIO())
    with tarfile.open(tmp_path / "link.tar.xz", "w:xz") as file:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        file.addfile(link)
    (tmp_path / "there").mkdir()
    for arguments, sentence in (
        (["unpack", "no.tar.xz", "new"], "no.tar.xz cannot be unpacked"),
        (["unpack", "outside.tar.xz", "new"], "outside.tar.xz cannot be unpacked"),
        (["unpack", "link.tar.xz", "other"], "link.tar.xz cannot be unpacked"),
        (["unpack", "no.tar.xz", "there"], "there is there already"),
        (["pack", "missing", "new.tar.xz"], "there is no folder"),
        (["send"], "usage:"),
    ):
        assert parcel.main([arguments[0], *(str(tmp_path / name) for name in arguments[1:])]) == UNUSABLE
        assert sentence in capsys.readouterr().err
    assert not (tmp_path.parent / "outside").exists()


# ---- what travels


@pytest.fixture
def wheels(tmp_path):
    """Empty files with the names of all wheels."""
    (tmp_path / "wheels").mkdir()
    for one in WHEELS:
        name, version = one.split("==")
        (tmp_path / "wheels" / f"{name.replace('-', '_')}-{version}-py3-none-any.whl").touch()
    return tmp_path / "wheels"


def test_all_that_must_travel_is_listed_and_packed(wheels, tmp_path):
    (tmp_path / "results.tar.xz").write_text("earlier")
    done = bash("pack.sh", "--offline", "--into", tmp_path / "all.tar", wheels, tmp_path / "results")
    assert done.returncode == OK, done.stdout + done.stderr
    assert "results.tar.xz: earlier results, to go on with" in done.stdout
    with tarfile.open(tmp_path / "all.tar") as file:
        names = set(file.getnames())
    assert {"batchinfer/pyproject.toml", "batchinfer/tests/gpu/run.sh", "batchinfer/results.tar.xz"} <= names
    assert sum(name.startswith("batchinfer/gpu-wheels/") for name in names) == len(WHEELS)
    assert not any(name.startswith("batchinfer/.git/") or "__pycache__" in name for name in names)


def test_what_is_missing_too_large_or_foreign_is_said(wheels, tmp_path):
    first, second, *_ = sorted(wheels.iterdir())
    first.unlink()
    os.truncate(second, 61 * 2**20)
    (wheels / "other-1.0-py3-none-any.whl").touch()
    done = bash("pack.sh", "--offline", "--into", tmp_path / "all.tar", wheels, tmp_path / "results")
    assert done.returncode == FAILED
    assert f"MISSING      {first.name.split('-')[0].replace('_', '-')}==" in done.stdout
    assert "other-1.0-py3-none-any.whl is not on the list" in done.stdout
    assert "that is too large by" in done.stdout
    assert not (tmp_path / "all.tar").exists()
    os.truncate(second, 0)
    done = bash("pack.sh", "--offline", wheels, tmp_path / "results")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (FAILED, "it is not complete")
    for arguments, sentence in ((["--python", "new"], "takes a version like 3.12"), (["--all"], "no option --all")):
        done = bash("pack.sh", *arguments)
        assert done.returncode == UNUSABLE
        assert sentence in done.stderr
