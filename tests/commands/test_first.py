"""First steps as a newcomer takes them: init, then run; ask."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress

import pytest

from support.jobs import answers, batchinfer, start, write_questions
from support.paths import RANDOM_MODEL, SAMPLE_MODEL


def test_a_job_that_init_writes_runs_as_it_is(tmp_path, monkeypatch):
    write_questions(tmp_path / "prompts", (3, 2))
    monkeypatch.chdir(tmp_path)
    made = batchinfer("init", "prompts", "--model", RANDOM_MODEL)
    assert made.code == 0, made.err
    for words in (
        "5 rows in 2 of 2 files",
        "column 'prompt', text",
        "column 'id'",
        "next:    batchinfer plan job.toml",
    ):
        assert words in made.out
    assert batchinfer("plan", "job.toml").code == 0
    assert batchinfer("run", "job.toml", "--set", "sampling.max_tokens=2").code == 0
    assert [row["id"] for row in answers(tmp_path / "runs" / "job")] == [f"q{number}" for number in range(5)]


def test_init_leaves_a_file_alone_that_is_there(tmp_path):
    write_questions(tmp_path / "prompts", (1,))
    (tmp_path / "mine.toml").write_text("mine")
    made = batchinfer("init", tmp_path / "prompts", "--model", RANDOM_MODEL, "-o", tmp_path / "mine.toml")
    assert made.code == 2
    assert "exists already; name another file with -o" in made.err
    assert (tmp_path / "mine.toml").read_text() == "mine"


@pytest.mark.parametrize(
    ("data", "model", "told"),
    [
        ("nowhere", RANDOM_MODEL, "error: DATA: no file matches"),
        ("empty", RANDOM_MODEL, "/empty/ holds no *.parquet"),
        ("prompts", "nowhere", "there is no model folder"),
        ("prompts", "deepseek-ai/DeepSeek-V3", "`hf download deepseek-ai/DeepSeek-V3` puts it"),
        ("prompts", "empty", "config.json does not exist"),
    ],
)
def test_init_says_what_is_missing_and_writes_nothing(tmp_path, monkeypatch, data, model, told):
    write_questions(tmp_path / "prompts", (1,))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    made = batchinfer("init", data, "--model", model)
    assert (made.code, made.out) == (2, "")
    assert told in made.err
    assert "input.files" not in made.err  # there is no job file yet
    assert not (tmp_path / "job.toml").exists()


def test_ask_prints_the_answer_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    asked = start("ask", "Add the numbers 2 and 3.", "--model", SAMPLE_MODEL, "--max-tokens", "4")
    out, err = asked.communicate(timeout=120)
    assert asked.returncode == 0, err
    assert out.endswith("\n")
    assert err in ("", "cut after 4 tokens; --max-tokens allows more\n")
    assert list(tmp_path.glob("batchinfer-ask-*")) == []


@pytest.mark.all  # make test: ask prints the answer, above
def test_ask_shows_on_a_terminal_what_it_is_at_and_takes_it_away(tmp_path):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    command = [sys.executable, "-m", "batchinfer", "ask", "Add the numbers 2 and 3.", "--model", SAMPLE_MODEL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True) as asked:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # the other end is closed
            while part := os.read(ours, 4096):
                shown += part
        out, _ = asked.communicate(timeout=120)
    os.close(ours)
    assert (asked.returncode, out.count("\n")) == (0, 1)
    lines = shown.decode().split("\r")
    assert any(re.match("for [0-9]+ s; (planning|loading|decode): ", line) for line in lines), lines
    assert lines[-1].strip() == ""


def test_ask_ends_with_a_sentence_where_the_model_cannot_answer(tmp_path):
    asked = batchinfer("ask", "Why?", "--model", tmp_path / "owner" / "name")
    assert asked.code == 2
    assert "hf download owner/name" in asked.err
    asked = batchinfer("ask", "word " * 5000, "--model", SAMPLE_MODEL)
    assert asked.code == 3
    assert asked.err.startswith("error: the prompt has ")
    assert asked.out == ""


def test_ask_refuses_an_empty_question():
    asked = batchinfer("ask", "", "--model", SAMPLE_MODEL)
    assert (asked.code, asked.out) == (2, "")
    assert asked.err.endswith("Error: QUESTION is empty; write the question in quotes\n")


@pytest.mark.all  # make test: ask prints the answer, above
def test_ask_tells_what_a_run_warns_of(tmp_path):
    model = shutil.copytree(SAMPLE_MODEL, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"attention_twist": 3}))
    asked = batchinfer("ask", "Why?", "--model", model, "--max-tokens", "2")
    assert asked.code == 0
    (warning,) = (line for line in asked.err.splitlines() if line.startswith("warning: "))
    assert "config.json has keys that are not known here and not used: attention_twist" in warning


def test_ask_gives_a_template_that_writes_the_date_today_or_the_date_that_is_named(tmp_path):
    model = shutil.copytree(SAMPLE_MODEL, tmp_path / "model")
    told = "raise_exception('not on ' + strftime_now('%d %b %Y'))"
    refuse = f"{{% if strftime_now('%Y') == '1999' %}}{{{{ {told} }}}}{{% endif %}}"
    (model / "chat_template.jinja").write_text(refuse + "{% for m in messages %}{{ m.content }}{% endfor %}")
    asked = batchinfer("ask", "Why?", "--model", model, "--max-tokens", "2")
    assert asked.code == 0, asked.err
    asked = batchinfer("ask", "Why?", "--model", model, "--date", "1999-12-31")
    assert (asked.code, asked.out) == (3, "")
    assert "not on 31 Dec 1999" in asked.err


def test_an_interrupted_ask_leaves_no_process_and_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    asked = start("ask", "Why?", "--model", SAMPLE_MODEL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("batchinfer-ask-*/run/run.json")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    asked.send_signal(signal.SIGTERM)
    asked.communicate(timeout=60)
    assert asked.returncode == 75
    assert list(tmp_path.glob("batchinfer-ask-*")) == []
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in left
