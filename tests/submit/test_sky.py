"""The SkyPilot files: its own validation where it is installed, else their shape and shell."""

from __future__ import annotations

import subprocess

import pytest
import yaml

from support.paths import ROOT

FILES = [ROOT / "jobs" / "sky" / name for name in ("tasks.yaml", "finish.yaml")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_their_commands_are_sound_shell_that_reads_the_run_as_one_word(path):
    task = yaml.safe_load(path.read_text())
    assert subprocess.run(["bash", "-n"], input=task["run"], text=True, check=False).returncode == 0
    assert task["run"].rstrip().endswith('"$RUN"')
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_skypilot_takes_them(path):
    sky = pytest.importorskip("sky", reason="NOT CHECKED BY SKYPILOT: it is not installed (pip install skypilot)")
    task = sky.Task.from_yaml(str(path))
    task.validate_run()
    (resources,) = task.resources
    assert resources.use_spot
    assert resources.job_recovery["recover_on_exit_codes"] == [75]
