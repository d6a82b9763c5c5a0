"""A tokenizer process that is killed from outside starts again, and a plan does not notice."""

from __future__ import annotations

import threading
import time

import pyarrow as pa
import pytest

from batchinfer.config import load_job
from batchinfer.data import tokenizer_process
from batchinfer.data.encoders import Encoders
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.data.tokenizer_process import TokenizerProcess
from batchinfer.records import BatchinferError, ModelError
from support.jobs import write_job
from support.paths import RANDOM_MODEL

TEXTS = [f"prompt number {row} of some" for row in range(50)]


@pytest.fixture
def process():
    started = TokenizerProcess()
    yield started
    started.end()


def kill(process):
    process._process.kill()
    process._process.wait()


def encoded(encoders):
    pieces = [piece.result() for piece in encoders.start(pa.array(TEXTS))]
    return [ids for piece in pieces for ids in piece["token_ids"].to_pylist()]


@pytest.mark.parametrize("when", ["before it loads", "after it has loaded", "with workers"])
def test_a_process_that_is_killed_starts_again(tmp_path, process, when):
    if when == "before it loads":
        kill(process)
    with Encoders(load_job(write_job(tmp_path)), window=512, process=process) as encoders:
        if when == "with workers":
            encoded(encoders)
        if when != "before it loads":
            kill(process)
        (expected, *_) = load_tokenizer(RANDOM_MODEL).encode_prompts(TEXTS[:1])
        found = encoded(encoders)
        assert found[0] == expected
        assert len(found) == len(TEXTS)
        assert all(found)


def test_a_process_that_is_killed_while_it_starts_again_starts_once_more(tmp_path, process, monkeypatch):
    start, num_started = TokenizerProcess._start, []

    def start_and_kill_the_first(started):
        start(started)
        num_started.append(started)
        if len(num_started) == 1:
            kill(started)

    with Encoders(load_job(write_job(tmp_path)), window=512, process=process) as encoders:
        monkeypatch.setattr(TokenizerProcess, "_start", start_and_kill_the_first)
        kill(process)
        assert all(encoded(encoders))
    assert len(num_started) == 2


def test_a_process_that_always_ends_is_told(tmp_path, process, monkeypatch):
    monkeypatch.setattr(tokenizer_process, "MOST_STARTS", 1)
    job = load_job(write_job(tmp_path))
    with Encoders(job, window=512, process=process) as encoders:
        kill(process)
        with pytest.raises(BatchinferError, match="the tokenizer's process ended: SIGKILL; run the same command"):
            encoded(encoders)
    other = TokenizerProcess()
    kill(other)
    said = r"loads the tokenizer of .* was ended by SIGKILL, 1 times in all, perhaps for lack of memory; run the same"
    with pytest.raises(BatchinferError, match=said) as refused:
        Encoders(job, window=512, process=other)
    assert not isinstance(refused.value, ModelError)  # nothing is wrong with the folder


@pytest.mark.parametrize("times", [1, 2], ids=["as it forks", "as it starts again"])
def test_a_process_that_its_program_ends_starts_no_more(tmp_path, process, monkeypatch, times):
    """Another thread waits for a worker at that moment."""
    exchange, ended, questions = TokenizerProcess._exchange, [], []

    def exchange_while_it_ends(asked, question, descriptors=None):
        questions.append(question)
        if len(questions) == 1 < times:
            kill(asked)  # from outside: the process is started again
        elif len(questions) == times:
            ended.append(threading.Thread(target=asked.end))
            ended[0].start()
            while asked._process.poll() is None:
                time.sleep(0.01)
        return exchange(asked, question, descriptors)

    with Encoders(load_job(write_job(tmp_path)), window=512, process=process):
        monkeypatch.setattr(TokenizerProcess, "_exchange", exchange_while_it_ends)
        with pytest.raises(BatchinferError, match="the tokenizer's process"):
            process.fork()
        ended[0].join()
        with pytest.raises(BatchinferError, match="has ended with its job"):
            process.fork()
    assert questions == [*[b"fork", b"load"][:times], b"fork"]
    assert process._num_starts == times
    assert process._process.poll() is not None
    assert process._stderr.closed
