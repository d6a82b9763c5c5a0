"""Options of the tests for machines whose time is limited."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.all  # make test: nothing, as only CI has a limit

EXPECTED = ["test_c", "test_a", "test_b"]  # sorted by a digest of the text and the name
TESTS = """
import pathlib, pytest

@pytest.mark.parametrize("number", range(3))
def test_something(number):
    with pathlib.Path("ran").open("a") as file:
        file.write(f"{pathlib.Path(__file__).stem}\\n")
"""


def run_tests(folder, *options):
    """Run three files of three tests each; return what pytest said, and the files in the order of their tests."""
    for name in ("test_a", "test_b", "test_c"):
        (folder / f"{name}.py").write_text(TESTS)
    (folder / "ran").write_text("")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = [str(ROOT / "tests"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout, (folder / "ran").read_text().split()


def test_no_test_begins_once_time_is_up_and_their_number_is_said(tmp_path):
    said, ran = run_tests(tmp_path, "-n", "2", "--until=0")
    assert ran == []
    assert "NOT RUN, as time was up: 9 tests of 3 files" in said


def test_before_that_all_run_with_files_in_the_order_of_the_text(tmp_path):
    said, ran = run_tests(tmp_path, "-p", "no:xdist", f"--until={time.time() + 3600}", "--order=f")
    assert "NOT RUN" not in said
    assert [ran.count(name) for name in ("test_a", "test_b", "test_c")] == [3, 3, 3]
    assert ran[::3] == EXPECTED
