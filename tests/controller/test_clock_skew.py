"""Nodes whose clocks are minutes apart: nobody takes a living controller's units, and a dead one's are taken over.

Real processes under faketime, from Debian's package: their wall clock is wrong, their monotonic clock and the dates of
files are not, as on a real node. Where that is allowed (root), they are also on hosts of different names, so that none
can look whether the other process lives.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchinfer.plan import packing
from support.faults import MIXED, SLOW, descendants, ended, wait_until
from support.jobs import batchinfer, output_bytes, write_job, write_questions

pytestmark = pytest.mark.system  # make test: test_lease_watch, whose clocks are simulated

# faster than on a cluster, as far as a busy machine allows; the lease itself only where somebody is to be given up
QUICK_BEATS = """
from batchinfer.run.store.folder import FolderStorage
from batchinfer.run.store import watch
FolderStorage.beat_s, watch.LEASE_S = 0.3, {lease_s}
from batchinfer.program import program
program()
"""


@pytest.fixture(scope="module")
def faketime() -> str:
    """The command; as root on Debian it is installed when it is missing."""
    if shutil.which("faketime") is None and os.getuid() == 0 and Path("/etc/debian_version").exists():
        install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "faketime"]
        if subprocess.run(install, check=False, capture_output=True, timeout=300).returncode:
            subprocess.run(["apt-get", "update", "-q"], check=False, capture_output=True, timeout=300)
            subprocess.run(install, check=False, capture_output=True, timeout=300)
    found = shutil.which("faketime")
    if found is None:
        reason = "NOT TESTED WITH WRONG CLOCKS: faketime is missing, and only root on Debian can install it"
        warnings.warn(reason, stacklevel=1)
        pytest.skip(reason)
    # named after processes; one that was killed leaves them behind, and the next of its number would refuse to start
    for left in [path for path in Path("/dev/shm").glob("*faketime_s[eh]m_*") if not is_running(path.name)]:
        left.unlink()
    return found


def is_running(name: str) -> bool:
    """Whether the process is there after which this is named."""
    return Path("/proc", name.rpartition("_")[2]).exists()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A job of several units (the folder `many`) or one (`run`), only planned, and its outputs."""
    folder = tmp_path_factory.mktemp("reference")
    write_questions(folder / "prompts", (6, 4, 2))
    job = write_job(folder, cluster=SLOW, sampling=MIXED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "MIN_UNIT_TOKENS", 60)
        assert batchinfer("plan", job, "--set", "output.dir=many").code == 0
    for name in ("run", "done"):
        assert batchinfer("plan", job, "--set", f"output.dir={name}").code == 0
    assert batchinfer("run", job, "--set", "output.dir=done").code == 0
    return folder, output_bytes(folder / "done")


def start_at(faketime: str, offset: str, host: str, run: Path, *, lease_s: float) -> subprocess.Popen[str]:
    """`work` on a node of this name whose clock is off by this much."""
    words = [faketime, "-f", offset, sys.executable, "-c", QUICK_BEATS.format(lease_s=lease_s), "work", str(run)]
    if os.getuid() == 0 and shutil.which("unshare"):
        words = ["unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh", *words]
    # as on a node with a wrong clock: time goes on evenly, and files have the dates of their server
    environment = os.environ | {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1", "FAKE_UTIME": "0"}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def claims_of(run: Path) -> list[int]:
    """How often each unit was claimed."""
    return [len(list(unit.glob("[0-9]*"))) for unit in sorted((run / "units").iterdir())]


def test_controllers_with_clocks_minutes_apart_do_not_take_each_others_units(faketime, reference, tmp_path):
    run = Path(shutil.copytree(reference[0] / "many", tmp_path / "run"))
    offsets = {"slow": "-9m", "fast": "+8m"}
    controllers = [start_at(faketime, offset, host, run, lease_s=60.0) for host, offset in offsets.items()]
    for controller in controllers:
        done = ended(controller)
        assert done.code == 0, done.err
    assert len(claims_of(run)) > 3
    assert set(claims_of(run)) == {1}
    assert batchinfer("finish", run).code == 0
    assert output_bytes(run) == reference[1]
    # the clocks were wrong indeed
    starts = [row["start_s"] for path in run.glob("stats/nodes/*") for row in pq.read_table(path).to_pylist()]
    assert max(starts) - min(starts) > 600
    assert json.loads(batchinfer("report", run, "--json").out)["rows_ok"] == 12


@pytest.mark.parametrize("offsets", [("+8m", "-9m"), pytest.param(("-9m", "+8m"), marks=pytest.mark.slow)])
def test_a_dead_nodes_units_are_taken_over_whatever_its_clock_said(faketime, reference, tmp_path, offsets):
    run = Path(shutil.copytree(reference[0] / "run", tmp_path / "run"))
    first = start_at(faketime, offsets[0], "first", run, lease_s=60.0)
    wait_until(lambda: list(run.glob("units/*/[0-9]*/part-*.parquet")), first)
    for process in (*descendants(first.pid), first.pid):  # the whole node
        os.kill(process, signal.SIGKILL)
    first.communicate()
    second = ended(start_at(faketime, offsets[1], "second", run, lease_s=1.5))
    assert second.code == 0, second.err
    assert claims_of(run) == [2]
    assert batchinfer("finish", run).code == 0
    assert output_bytes(run) == reference[1]
