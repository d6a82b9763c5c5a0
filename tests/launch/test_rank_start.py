"""How ranks are started: with which settings, when, and that none outlives its command."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from batchinfer import own_process
from batchinfer.launch import rank_process
from batchinfer.stop import SIGNALS
from support.faults import ended, wait_until
from support.jobs import start, write_job, write_questions


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_signal_that_stops_a_job_ends_no_rank_from_its_first_moment_on():
    spare = rank_process.SpareRank()
    try:
        while True:
            status = Path(f"/proc/{spare._process.pid}/status").read_text()
            blocked, ignored = (
                int(re.search(rf"^{name}:\s+(\w+)", status, re.M)[1], 16) for name in ("SigBlk", "SigIgn")
            )
            assert all((blocked | ignored) >> (number - 1) & 1 for number in SIGNALS)
            if not blocked and ignored >> (signal.SIGINT - 1) & 1:
                break
    finally:
        spare.end()


def test_a_rank_that_cannot_load_torch_for_want_of_memory_says_so_in_a_sentence():
    command = own_process.command("batchinfer.rank.main")
    limited = partial(resource.setrlimit, resource.RLIMIT_AS, (300 << 20, 300 << 20))  # torch is more
    done = subprocess.run(command, preexec_fn=limited, check=False, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert done.returncode == 1
    said = rb"a rank has ended: more memory cannot be had \(`ulimit -v` is 307200\); raise .*\n"
    assert re.fullmatch(said, done.stderr), done.stderr


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """Ranks that start from now on leave a line each; a function that reads them: (pid, started as a spare, spins)."""
    line = 'f\'{os.getpid()} {os.environ.get("BATCHINFER_RANK_SPARE", 0)} {os.environ["GOMP_SPINCOUNT"]}\\n\''
    trap = f"import os\nif 'BATCHINFER_RANK_NUMBER' in os.environ: open(os.environ['SEEN'], 'a').write({line})"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(trap)
    paths = [str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.delenv("GOMP_SPINCOUNT")
    path = tmp_path / "seen"

    def read() -> list[tuple[int, bool, int]]:
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(pid), spare == "1", int(spins)) for pid, spare, spins in map(str.split, lines)]

    return read


def test_a_lone_rank_is_started_before_its_job_is_read(tmp_path, seen):
    write_questions(tmp_path / "prompts", (3,))
    done = ended(start("run", write_job(tmp_path)))
    assert done.code == 0, done.err
    ((_, is_spare, spins),) = seen()
    assert is_spare
    assert spins == 1000  # torch's threads do not stay in the way of others


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="on one core it is as each of several should be")
def test_several_ranks_do_without_the_one_that_was_started_early(tmp_path, monkeypatch, seen):
    monkeypatch.delenv("OMP_NUM_THREADS")  # it has all cores, they have a part each
    write_questions(tmp_path / "prompts", (3,))
    done = ended(start("run", write_job(tmp_path, cluster={"decode_ranks": 2})))
    assert done.code == 0, done.err
    assert sorted(spins for _, is_spare, spins in seen() if not is_spare) == [1000, 1000]
    assert not any(is_alive(pid) for pid, *_ in seen())


def test_what_the_user_sets_counts(tmp_path, monkeypatch, seen):
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    write_questions(tmp_path / "prompts", (3,))
    done = ended(start("run", write_job(tmp_path)))
    assert done.code == 0, done.err
    assert [spins for *_, spins in seen()] == [77]


def test_a_bad_job_leaves_no_rank_behind(tmp_path, seen):
    os.mkfifo(tmp_path / "job.toml")
    process = start("run", tmp_path / "job.toml")
    wait_until(seen, process)
    (tmp_path / "job.toml").write_text("[input]\nfiles = []\n")
    assert ended(process).code == 2
    ((pid, *_),) = seen()
    assert not is_alive(pid)


def test_a_killed_command_leaves_no_rank_behind(tmp_path, seen):
    os.mkfifo(tmp_path / "job.toml")  # reading the job never ends
    process = start("run", tmp_path / "job.toml")
    wait_until(seen, process)
    process.kill()
    process.communicate()
    ((pid, *_),) = seen()
    deadline = time.monotonic() + 60
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_rank_that_was_killed_before_its_job_was_read_is_replaced(tmp_path, seen):
    write_questions(tmp_path / "prompts", (3,))
    job = write_job(tmp_path)
    text = job.read_text()
    job.unlink()
    os.mkfifo(job)
    process = start("run", job)
    wait_until(seen, process)
    ((pid, *_),) = seen()
    os.kill(pid, signal.SIGKILL)
    job.write_text(text)
    done = ended(process)
    assert done.code == 0, done.err
    assert [is_spare for _, is_spare, _ in seen()] == [True, False]


def test_a_command_that_cannot_start_its_rank_early_goes_on(monkeypatch):
    def refuse(*arguments, **options):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(rank_process, "start_rank", refuse)
    spare = rank_process.SpareRank()
    assert spare.take({}) is None
    spare.end()


def test_a_spare_rank_that_one_thread_ends_is_nobody_elses(monkeypatch):
    """A command that is stopped ends it while the thread that loads ranks may want it."""
    killing, go_on, killed = threading.Event(), threading.Event(), []

    class Process:
        def kill(self):
            killed.append(self)
            killing.set()
            go_on.wait()

        def wait(self):
            pass

    monkeypatch.setattr(rank_process, "start_rank", lambda *_: Process())
    spare = rank_process.SpareRank()
    thread = threading.Thread(target=spare.end)
    thread.start()
    killing.wait()
    others = threading.Thread(target=lambda: (spare.end(), go_on.set()))
    others.start()
    others.join(60)
    go_on.set()
    thread.join()
    assert len(killed) == 1
    assert spare.take(rank_process.rank_variables(rank_process.RankEnvironment(0), num_ranks=1)) is None
