"""Ranks of one host that are forked from one process: what each is started with, and how they end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from batchinfer.launch import local_ranks
from batchinfer.launch.local_ranks import start_ranks  # the product's, which conftest.py replaces later
from batchinfer.launch.rank_forks import MOST_RANKS, ForkedRank, RankForks
from batchinfer.launch.rank_process import RankEnvironment, RankStart, rank_variables
from support.faults import ended, rank_processes
from support.faults import wait_until as wait_while_running
from support.jobs import batchinfer, output_bytes, start, write_job, write_questions
from support.kv_stores import wait_until

# Run in place of a rank's program, which finds it by PYTHONPATH: each rank notes what it is and waits.
PROGRAM = """
import os, sys
if "BATCHINFER_RANK_NUMBER" in os.environ:
    from batchinfer.launch.rank_forks import fork_ranks
    fork_ranks()
    import signal, socket
    end = os.environ.get("BATCHINFER_RANK_SOCKET")
    said = f"{os.getpid()} {os.getppid()} {os.environ['BATCHINFER_RANK_NUMBER']} {os.environ['BATCHINFER_RANK_CORES']}"
    with socket.socket(fileno=int(end)) as stream:
        stream.sendall(said.encode())
        word = stream.recv(100)
    os._exit(int(word or b"75"))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))


class Started:
    """Two ranks, with our ends of their sockets and what they said of themselves."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        variables = [rank_variables(RankEnvironment(rank, rank), num_ranks=2) for rank in range(2)]
        self.forks = RankForks([RankStart(rank, variables[rank], pairs[rank][1]) for rank in range(2)])
        for _, end in pairs:
            end.close()
        self.streams = [near for near, _ in pairs]
        self.said = [stream.recv(100).decode().split() for stream in self.streams]
        self.pids = [int(said[0]) for said in self.said]

    def close(self) -> None:
        self.forks.kill()
        self.forks.wait()
        for stream in self.streams:
            stream.close()

    def codes(self) -> list[int | None]:
        return [self.forks.code(rank) for rank in range(2)]


@pytest.fixture
def ranks(program) -> Iterator[Started]:
    with closing(Started()) as both:
        yield both


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_each_rank_has_its_own_settings_and_socket(ranks):
    cores = [",".join(map(str, [core])) for core in sorted(os.sched_getaffinity(0))]
    one, other = ranks.said
    assert one[1] == other[1] != one[0] != other[0]  # one process has forked both
    assert [one[2], other[2]] == ["0", "1"]
    if len(cores) == 2:
        assert [one[3], other[3]] == cores
    assert [ranks.forks.pid(rank) for rank in range(2)] == ranks.pids
    assert ranks.codes() == [None, None]


def test_the_end_of_each_rank_is_told_as_it_was(ranks):
    ranks.streams[1].sendall(b"7")
    wait_until(lambda: ranks.codes() == [None, 7])
    assert is_alive(ranks.pids[0])
    os.kill(ranks.pids[0], signal.SIGKILL)
    wait_until(lambda: ranks.codes() == [-signal.SIGKILL, 7])


def test_a_ranks_socket_closes_with_the_rank(ranks):
    os.kill(ranks.pids[1], signal.SIGKILL)
    assert ranks.streams[1].recv(1) == b""
    assert ranks.codes()[0] is None


def test_all_end_with_the_process_that_forked_them(ranks):
    os.kill(int(ranks.said[0][1]), signal.SIGKILL)
    ranks.forks.wait()
    assert ranks.codes() == [-signal.SIGKILL, -signal.SIGKILL]
    wait_until(lambda: not any(map(is_alive, ranks.pids)))


def test_stopped_ranks_are_killed_and_waited_for(ranks):
    os.kill(ranks.pids[0], signal.SIGSTOP)
    ranks.forks.kill()
    ranks.forks.wait()
    wait_until(lambda: not any(map(is_alive, ranks.pids)))
    assert None not in ranks.codes()


def test_ranks_end_by_themselves_when_nobody_listens_any_more(ranks):
    for stream in ranks.streams:
        stream.close()
    wait_until(lambda: ranks.codes() == [75, 75])


def test_several_threads_may_ask_for_codes(ranks):
    seen: list[list[int | None]] = []
    threads = [threading.Thread(target=lambda: seen.append(ranks.codes())) for _ in range(8)]
    os.kill(ranks.pids[0], signal.SIGKILL)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    wait_until(lambda: ranks.codes() == [-signal.SIGKILL, None])


def test_ranks_that_are_killed_before_they_run_have_that_end(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    forks = RankForks([RankStart(rank, dict(os.environ), None) for rank in range(2)])
    assert forks.pid(0) is None
    assert forks.code(0) is None
    forks.kill()
    forks.wait()
    assert [forks.code(rank) for rank in range(2)] == [-signal.SIGKILL] * 2


def test_ranks_whose_imports_fail_have_the_exit_code_of_that(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    forks = RankForks([RankStart(rank, dict(os.environ), None) for rank in range(2)])
    forks.wait()
    assert [forks.code(rank) for rank in range(2)] == [7, 7]
    forks.kill()  # which changes nothing


def test_a_refused_fork_is_a_sentence_and_leaves_no_rank(tmp_path, monkeypatch, capfd):
    lines = ["import errno, os", "plain, forks = os.fork, []", "def refused():", "    forks.append(1)"]
    lines += [
        "    if len(forks) > 1: raise BlockingIOError(errno.EAGAIN, 'no')",
        "    return plain()",
        "os.fork = refused",
    ]
    (tmp_path / "sitecustomize.py").write_text("\n".join([*lines, PROGRAM]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    variables = [rank_variables(RankEnvironment(rank), num_ranks=2) for rank in range(2)]
    pairs = [socket.socketpair() for _ in range(2)]
    forks = RankForks([RankStart(rank, variables[rank], pairs[rank][1]) for rank in range(2)])
    forks.wait()
    assert forks.code(1) == 2
    assert re.search(
        r"^rank 1: no more processes or threads can be started \(.*\); raise that limit", capfd.readouterr().err, re.M
    )
    pid = forks.pid(0)
    wait_until(lambda: pid is None or not is_alive(pid))
    for near, end in pairs:
        near.close()
        end.close()


def started_kinds(num_ranks: int) -> set[type]:
    starts = [RankStart(rank, rank_variables(RankEnvironment(rank), num_ranks=2), None) for rank in range(num_ranks)]
    processes = start_ranks(starts)
    for process in processes.values():
        process.kill()
        process.wait()
    return set(map(type, processes.values()))


def test_a_single_rank_and_ranks_next_to_gpus_are_processes_of_their_own(program, monkeypatch):
    assert started_kinds(2) == {ForkedRank}
    assert started_kinds(1) == {subprocess.Popen}
    monkeypatch.setattr(local_ranks, "has_gpu", lambda: True)
    assert started_kinds(2) == {subprocess.Popen}


def test_as_many_ranks_as_one_process_forks_are_all_told_of(program):
    """The socket's queue is shorter than the number of messages from 128 ranks."""
    starts, streams = [], []
    for rank in range(MOST_RANKS):
        near, end = socket.socketpair()
        streams.append(near)
        variables = rank_variables(RankEnvironment(rank, credentials="c" * 200), num_ranks=MOST_RANKS)
        starts.append(RankStart(rank, variables, end))
    forks = RankForks(starts)
    for one in starts:
        one.end.close()
    wait_until(lambda: all(forks.pid(rank) for rank in range(MOST_RANKS)), seconds=120)
    said = [stream.recv(1000).decode().split() for stream in streams]
    assert [int(words[0]) for words in said] == [forks.pid(rank) for rank in range(MOST_RANKS)]
    assert [int(words[2]) for words in said] == list(range(MOST_RANKS))
    for stream in streams:
        stream.sendall(b"3")
    forks.wait()
    assert {forks.code(rank) for rank in range(MOST_RANKS)} == {3}
    for stream in streams:
        assert stream.recv(1) == b""  # no other rank holds it
        stream.close()


