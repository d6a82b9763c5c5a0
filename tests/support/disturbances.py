"""One disturbance of a small job: a signal to a process at a random moment, then a rerun with undisturbed results.

The victim is a rank, a controller (`work`) or a `finish`. The deed is SIGKILL, SIGTERM, or SIGSTOP for longer than
others wait: a rank beyond its deadline, a controller beyond its lease, so that another one takes its units over while
it may wake up at any time. Leases run out in a second here, and where the machine allows it (root) the second one
lives on a host of another name, so that it cannot see that the first one is dead and has to wait for the lease.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from batchinfer.plan import packing
from support.faults import LAYOUTS, MIXED, SLOW, descendants, ended
from support.jobs import Ended, batchinfer, output_bytes, write_job, write_questions

VICTIMS = ("finish", "rank", "controller")
DEEDS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
ATTEMPTS = 6  # moments to try until one comes before the command has ended
# in processes of these tests only: other processes are declared dead soon
SOON = """
from batchinfer.launch import rank_loader
from batchinfer.run.store.folder import FolderStorage
from batchinfer.run.store import watch
watch.LEASE_S, FolderStorage.beat_s, rank_loader.START_S = 1.0, 0.2, 30.0
from batchinfer.program import program
program()
"""
ROWS = (6, 4, 2)
_started: list[subprocess.Popen[str]] = []  # by the disturbance under way


@dataclass(frozen=True)
class Calm:
    """A job that nothing has disturbed, at two stages, and what it ends with."""

    planned: Path
    worked: Path
    outputs: dict[str, bytes]
    work_s: float  # of `work` alone
    finish_s: float


def make_calm(folder: Path) -> Calm:
    """A job of several units on one rank: planned, worked and finished in undisturbed processes."""
    write_questions(folder / "prompts", ROWS)
    job = write_job(folder, cluster=SLOW | {"collective_seconds": 2.0}, sampling=MIXED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "MIN_UNIT_TOKENS", 300)
        assert batchinfer("plan", job).code == 0
    planned, worked, finished = folder / "run", folder / "worked", folder / "finished"
    shutil.copytree(planned, worked)
    work_s = _time_of("work", worked)
    shutil.copytree(worked, finished)
    finish_s = _time_of("finish", finished)
    return Calm(planned, worked, output_bytes(finished), work_s, finish_s)


def disturb(calm: Calm, run: Path, number: int) -> str:
    """Run disturbance `number` in a new run folder and describe it; fail unless the rerun ends as the calm run."""
    rng = random.Random(number)
    victim, deed = VICTIMS[number % 3], DEEDS[number // 3 % 3]
    try:
        for attempt in range(ATTEMPTS):
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(calm.worked if victim == "finish" else calm.planned, run)
            # half of the moments lie in the computing part; later attempts come earlier: the command had ended already
            share = rng.uniform(rng.choice([0.02, 0.45]), 0.95) * (1 - attempt / ATTEMPTS)
            if _is_hit(calm, run, victim, deed, share, rng):
                _expect_calm_outputs(calm, run)
                return f"{signal.Signals(deed).name} to {victim} after {share:.0%}"
    finally:
        for process in _started:
            process.kill()  # none is left, unless something above failed
        _started.clear()
    raise AssertionError(f"{victim} ended {ATTEMPTS} times before it could be disturbed")


def _is_hit(calm: Calm, run: Path, victim: str, deed: signal.Signals, share: float, rng: random.Random) -> bool:
    if victim == "finish":
        return _finish_is_hit(calm, run, deed, share)
    if victim == "rank":
        return _rank_is_hit(calm, run, deed, share, rng)
    return _controller_is_hit(calm, run, deed, share, rng)


def _finish_is_hit(calm: Calm, run: Path, deed: signal.Signals, share: float) -> bool:
    process = _start("finish", run)
    if not _reaches(process, share * calm.finish_s):
        return False
    process.send_signal(deed)
    if deed == signal.SIGSTOP:
        other = batchinfer("finish", run)  # before the first one has begun to write, or refused
        assert other.code == 0 or (other.code == 2 and "another process" in other.err), other.err
        process.send_signal(signal.SIGCONT)
        done = ended(process)
        assert done.code == 0 or (done.code == 2 and "another process" in done.err), done.err
        return True
    _expect_whole_outputs(calm, run)
    return _has_struck(process, deed)


def _rank_is_hit(calm: Calm, run: Path, deed: signal.Signals, share: float, rng: random.Random) -> bool:
    """The job itself has to go on and end well."""
    layout = rng.choice(["one", "one", "one", "two", "apart"])
    process = _start("work", run, *LAYOUTS[layout])
    if not _reaches(process, share * calm.work_s):
        return False
    while not (ranks := descendants(process.pid)):
        if process.poll() is not None:
            return False
        time.sleep(0.01)
    os.kill(rng.choice(ranks), deed)
    done = ended(process)
    assert done.code == 0, done.err
    return True


def _controller_is_hit(calm: Calm, run: Path, deed: signal.Signals, share: float, rng: random.Random) -> bool:
    first = _start("work", run)
    if not _reaches(first, share * calm.work_s):
        return False
    first.send_signal(deed)
    if deed != signal.SIGSTOP:
        if not _has_struck(first, deed):
            return False
        again = ended(_start("work", run, elsewhere=True))
        assert again.code == 0, again.err
        return True
    second = _start("work", run, elsewhere=True)
    try:
        if rng.random() < 0.5:  # it wakes up while the other one works, or when all is done and written
            _reaches(second, rng.uniform(0.2, 1.5) * calm.work_s)
        else:
            done = ended(second)
            assert done.code == 0, done.err
            _expect_calm_outputs(calm, run)
    finally:
        first.send_signal(signal.SIGCONT)
    for process in (first, second):
        assert process.stdout is not None
        if not process.stdout.closed:
            done = ended(process)
            assert done.code == 0, done.err
    return True


def _has_struck(process: subprocess.Popen[str], deed: signal.Signals) -> bool:
    """Return whether the signal ended the command; False if it had ended just before."""
    done = ended(process)
    # SIGTERM before Python could listen ends a process like SIGKILL
    assert done.code in (0, 75, -deed), done.err
    return done.code != 0


def _expect_calm_outputs(calm: Calm, run: Path) -> None:
    finished = batchinfer("finish", run)
    assert finished.code == 0, finished.err  # 3 would be a good row that became an error row
    assert output_bytes(run) == calm.outputs


def _expect_whole_outputs(calm: Calm, run: Path) -> None:
    """Assert that the outputs of a dead `finish` are files of the calm run, but perhaps not all of them."""
    assert output_bytes(run).items() <= calm.outputs.items()


def _start(command: str, run: Path, *options: str, elsewhere: bool = False) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", SOON, command, str(run), *options]
    if elsewhere and os.getuid() == 0 and shutil.which("unshare"):
        words = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere && exec "$@"', "sh", *words]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _started.append(process)
    return process


def _reaches(process: subprocess.Popen[str], moment_s: float) -> bool:
    """Let it run so long; False when it has ended before."""
    try:
        process.wait(timeout=moment_s)
    except subprocess.TimeoutExpired:
        return True
    done = ended(process)
    assert done.code == 0, done.err
    return False


def _time_of(command: str, run: Path) -> float:
    begun_s = time.monotonic()
    done: Ended = ended(_start(command, run))
    assert done.code == 0, done.err
    return time.monotonic() - begun_s
