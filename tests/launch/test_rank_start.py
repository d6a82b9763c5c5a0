"""The start of ranks: signals, settings, and the end with their command."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import pytest

from batchinfer.launch import rank_process
from batchinfer.stop_signals import SIGNALS
from support.faults import ended
from support.jobs import start, write_job, write_questions


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_signal_that_stops_a_job_ends_no_rank_from_its_first_moment_on():
    end, rank_end = socket.socketpair()
    with end, rank_end:
        variables = rank_process.rank_variables(rank_process.RankEnvironment(0), num_ranks=1)
        rank = rank_process.start_rank(rank_process.RankStart(0, variables, rank_end))
    try:
        while True:
            status = Path(f"/proc/{rank.pid}/status").read_text()
            blocked, ignored = (
                int(re.search(rf"^{name}:\s+(\w+)", status, re.M)[1], 16) for name in ("SigBlk", "SigIgn")
            )
            assert all((blocked | ignored) >> (number - 1) & 1 for number in SIGNALS)
            if not blocked and ignored >> (signal.SIGINT - 1) & 1:
                break
    finally:
        rank.kill()
        rank.wait()


TRAP = """
import os
def note():
    with open(os.environ["SEEN"], "a") as file:
        file.write(f"{os.getpid()} {os.environ['GOMP_SPINCOUNT']}\\n")
if "BATCHINFER_RANK_NUMBER" in os.environ:
    note()
    os.register_at_fork(after_in_child=note)
"""


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """Return a function that reads a line of each rank, and of what it is forked from, from now on: (pid, spins)."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(TRAP)
    paths = [str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.delenv("GOMP_SPINCOUNT")
    path = tmp_path / "seen"

    def read() -> list[tuple[int, int]]:
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(pid), int(spins)) for pid, spins in map(str.split, lines)]

    return read


def test_threads_of_torch_do_not_stay_in_the_way_of_others(tmp_path, seen):
    write_questions(tmp_path / "prompts", (3,))
    done = ended(start("run", write_job(tmp_path, cluster={"decode_ranks": 2})))
    assert done.code == 0, done.err
    assert [spins for _, spins in seen()] == [1000, 1000, 1000]  # two ranks, and the process they are forked from
    assert not any(is_alive(pid) for pid, _ in seen())


def test_what_the_user_sets_counts(tmp_path, monkeypatch, seen):
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    write_questions(tmp_path / "prompts", (3,))
    done = ended(start("run", write_job(tmp_path)))
    assert done.code == 0, done.err
    assert [spins for _, spins in seen()] == [77]
