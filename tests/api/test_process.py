"""Callers of jobs: scripts, threads, notebooks; interrupts, progress, and the end of the process."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

import batchinfer
from batchinfer.api.call_folder import call_folder
from batchinfer.api.process import CommandProcess
from support.jobs import output_bytes, write_job, write_questions
from support.paths import RANDOM_MODEL

TEXTS = [f"Question {number}: what is {number} times {number + 1}?" for number in range(40)]
LONG = {
    "model": RANDOM_MODEL,
    "dtype": "float32",
    "max_tokens": 300,
    "ignore_eos": True,
    "cluster": {"commit_seconds": 0.2, "decode_requests": 4},
}
SHORT = {"model": RANDOM_MODEL, "dtype": "float32", "max_tokens": 4}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run folder of a job that is not interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    batchinfer.generate(TEXTS, output=folder, **LONG)
    return folder


def interrupt_once_some_are_done(folder: Path) -> None:
    while not list(folder.glob("units/*/*/part-*.parquet")):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)


def children() -> set[str]:
    return set(Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children").read_text().split())


def test_an_interrupted_call_goes_on_in_its_folder(whole, own_interrupts, tmp_path):
    folder, before = tmp_path / "run", children()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    threading.Thread(target=interrupt_once_some_are_done, args=(folder,)).start()
    with pytest.raises(KeyboardInterrupt):
        batchinfer.generate(TEXTS, output=folder, **LONG)
    assert children() == before
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert not (folder / "outputs").exists()
    kept = {path.name: path.read_bytes() for path in folder.glob("units/*/*/part-*.parquet")}
    found = batchinfer.generate(TEXTS, output=folder, **LONG)
    assert kept.items() <= {path.name: path.read_bytes() for path in folder.glob("units/*/*/part-*.parquet")}.items()
    assert found.num_rows == len(TEXTS)
    assert output_bytes(folder) == output_bytes(whole)


def test_rows_come_while_the_job_runs_each_once(whole, tmp_path):
    folder = tmp_path / "run"
    rows, early = [], 0
    for row in batchinfer.generate([*TEXTS, TEXTS[0], None], output=folder, stream=True, **LONG):
        rows.append(row)
        early += not (folder / "outputs").exists()
    assert early > 1
    rows.sort(key=lambda row: row["row"])
    assert rows == batchinfer.generate([*TEXTS, TEXTS[0], None], output=folder, **LONG).to_pylist()
    assert (rows[40]["text"], rows[41]["status"]) == (rows[0]["text"], "error")


def test_an_iterator_that_is_closed_stops_the_job(tmp_path):
    before = children()
    rows = batchinfer.generate(TEXTS, output=tmp_path / "run", stream=True, **LONG)
    next(rows)
    assert children() != before
    rows.close()
    assert children() == before
    assert not (tmp_path / "run" / "outputs").exists()


def test_a_job_ends_with_its_caller(tmp_path):
    script = tmp_path / "script.py"
    settings = {**LONG, "model": str(RANDOM_MODEL), "output": str(tmp_path / "run"), "max_tokens": 2000}
    script.write_text(f"import batchinfer\nbatchinfer.generate({TEXTS!r}, **{settings!r})")
    variables = {**os.environ, "TMPDIR": str(tmp_path)}  # where it leaves the file of its job
    caller = subprocess.Popen([sys.executable, str(script)], env=variables)
    run = tmp_path / "run"
    while not list(run.glob("units/*/*/claim.json")):
        time.sleep(0.05)
        assert caller.poll() is None
    caller.kill()
    caller.wait()
    while list(run.glob("work/workers/*")):
        time.sleep(0.05)
    assert not list((run / "done").glob("*"))


@pytest.mark.all  # make test: test_a_job_ends_with_its_caller
def test_what_a_killed_call_leaves_goes_with_the_next_one(tmp_path, monkeypatch):
    (folder := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    settings = {**LONG, "model": str(RANDOM_MODEL), "max_tokens": 2000}
    caller = subprocess.Popen(
        [sys.executable, "-c", f"import batchinfer; batchinfer.generate({TEXTS!r}, **{settings!r})"]
    )
    while not list(folder.glob("*/*/run/units/*/*/claim.json")):
        time.sleep(0.05)
        assert caller.poll() is None
    commands = Path(f"/proc/{caller.pid}/task/{caller.pid}/children").read_text().split()
    caller.kill()
    caller.wait()
    while any(Path("/proc", pid).exists() for pid in commands):
        time.sleep(0.05)
    assert len(list(folder.iterdir())) == 2  # of the rows, and of the job's file
    with call_folder() as held:  # one that lives stays
        assert list(folder.iterdir()) == [held.parent]
        batchinfer.generate(TEXTS[:1], **SHORT)
        assert list(folder.iterdir()) == [held.parent]
    assert list(folder.iterdir()) == []


def test_a_plain_script_needs_no_guard_and_its_working_folder_no_care(tmp_path):
    """A file there has the name of a module that commands import."""
    script = tmp_path / "script.py"
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "click.py").write_text("raise SystemExit('the wrong module')")
    script.write_text(
        "import sys, batchinfer\n"
        "assert not {'torch', 'pyarrow', 'duckdb'} & set(sys.modules)\n"
        f"found = batchinfer.generate(['a', 'b'], model={str(RANDOM_MODEL)!r}, dtype='float32', max_tokens=3)\n"
        "print(found['status'].to_pylist())\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path / "work", capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.stderr) == ("['ok', 'ok']\n", "")


def test_a_thread_may_call_and_progress_is_told_in_it():
    told, found = [], []

    def call() -> None:
        tell = lambda *now: told.append((threading.current_thread(), *now))  # noqa: E731
        found.append(batchinfer.generate(["a", "b"], progress=tell, **SHORT))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert found[0].num_rows == 2
    assert {who for who, *_ in told} == {thread}
    last = {title: (done, total) for _, title, done, total in told}
    num_bytes, num_tokens = last.pop("load"), last.pop("tokens")
    assert last == {"tokenise": (2, 2), "work": (2, 2), "finish": (2, 2)}
    assert num_bytes[0] == num_bytes[1] > 0
    assert num_tokens[0] == num_tokens[1] > 0


def test_a_listener_that_raises_stops_the_job(tmp_path):
    def refuse(title, done, total):
        raise RuntimeError("enough")

    before = children()
    with pytest.raises(RuntimeError, match="enough"):
        batchinfer.generate(["a", "b"], progress=refuse, output=tmp_path / "run", **SHORT)
    assert children() == before


def test_lines_of_the_command_are_logged_but_for_exit_codes(caplog):
    with caplog.at_level(logging.INFO, logger="batchinfer"):
        batchinfer.generate(["a", None], **SHORT)
    assert not any("exit code" in record.message for record in caplog.records)
    assert [record.levelname for record in caplog.records if "1 bad row" in record.message] == ["WARNING"]
    assert any("computing: 100%, 2 of 2 rows; " in record.message for record in caplog.records)


def shown_on_a_terminal(code: str) -> bytes:
    """Return what a script writes to a terminal."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    caller = subprocess.Popen([sys.executable, "-c", code], stderr=theirs)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # how a terminal ends
        while part := os.read(ours, 1 << 16):
            shown += part
    os.close(ours)
    assert caller.wait() == 0
    return shown


