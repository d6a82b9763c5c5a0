"""From an empty folder: the wheel, a new environment, a job file by init, a run, its answers and its report.

Nothing of the repository and no git is at hand there: only the wheel, a model folder, and files of rows. What the wheel
needs comes from the environment of the tests, and in the slow test from a package index.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
import time
import tomllib
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchinfer_kernels.cpu import build
from support.paths import ROOT

pytestmark = pytest.mark.all  # the wheel in an environment of its own; make test: test_first, in this one

SOURCES = {"batchinfer": "batchinfer", "kernels/batchinfer_kernels": "batchinfer_kernels"}  # in the tree, in the wheel
LIMIT_S = 300  # promised of the first answers, install included; they take a fifth of it on two busy cores
KEPT = {"HOME", "LANG", "TMPDIR", "XDG_CACHE_HOME"}
QUESTIONS = [
    {"id": f"q{number}", "messages": [{"role": "user", "content": f"Add {number} and 3."}]} for number in range(12)
]


@dataclass
class Newcomer:
    """A new user: a virtual environment, and an empty folder in which commands run."""

    venv: Path
    folder: Path
    variables: dict[str, str]
    waited_s: float = 0.0  # for all commands so far

    def run(self, program: str, *arguments: str | Path, code: int = 0) -> str:
        """Run a program of the environment and return its stdout."""
        started_s = time.monotonic()
        command = [str(self.venv / "bin" / program), *map(str, arguments)]
        ended = subprocess.run(
            command, cwd=self.folder, env=self.variables, capture_output=True, text=True, check=False
        )
        took_s = time.monotonic() - started_s
        self.waited_s += took_s
        print(f"{took_s:6.1f} s  {program} {' '.join(map(str, arguments))[:100]}")
        assert ended.returncode == code, ended.stderr
        return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"), "--no-isolation")


@pytest.fixture(scope="module")
def newcomer(wheel, tmp_path_factory) -> Newcomer:
    """A new user whose environment has the dependencies of the tests' environment."""
    person = move_in(tmp_path_factory.mktemp("newcomer"))
    install(person, wheel)
    return person


