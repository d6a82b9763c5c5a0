"""Leases: who is known to be dead, in this namespace of processes and in others; and what the dead leave behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchinfer.checked_json import publish_json, read_json
from batchinfer.run import liveness
from batchinfer.run.store import watch
from batchinfer.run.store.folder import FolderStorage
from batchinfer.run.units.claims import UnitClaims, last_claim, lease_of
from batchinfer.rundir import RunDir

HOLD = """
import sys, time
from pathlib import Path
from batchinfer.run.store.folder import FolderStorage
from batchinfer.run.units.claims import UnitClaims
from batchinfer.rundir import RunDir
with UnitClaims(FolderStorage(RunDir(Path(sys.argv[1])))) as claims:
    print(claims.try_claim(0) is not None, flush=True)
    time.sleep(600)
"""
TRY = """
import sys
from pathlib import Path
from batchinfer.run.store.folder import FolderStorage
from batchinfer.run.units.claims import UnitClaims
from batchinfer.rundir import RunDir
with UnitClaims(FolderStorage(RunDir(Path(sys.argv[1])))) as claims:
    print(claims.try_claim(0) is not None)
"""
NEW_NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
WITH_OLD_PROC = ["unshare", "--pid", "--fork", "--kill-child"]  # where /proc has other numbers than getpid()


@pytest.fixture(scope="module")
def unshare():
    """Skips where no PID namespace can be made."""
    if shutil.which("unshare") is None or subprocess.run([*NEW_NAMESPACE, "true"], check=False).returncode:
        pytest.skip("NOT TESTED: no PID namespace can be made here (that needs root and `unshare`)")


def process(code, folder, *before):
    return subprocess.Popen([*before, sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)


def can_claim(folder, *before):
    asking = process(TRY, folder, *before)
    answer, _ = asking.communicate(timeout=60)
    assert asking.returncode == 0
    return answer.strip() == "True"


@pytest.mark.usefixtures("unshare")
@pytest.mark.parametrize(
    ("of_holder", "of_asker"),
    [
        (NEW_NAMESPACE, []),
        ([], NEW_NAMESPACE),
        (NEW_NAMESPACE, NEW_NAMESPACE),
        (WITH_OLD_PROC, []),
        ([], WITH_OLD_PROC),
        (WITH_OLD_PROC, WITH_OLD_PROC),
    ],
    ids=["holder", "asker", "both", "holder, old proc", "asker, old proc", "both, old proc"],
)
def test_a_worker_in_another_pid_namespace_is_not_taken_for_dead(tmp_path, of_holder, of_asker):
    holder = process(HOLD, tmp_path, *of_holder)
    try:
        assert holder.stdout.readline().strip() == "True"
        assert not can_claim(tmp_path, *of_asker)
    finally:
        holder.kill()
        holder.wait()
    # dead now; but only its lease says so to others
    assert not can_claim(tmp_path, *of_asker)


@pytest.mark.parametrize("before", [[], ["unshare", "--pid", "--fork", "--mount-proc"]], ids=["here", "namespace"])
def test_a_dead_worker_of_ones_own_namespace_is_seen_at_once(tmp_path, before, request):
    if before:
        request.getfixturevalue("unshare")
    script = f"""
