"""The example at the top of the README, run as it is written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

SHELL, PYTHON = re.search(
    r"```\n(printf .*?)```.*?```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
).groups()
ANSWERS = ["67 crowns", "42 crowns"]


@pytest.fixture
def folder(tmp_path):
    """Return an empty folder in which the sample model is where the README says."""
    (tmp_path / "sample_data").symlink_to(ROOT / "sample_data")
    return tmp_path


def output_of(command: list[str], folder: Path) -> str:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = os.environ | {"PATH": programs, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))}
    ended = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_commands_answer_rows_of_a_csv(folder):
    printed = output_of(["bash", "-e", "-c", SHELL], folder)
    assert re.findall(r"\d+ crowns", printed) == ANSWERS


def test_the_python_program_prints_the_answers(folder):
    assert output_of([sys.executable, "-c", PYTHON], folder).strip() == str(ANSWERS)