def install(person: Newcomer, wheel: Path) -> None:
    """Install the wheel, with the dependencies of the tests' environment."""
    own = Path(person.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (own / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    person.run("python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--force-reinstall", wheel)


def build_wheel(folder: Path, *options: str, **variables: str) -> Path:
    """Build the wheel of this tree in a copy, so that no file of an earlier build gets into it.

    Args:
        options: of `python -m build`.
        variables: added to the environment.
    """
    source = folder / "source"
    for name in ("batchinfer", "kernels", "jobs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--wheel", *options, "--outdir", str(folder), str(source)]
    ended = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (made,) = folder.glob("*.whl")
    return made


def move_in(folder: Path, without: tuple[str, ...] = ()) -> Newcomer:
    """A new environment, an empty folder, and a PATH on which everything is but git and the programs `without`."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    programs = folder / "programs"
    programs.mkdir()
    for place in map(Path, os.get_exec_path()):
        for program in place.iterdir() if place.is_dir() else ():
            if not program.name.startswith("git") and program.name not in without:
                with suppress(FileExistsError):  # an earlier one on the PATH counts
                    (programs / program.name).symlink_to(program)
    assert shutil.which("git", path=programs) is None
    # none of what the tests set for themselves
    variables = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith("PIP_")}
    (folder / "empty").mkdir()
    return Newcomer(folder / "venv", folder / "empty", variables | {"PATH": f"{folder / 'venv' / 'bin'}:{programs}"})


def answer_questions(person: Newcomer) -> None:
    """The first steps of docs/first-steps.md over rows of one's own."""
    shutil.copytree(ROOT / "sample_data" / "model", person.folder / "model")
    (person.folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    said = person.run("batchinfer", "init", "questions.jsonl", "--model", "model")
    assert "12 rows in 1 of 1 file that" in said
    person.run("batchinfer", "plan", "job.toml")
    report = person.run("batchinfer", "run", "job.toml")
    assert "12 output rows: 12 ok, 0 error" in report
    peeked = json.loads(person.run("batchinfer", "peek", "job.toml", "--json"))
    assert {row["id"] for row in peeked} <= {row["id"] for row in QUESTIONS}
    (file,) = (person.folder / "runs" / "job" / "outputs").glob("*.parquet")
    rows = pq.read_table(file).to_pylist()
    assert [(row["id"], row["status"]) for row in rows] == [(row["id"], "ok") for row in QUESTIONS]
    assert json.loads(person.run("batchinfer", "report", "job.toml", "--json"))["rows"] == 12
    person.run("batchinfer", "report", "job.toml", "--html", "report.html")
    assert "<svg" in (person.folder / "report.html").read_text()
    assert person.waited_s < LIMIT_S


def test_the_wheel_holds_every_file_of_the_packages_and_the_batch_scripts(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    for place, name in SOURCES.items():
        files = [path for path in (ROOT / place).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert {path.suffix for path in files} > {".py"}
        missing = {f"{name}/{path.relative_to(ROOT / place)}" for path in files} - held
        assert not missing
    data = wheel.name.removesuffix("-py3-none-any.whl") + ".data/data/share/batchinfer/jobs"
    assert {f"{data}/array.sbatch", f"{data}/finish.sbatch"} <= held


def test_links_of_the_description_are_whole_addresses(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = archive.read(name).decode()
    links = re.findall(r"\]\(([^)]+)\)", metadata)
    assert len(links) > 20
    assert {link for link in links if not link.startswith(("https://", "#"))} == set()
    assert "Author: The batchinfer developers" in metadata
    assert "Classifier: Operating System :: POSIX :: Linux" in metadata


def test_what_runs_is_the_wheel(newcomer):
    code = "import batchinfer, batchinfer_kernels as kernels; print(batchinfer.__file__, kernels.__file__, sep='\\n')"
    for file in newcomer.run("python", "-c", code).splitlines():
        assert Path(file).is_relative_to(newcomer.venv)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert newcomer.run("batchinfer", "--version") == f"batchinfer, version {version}\n"


def test_a_newcomer_gets_answers_and_a_report(newcomer):
    answer_questions(newcomer)
    new = ("--set", "output.dir=runs/next")
    sent = newcomer.run("batchinfer", "submit", "job.toml", *new, "--array", "2", "--dry-run")
    assert str(newcomer.venv / "share" / "batchinfer" / "jobs" / "array.sbatch") in sent


@pytest.mark.slow  # from the tree: make demo
def test_the_sample_job_runs_from_the_wheel(newcomer):
    for name in ("sample_data", "jobs"):
        shutil.copytree(ROOT / name, newcomer.folder / "sample" / name)
    newcomer.run("batchinfer", "run", "sample/jobs/demo.toml", code=3)  # six bad rows are in it on purpose
    accuracy = newcomer.run("batchinfer", "report", "sample/runs/demo", "--sql", "@sample/jobs/accuracy.sql")
    assert accuracy.splitlines()[-1].split() == ["all", "tasks", "318", "318", "100"]


@pytest.mark.slow  # make test: test_cpu_build, with the library of this machine
def test_a_wheel_for_one_platform_runs_the_sample_job_without_a_compiler(tmp_path):
    wheel = build_wheel(tmp_path, "--no-isolation", BATCHINFER_COMPILED="1")
    assert re.fullmatch(r"batchinfer-[\d.]+-py3-none-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        compiled = [name for name in archive.namelist() if name.endswith(".so")]
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        assert f"Requires-Dist: torch=={build.torch_release()}" in archive.read(metadata).decode().splitlines()
    all_sets = [known for known in build.INSTRUCTION_SETS if not known.for_tests]
    assert len(compiled) == len(all_sets)
    person = move_in(tmp_path, without=("c++", "g++", "gcc", "cc", "clang", "clang++"))
    install(person, wheel)
    for name in ("sample_data", "jobs"):
        shutil.copytree(ROOT / name, person.folder / "sample" / name)
    for known in (known for known in all_sets if build.why_not_for(known) is None):
        person.variables |= {build.CHOICE: known.name, "XDG_CACHE_HOME": str(tmp_path / known.name)}
        code = "from batchinfer_kernels.cpu import build; print(build.explain())"
        assert person.run("python", "-P", "-c", code).startswith(f"for {known.name}, ")
        run = f"sample/runs/{known.name}"
        person.run("batchinfer", "run", "sample/jobs/demo.toml", "--set", f"output.dir=../runs/{known.name}", code=3)
        accuracy = person.run("batchinfer", "report", run, "--sql", "@sample/jobs/accuracy.sql")
        assert accuracy.splitlines()[-1].split() == ["all", "tasks", "318", "318", "100"]


@pytest.mark.slow
def test_a_full_install_from_a_package_index_answers(tmp_path):
    """Torch and all else newly installed, and the C++ operations compiled as for the first time."""
    wheel, person = build_wheel(tmp_path), move_in(tmp_path)
    person.variables["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    pip = ("-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
    person.run("python", *pip, "torch")
    person.run("python", *pip, wheel)
    answer_questions(person)
    assert "C++" in person.run("batchinfer", "doctor")