@pytest.mark.all  # make test: tests/test_progress.py
def test_a_terminal_shows_the_bars_of_the_command(tmp_path):
    settings = f"model={str(RANDOM_MODEL)!r}, dtype='float32', max_tokens=3"
    assert b"computing: 100%" in shown_on_a_terminal(f"import batchinfer; batchinfer.generate(['a'], {settings})")
    quiet = shown_on_a_terminal(f"import batchinfer; batchinfer.generate(['a'], progress=False, {settings})")
    assert quiet == b""


@pytest.mark.all  # make test: test_a_listener_that_raises_stops_the_job
@pytest.mark.parametrize(
    ("number", "error", "sentence"),
    [
        (signal.SIGKILL, batchinfer.BatchinferError, "batchinfer run was ended by SIGKILL"),
        (signal.SIGTERM, batchinfer.InterruptedRunError, "batchinfer run was stopped: stopped by SIGTERM"),
    ],
)
def test_a_command_that_somebody_else_ends_says_so(tmp_path, number, error, sentence):
    write_questions(tmp_path / "prompts")
    job = batchinfer.Job.from_toml(write_job(tmp_path))

    def end_it(title, done, total):
        process.process._process.send_signal(number)

    with CommandProcess("run", job.config, end_it) as process, pytest.raises(error, match=sentence):
        any(iter(process.ended, None))


@pytest.mark.all  # make test: a thread, above
def test_a_notebook_may_call():
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    cells = [
        "import asyncio, signal, threading, batchinfer\nassert asyncio.get_running_loop().is_running()",
        "before = signal.getsignal(signal.SIGINT)",
        f"found = batchinfer.generate(['a', 'b'], model={str(RANDOM_MODEL)!r}, dtype='float32', max_tokens=3)",
        "assert signal.getsignal(signal.SIGINT) == before\nprint(found['status'].to_pylist())",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
    shown = [(output.name, output.text) for cell in book.cells for output in cell.outputs]
    assert [text for name, text in shown if name == "stdout"] == ["['ok', 'ok']\n"]
    assert "work: 100%" in "".join(text for name, text in shown if name == "stderr")