def test_more_ranks_have_several_such_processes(program, monkeypatch):
    monkeypatch.setattr(local_ranks, "MOST_RANKS", 2)
    starts = [RankStart(rank, rank_variables(RankEnvironment(rank), num_ranks=3), None) for rank in range(3)]
    processes = start_ranks(starts)
    assert [len({id(processes[rank]._forks) for rank in ranks}) for ranks in ([0, 1], [0, 2], [0, 1, 2])] == [1, 2, 2]
    for process in processes.values():
        process.kill()
        process.wait()


def forked(process: subprocess.Popen[str]) -> list[int]:
    """Wait for the two ranks of a command; return the process that forked them, and them."""

    def found() -> list[int] | None:
        processes = rank_processes(process.pid)
        return processes if len(processes) == 3 else None

    started: list[int] = wait_while_running(found, process)
    return started


@pytest.mark.parametrize("victim", ["forking", "rank"])
def test_a_job_goes_on_after_a_kill(tmp_path, victim):
    write_questions(tmp_path / "prompts", (12,))
    options = {"cluster": {"decode_ranks": 2, "backend": "reference"}, "sampling": {"max_tokens": 16}}
    job = write_job(tmp_path, **options)
    assert batchinfer("run", job).code == 0
    expected = output_bytes(tmp_path / "run")
    process = start("run", job, "--set", f"output.dir={tmp_path / 'killed'}")
    forking, *ranks = forked(process)
    os.kill(forking if victim == "forking" else ranks[1], signal.SIGKILL)
    done = ended(process)
    assert done.code == 0, done.err
    assert "SIGKILL" in done.err
    assert output_bytes(tmp_path / "killed") == expected
    assert not any(map(is_alive, ranks))


def test_ranks_end_with_their_command(tmp_path):
    write_questions(tmp_path / "prompts", (12,))
    job = write_job(tmp_path, cluster={"decode_ranks": 2, "backend": "reference"}, sampling={"max_tokens": 64})
    process = start("run", job)
    forking, *ranks = forked(process)
    process.kill()
    process.communicate()
    wait_until(lambda: not any(map(is_alive, [forking, *ranks])))