import subprocess, sys
run = [sys.executable, "-c"]
holder = subprocess.Popen([*run, {HOLD!r}, sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(holder.stdout.readline().strip())
ask = [*run, {TRY!r}, sys.argv[1]]
print(subprocess.check_output(ask, text=True).strip())
holder.kill()
holder.wait()
print(subprocess.check_output(ask, text=True).strip())
"""
    answers, _ = process(script, tmp_path, *before).communicate(timeout=60)
    assert answers.split() == ["True", "False", "True"]


def held_by(lease, **holder):
    """Put another holder into a lease, which stays a sound one."""
    publish_json(lease, {**read_json(lease), **holder})


def test_a_holder_that_proc_hides_lives_as_long_as_it_can_be_signalled(tmp_path, monkeypatch):
    """With hidepid only one's own processes are in /proc; a run may be shared with users of other ones."""
    run = RunDir(tmp_path)
    with UnitClaims(FolderStorage(run)) as holder, UnitClaims(FolderStorage(run)) as watcher:
        assert holder.try_claim(0) is not None
        lease = lease_of(last_claim(run, 0))
        held_by(lease, pid=os.getppid(), process=f"{liveness.process_numbering()}:1")
        monkeypatch.setattr(Path, "exists", lambda path, plain=Path.exists: "/proc/" not in str(path) and plain(path))
        assert watcher.try_claim(0) is None


@pytest.mark.parametrize(
    "change",
    [
        {"host": "elsewhere"},
        {"process": "another boot:pid:[1]:5"},
        {"process": f"{liveness.process_numbering()}0:5"},
        {"process": None},
    ],
    ids=["host", "boot", "namespace", "unknown"],
)
def test_of_processes_elsewhere_nothing_but_their_lease_counts(tmp_path, monkeypatch, change):
    run = RunDir(tmp_path)
    with UnitClaims(FolderStorage(run)) as watcher:
        assert UnitClaims(FolderStorage(run)).try_claim(0) is not None
        lease = lease_of(last_claim(run, 0))
        held_by(lease, pid=2**22 + 1, **change)
        assert watcher.try_claim(0) is None
        monkeypatch.setattr(watch, "LEASE_S", 0.0)
        assert watcher.try_claim(0) is not None


@pytest.mark.parametrize(
    ("umask", "folder", "file"), [(0o022, 0o755, 0o644), (0o007, 0o770, 0o660), (0o077, 0o700, 0o600)]
)
def test_claims_leases_and_done_marks_follow_the_umask(tmp_path, umask, folder, file):
    before = os.umask(umask)
    try:
        run = RunDir(tmp_path / "run")
        with UnitClaims(FolderStorage(run)) as mine:
            mine.complete(mine.try_claim(0))
    finally:
        os.umask(before)
    for path in run.root.rglob("*"):
        assert path.stat().st_mode & 0o777 == (folder if path.is_dir() else file), path
    assert run.done(0).exists()


def test_a_holder_that_has_ended_here_is_dead_at_once(tmp_path):
    run = RunDir(tmp_path)
    child = subprocess.Popen(["sleep", "60"])
    with UnitClaims(FolderStorage(run)) as watcher:
        assert UnitClaims(FolderStorage(run)).try_claim(0) is not None
        lease = lease_of(last_claim(run, 0))
        held_by(lease, pid=child.pid, process=liveness.process_identity(child.pid))
        try:
            assert watcher.try_claim(0) is None  # it lives
        finally:
            child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has collected it
        assert watcher.try_claim(0) is not None
        child.wait()


def test_the_heartbeat_renews_the_lease_of_a_worker(tmp_path, monkeypatch):
    monkeypatch.setattr(FolderStorage, "beat_s", 0.01)
    run = RunDir(tmp_path)
    with UnitClaims(FolderStorage(run)) as holder:
        lease = lease_of(holder.try_claim(0).folder)
        assert lease_of(holder.try_claim(1).folder) == lease
        os.utime(lease, (1000.0, 1000.0))
        deadline = time.monotonic() + 60
        while lease.stat().st_mtime == 1000.0:
            assert time.monotonic() < deadline, "no heart beats"
            time.sleep(0.01)
    assert not lease.exists()


@pytest.mark.parametrize("is_own", [True, False])
def test_a_link_that_a_file_server_is_asked_twice_for(tmp_path, monkeypatch, is_own):
    """The first answer was lost; asked again, it says that the name is taken: by this process, or by another one."""
    plain, run = os.link, RunDir(tmp_path)

    def asked_twice(made, target):
        if is_own or Path(target).name != "claim.json":
            plain(made, target)
        plain(made, target)

    with UnitClaims(FolderStorage(run)) as mine, UnitClaims(FolderStorage(run)) as other:
        if not is_own:
            assert other.try_claim(0) is not None
        monkeypatch.setattr(os, "link", asked_twice)
        assert (mine.try_claim(0, is_new=True) is not None) is is_own
        monkeypatch.undo()
        assert other.try_claim(0) is None


def test_a_claim_that_its_worker_has_not_created_yet_is_none(tmp_path):
    """A worker was killed between the claim's folder and the claim's document: its number is still to be had."""
    run = RunDir(tmp_path)
    run.claim(0, "0000").mkdir(parents=True)
    assert last_claim(run, 0) is None
    with UnitClaims(FolderStorage(run)) as mine:
        assert mine.try_claim(0).name == "0000"
