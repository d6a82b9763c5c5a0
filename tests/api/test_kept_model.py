"""batchinfer.Model: calls with ranks that stay loaded, their failures and their end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchinfer
from support.faults import descendants, ranks_of
from support.jobs import batchinfer as command
from support.jobs import output_bytes
from support.paths import RANDOM_MODEL
from support.random_model import make_random_twin

TEXTS = [f"Question {number}: what is {number} times {number + 1}?" for number in range(20)]
MANY = [*TEXTS, *(f"And {text}" for text in TEXTS)]
LONG = {"max_tokens": 300, "ignore_eos": True}
SLOW = {"cluster": {"commit_seconds": 0.2, "decode_requests": 4}}
MORE = pytest.mark.slow  # what others show, too


@pytest.fixture(scope="module")
def model():
    with batchinfer.Model(RANDOM_MODEL, dtype="float32", **SLOW) as model:
        yield model


def started_by(pid: int, word: str) -> set[int]:
    """Living processes that a process has started, and those they have, with this word in their command."""
    return {child for child in descendants(pid) if word in command_of(child)}


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def ranks(model: batchinfer.Model) -> set[int]:
    """The processes of its ranks."""
    return set(ranks_of(model._process._process.pid))


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def same_as_own_run(made: Path, folder: Path) -> None:
    """Return whether a run folder equals that of a separate run."""
    ended = command("run", made / "job.toml", "--set", f"output.dir={folder}")
    assert ended.code == 0, ended.err
    assert output_bytes(made) == output_bytes(folder)


CALLS = [
    {"max_tokens": 6},
    {"max_tokens": 9, "temperature": 1.0, "n": 2, "seed": 3},
    {"max_tokens": 4, "logprobs": 2},
    {"max_tokens": 6},
]


APART = {"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 1}


@pytest.mark.parametrize(
    "cluster",
    [pytest.param({}, marks=MORE), {"prefill_ranks": 2}, pytest.param(APART, marks=MORE)],
    ids=["one rank", "two ranks", "1+1"],
)
def test_calls_give_what_runs_of_their_own_give_with_the_same_ranks(tmp_path, cluster):
    data = [TEXTS, pa.table({"text": MANY, "id": [f"r{row}" for row in range(len(MANY))]}), TEXTS[:3], TEXTS]
    found = []
    with batchinfer.Model(RANDOM_MODEL, dtype="float32", cluster=cluster) as model:
        for number, (rows, settings) in enumerate(zip(data, CALLS, strict=True)):
            answers = model.generate(rows, output=tmp_path / f"call-{number}", **settings)
            assert set(answers["status"].to_pylist()) == {"ok"}
            found.append(ranks(model))
        process = model._process
    assert all(pids == found[0] for pids in found)
    assert len(found[0]) == max(1, sum(value for value in cluster.values() if isinstance(value, int)))
    assert process.wait() == 0
    wait_until(lambda: not any(command_of(pid) for pid in found[0]))
    for number in range(len(CALLS)):
        same_as_own_run(tmp_path / f"call-{number}", tmp_path / f"own-{number}")


@pytest.mark.all  # make test: test_calls_give_what_runs_of_their_own_give_...
def test_experts_that_a_call_has_moved_are_back_for_the_next(tmp_path):
    """The first call calibrates and moves; in the next, with one token, there is nothing to calibrate with."""
    cluster = {"prefill_ranks": 2, "redundant_experts": 2}
    made, own = tmp_path / "call", tmp_path / "own"
    with batchinfer.Model(RANDOM_MODEL, dtype="float32", cluster=cluster) as model:
        model.generate(MANY, max_tokens=40, output=tmp_path / "first")
        model.generate([[5]], max_tokens=40, ignore_eos=True, output=made)
    assert max(statistics(tmp_path / "first", "placements")["placement"].to_pylist()) > 0
    same_as_own_run(made, own)
    for table in ("placements", "expert_rows"):
        assert statistics(made, table).equals(statistics(own, table))
    assert set(statistics(made, "placements")["placement"].to_pylist()) == {0}


def statistics(run: Path, table: str) -> pa.Table:
    (file,) = (run / "stats" / table).glob("*.parquet")
    return pq.read_table(file).drop_columns("session")


WRONG = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 4, "cluster": {"prefill_ranks": 2}}, "cluster is a setting of the Model"),
    ({"max_tokens": 4, "dtype": "bfloat16"}, "dtype is a setting of the Model"),
    ({"max_tokens": 4, "prompt": "x"}, "prompt"),
    ({"max_tokens": 4, "input": {"id": "nowhere"}}, "nowhere"),
    ({"max_tokens": 4, "choices": 1}, "choices is no setting"),
]


@pytest.mark.all  # make test: an interrupted call, below
def test_an_error_of_a_call_leaves_the_model_usable(model):
    expected = model.generate(TEXTS, max_tokens=4)
    before = ranks(model)
    for settings, sentence in WRONG:
        data = pa.table({"text": ["a"]}) if "input" in settings or "prompt" in settings else TEXTS
        with pytest.raises((batchinfer.ConfigError, batchinfer.InputError), match=sentence):
            model.generate(data, **settings)
    assert model.generate(TEXTS, max_tokens=4).equals(expected)
    assert ranks(model) == before


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ({"max_tokens": 4}, batchinfer.ConfigError, "max_tokens is no setting of a Model"),
        ({"cluster": {"ranks": 2}}, batchinfer.ConfigError, "cluster.ranks is not a known key"),
        ({"dtype": "float3"}, batchinfer.ConfigError, "float3"),
        ({"path": "/nowhere"}, batchinfer.ModelError, "there is no model folder /nowhere"),
    ],
)
def test_a_model_that_cannot_be_is_refused_when_it_is_made(settings, error, sentence):
    with pytest.raises(error, match=sentence):
        batchinfer.Model(**{"path": RANDOM_MODEL, **settings})


def test_a_rank_lost_in_a_call_costs_no_row(model, tmp_path):
    rows = model.generate(MANY, stream=True, output=tmp_path / "call", **LONG)
    next(rows)
    for rank in ranks(model):
        os.kill(rank, signal.SIGKILL)
    assert len(list(rows)) == len(MANY) - 1
    same_as_own_run(tmp_path / "call", tmp_path / "own")
    model.generate(TEXTS, max_tokens=4, output=tmp_path / "next")
    same_as_own_run(tmp_path / "next", tmp_path / "own-next")


@pytest.mark.all  # make test: test_process ends a command
def test_a_process_that_somebody_ends_is_an_error_of_its_call_alone(model, tmp_path):
    rows = model.generate(MANY, stream=True, output=tmp_path / "call", **LONG)
    next(rows)
    model._process._process.kill()
    with pytest.raises(batchinfer.BatchinferError, match="batchinfer run was ended by SIGKILL"):
        list(rows)
    assert len(list(model.generate(MANY, stream=True, output=tmp_path / "call", **LONG))) == len(MANY)
    same_as_own_run(tmp_path / "call", tmp_path / "own")


def test_an_interrupted_call_keeps_what_is_finished_and_the_ranks(model, own_interrupts, tmp_path):
    model.generate(TEXTS, max_tokens=4)
    before, folder = ranks(model), tmp_path / "call"

    def interrupt() -> None:
        wait_until(lambda: list(folder.glob("units/*/*/part-*.parquet")))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        model.generate(MANY, output=folder, **LONG)
    assert not (folder / "outputs").exists()
    assert ranks(model) == before
    kept = {path: path.read_bytes() for path in folder.glob("units/*/*/part-*.parquet")}
    model.generate(MANY, output=folder, **LONG)
    assert all(path.read_bytes() == content for path, content in kept.items())
    assert ranks(model) == before
    same_as_own_run(folder, tmp_path / "own")


@pytest.mark.all  # make test: the same in test_process
def test_an_iterator_that_is_closed_stops_its_call_alone(model, tmp_path):
    rows = model.generate(MANY, stream=True, output=tmp_path / "call", **LONG)
    next(rows)
    before = ranks(model)
    with pytest.raises(batchinfer.ConfigError, match="an earlier call of this thread has not ended"):
        model.generate(TEXTS, max_tokens=4)
    rows.close()
    assert not (tmp_path / "call" / "outputs").exists()
    assert model.generate(TEXTS, max_tokens=4).num_rows == len(TEXTS)
    assert ranks(model) == before


@pytest.mark.all  # make test: test_process calls from a thread
def test_calls_of_several_threads_come_one_after_the_other(model):
    found = {}

    def call(number: int) -> None:
        found[number] = model.generate(TEXTS[: number + 1], max_tokens=4)["text"].to_pylist()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = model.generate(TEXTS[:3], max_tokens=4)["text"].to_pylist()
    assert found == {number: whole[: number + 1] for number in range(3)}


def test_a_closed_model_says_so_and_a_call_that_runs_is_stopped(tmp_path):
    model = batchinfer.Model(RANDOM_MODEL, dtype="float32", **SLOW)
    rows = model.generate(MANY, stream=True, output=tmp_path / "call", **LONG)
    next(rows)
    lost = ranks(model)
    model.close()
    assert not any(command_of(pid) for pid in lost)
    with pytest.raises(batchinfer.InterruptedRunError):
        list(rows)
    for _ in range(2):
        with pytest.raises(batchinfer.ConfigError, match="this Model is closed"):
            model.generate(TEXTS, max_tokens=4)
        model.close()


@pytest.mark.all  # make test: a closed model, above
def test_a_model_belongs_to_the_process_that_made_it(model):
    model.generate(TEXTS[:1], max_tokens=2)
    pid = os.fork()
    if pid == 0:
        try:
            model.generate(TEXTS[:1], max_tokens=2)
        except batchinfer.ConfigError as error:
            os._exit(0 if "made by another process" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.all  # make test: test_process::test_a_job_ends_with_its_caller
@pytest.mark.parametrize(
    "moment", ["in a call", pytest.param("between calls", marks=MORE), "with a child that lives on"]
)
def test_all_processes_end_with_their_caller(tmp_path, moment):
    script = tmp_path / "script.py"
    settings = {"max_tokens": 2000, "ignore_eos": True} if moment == "in a call" else {"max_tokens": 2}
    fork = "import os\nif os.fork() == 0:\n    time.sleep(60)\n    os._exit(0)\n" if "child" in moment else ""
    script.write_text(
        f"import batchinfer, time\nmodel = batchinfer.Model({str(RANDOM_MODEL)!r}, dtype='float32')\n"
        f"model.generate({TEXTS!r}, max_tokens=2)\n{fork}print('ready', flush=True)\n"
        f"model.generate({TEXTS!r}, **{settings!r})\nprint('done', flush=True)\ntime.sleep(60)\n"
    )
    caller = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert caller.stdout.readline() == "ready\n"
    if moment != "in a call":
        assert caller.stdout.readline() == "done\n"
    started = started_by(caller.pid, "batchinfer")
    assert any("batchinfer.rank.main" in command_of(pid) for pid in started)
    caller.kill()
    caller.wait()
    wait_until(lambda: not any("-m batchinfer" in command_of(pid) for pid in started))


@pytest.mark.all  # make test: a rank lost in a call, above
def test_a_model_folder_that_changes_is_loaded_anew(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(RANDOM_MODEL, folder)
    with batchinfer.Model(folder, dtype="float32") as model:
        before = model.generate(TEXTS, max_tokens=8)
        make_random_twin(RANDOM_MODEL, tmp_path / "other", seed=5)
        for file in (tmp_path / "other").glob("*.safetensors"):
            os.replace(file, folder / file.name)
        after = model.generate(TEXTS, max_tokens=8)
    assert after["text"] != before["text"]
    assert after.equals(batchinfer.generate(TEXTS, model=folder, dtype="float32", max_tokens=8))
