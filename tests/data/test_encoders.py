"""Rows and model folders that break tokenizers and templates cost a sentence each, and nothing else."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.config import JobConfig
from batchinfer.data import encoders
from batchinfer.data.columns import ENCODED
from batchinfer.data.encoders import EncoderLimits, Encoders
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.data.tokenizer_process import TokenizerProcess
from batchinfer.records import BatchinferError
from batchinfer.sanitize import MAX_CHARS
from support.hostile import (
    DEEPSEEK_SPLIT,
    NESTED,
    SAMPLE_MODEL,
    TEMPLATES,
    TOKENIZERS,
    hostile_model,
    hostile_texts,
    model_folder,
)
from support.jobs import batchinfer, start, write_job, write_shard

TIGHT = EncoderLimits(row_s=1.0, row_s_per_byte=2e-6, batch_s_per_byte=2e-6, row_bytes=1 << 30)
# a word in the chat chooses what the template does; without one it is an ordinary template
TRAPS = f"""{{%- set text = messages[0].content -%}}
{{%- if 'LOOP' in text %}}{NESTED}{{% endif -%}}
{{%- if 'HUGE' in text %}}{{{{ '%0100000000000d' % 1 }}}}{{% endif -%}}
{{%- if 'LONG' in text %}}{{{{ raise_exception('no' * 500000) }}}}{{% endif -%}}
{{%- if 'DEEP' in text %}}{{% macro m() %}}{{{{ m() }}}}{{% endmacro %}}{{{{ m() }}}}{{% endif -%}}
{{{{ text }}}}"""


def job_of(model: Path, kind: str = "prompt", **keys) -> JobConfig:
    parts = {"input": {"files": ["x"], kind: "p", **keys}, "output": {"dir": "x"}, "model": {"path": str(model)}}
    return JobConfig.model_validate({**parts, "sampling": {"max_tokens": 1}})


def encoded(opened: Encoders, values: list) -> pa.Table:
    column = pa.array(values)
    return pa.Table.from_batches([piece.result() for piece in opened.start(column)], schema=ENCODED)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_each_row_has_its_own_ids_in_order():
    texts = [f"row {number} of {'many ' * (number % 7)}rows" for number in range(3000)]
    with Encoders(job_of(SAMPLE_MODEL), window=2048) as opened:
        found = encoded(opened, texts)
    assert found["token_ids"].to_pylist() == load_tokenizer(SAMPLE_MODEL).encode_prompts(texts)
    assert found["error"].null_count == 3000


def test_rows_that_come_one_at_a_time_share_a_worker(monkeypatch):
    """Rows of many small shards share a worker, too, because each worker is a fork."""
    fork, forked = TokenizerProcess.fork, []
    monkeypatch.setattr(TokenizerProcess, "fork", lambda process: forked.append(process) or fork(process))
    with Encoders(job_of(SAMPLE_MODEL), window=2048) as opened:
        found = [encoded(opened, [f"row {number}"])["token_ids"][0].as_py() for number in range(20)]
        assert len(forked) <= opened.num_workers
    assert found == load_tokenizer(SAMPLE_MODEL).encode_prompts([f"row {number}" for number in range(20)])


def test_a_bad_row_costs_nothing_but_itself(tmp_path):
    chats = [user(f"good {number}") for number in range(300)]
    for row, word in {7: "LOOP", 8: "HUGE", 9: "DEEP", 150: "LONG", 299: "LOOP"}.items():
        chats[row] = user(word)
    folder = model_folder(tmp_path / "model", template=TRAPS)
    with Encoders(job_of(folder, "messages"), window=2048, limits=TIGHT) as opened:
        found = encoded(opened, chats)
    errors = {row: error for row, error in enumerate(found["error"].to_pylist()) if error is not None}
    assert list(errors) == [7, 8, 9, 150, 299]
    assert errors[7] == errors[299] == "tokenizing it takes more than 1 s of processor time"
    assert errors[8] == "tokenizing it needs more than 1 GiB of memory"
    assert "it is nested too deeply" in errors[9]
    assert errors[150].startswith("the chat template refuses the messages: nono")
    assert "(1000040 characters)" in errors[150]
    assert len(errors[150]) < MAX_CHARS + 40
    good = [row for row in range(300) if row not in errors]
    expected = load_tokenizer(folder).encode_chats([chats[row] for row in good])
    assert [found["token_ids"][row].as_py() for row in good] == expected


def test_a_panic_of_the_tokenizer_is_the_error_of_its_row(tmp_path):
    folder = model_folder(tmp_path / "model", split="(a+)+$")
    with Encoders(job_of(folder), window=2048) as opened:
        found = encoded(opened, ["aaa", "a" * 41 + "!", "bbb"])
    assert [ids == [] for ids in found["token_ids"].to_pylist()] == [False, True, False]
    assert found["error"][1].as_py().startswith("the tokenizer fails on it: PanicException: Onig: Regex search error")


@pytest.mark.all  # make test: a panic, above
def test_workers_that_somebody_ends_make_no_row_bad(monkeypatch):
    """A row whose worker the kernel kills for lack of memory is tried again; after several kills the command ends."""
    texts = [f"row {number}" for number in range(200)]
    with Encoders(job_of(SAMPLE_MODEL), window=2048) as opened:
        fork, victims = TokenizerProcess.fork, []

        def fork_and_kill(process):
            worker = fork(process)
            if len(victims) < most:
                victims.append(worker.pid)
                os.kill(worker.pid, signal.SIGKILL)
            return worker

        monkeypatch.setattr(TokenizerProcess, "fork", fork_and_kill)
        most = 3
        assert encoded(opened, texts)["error"].null_count == 200
        for worker in opened._idle:
            os.kill(worker.pid, signal.SIGKILL)
        most = 1000
        with pytest.raises(BatchinferError, match="ended by somebody else"):
            encoded(opened, texts)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def test_workers_end_with_a_command_that_is_killed(tmp_path):
    model_folder(tmp_path / "model", template=TRAPS)
    write_shard(tmp_path / "prompts" / "a.parquet", {"m": [user("LOOP")] * 3})
    job = write_job(tmp_path, input={"prompt": None, "messages": "m"}, model={"path": str(tmp_path / "model")})
    with start("plan", job) as command:
        while not (workers := [pid for child in children_of(command.pid) for pid in children_of(child)]):
            assert command.poll() is None, command.stderr.read()
            time.sleep(0.01)
        command.kill()
        while any(state_of(pid) != "Z" for pid in workers):
            time.sleep(0.01)


def test_an_interrupt_ends_the_plan_which_goes_on_later(tmp_path, monkeypatch):
    model_folder(tmp_path / "model", template=TRAPS)
    for name, text in (("a", "good"), ("b", "LOOP")):
        write_shard(tmp_path / "prompts" / f"{name}.parquet", {"m": [user(text)] * 3})
    job = write_job(tmp_path, input={"prompt": None, "messages": "m"}, model={"path": str(tmp_path / "model")})
    with start("plan", job) as command:
        while not list((tmp_path / "run" / "tokens").glob("*.json")):
            assert command.poll() is None
            time.sleep(0.01)
        os.kill(command.pid, signal.SIGINT)
        assert command.wait() == 75
        assert "run the same command to go on" in command.stderr.read()
    (done,) = (tmp_path / "run" / "tokens").glob("*.parquet")
    before = done.stat().st_mtime_ns, done.stat().st_ino
    monkeypatch.setattr(encoders, "LIMITS", TIGHT)
    ended = batchinfer("plan", job)
    assert ended.code == 0
    assert "/b.parquet; the first: row 0: tokenizing it takes more than 1 s" in ended.err
    assert "3 bad rows in " in ended.err
    assert (done.stat().st_mtime_ns, done.stat().st_ino) == before


def some(names: list[str]) -> list:
    """A model of each kind in the quick tests."""
    quick = {"slices", "nested loops", "dropout", "bad charsmap", "deep list"}
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", some([*TEMPLATES, *TOKENIZERS]))
def test_a_hostile_model_folder_is_one_sentence(tmp_path, name, monkeypatch):
    folder = hostile_model(tmp_path / "model", name)
    monkeypatch.setattr(encoders, "LIMITS", EncoderLimits(load_s=1.0, load_bytes=1 << 29))
    write_shard(tmp_path / "prompts" / "a.parquet", {"m": [user("hello")] * 3})
    job = write_job(tmp_path, input={"prompt": None, "messages": "m"}, model={"path": str(folder)})
    ended = batchinfer("plan", job)
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert line.startswith("error: ")
    assert str(folder) in line or "template is not valid" in line
    if name.startswith("dropout"):
        assert "model.dropout" in line


@pytest.mark.all  # make test: a panic, above
@pytest.mark.parametrize(
    ("split", "num_good", "num_bad"),
    [
        ("(a+)+$", 150, 8),
        pytest.param("(a+)+$", 1000, 300, marks=pytest.mark.slow),
        pytest.param(DEEPSEEK_SPLIT, 1000, 300, marks=pytest.mark.slow),
    ],
)
def test_hostile_rows_cost_themselves_only(tmp_path, split, num_good, num_bad):
    """Good rows have the ids they have alone, whatever stands between them; the plan ends and stays small."""
    folder = model_folder(tmp_path / "model", split=split)
    if num_bad > 100:  # a window so long that nothing is refused by its length alone
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 21}))
    good = [f"a good row {number} with tokens of its own {number * number}" for number in range(num_good)]
    texts = good + [text for text in hostile_texts(num_bad) if num_bad > 100 or len(text) < 10_000_000]
    order = random.Random(1).sample(range(len(texts)), len(texts))
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": [texts[row] for row in order]}, row_group_size=200)
    job = write_job(tmp_path, model={"path": str(folder)})
    with start("plan", job) as command:
        peak_bytes = 0
        while command.poll() is None:
            peak_bytes = max(peak_bytes, memory_of_all(command.pid))
            time.sleep(0.05)
        assert command.returncode == 0, command.stderr.read()
    rows = pq.read_table(tmp_path / "run" / "tokens").to_pylist()
    place = {row: index for index, row in enumerate(order)}
    tokenizer = load_tokenizer(folder)
    assert [rows[place[row]]["token_ids"] for row in range(num_good)] == tokenizer.encode_prompts(good)
    assert all((row["token_ids"] is None) == (row["error"] is not None) for row in rows)
    assert max(len(row["error"] or "") for row in rows) < 1000
    assert any((row["error"] or "").startswith("the tokenizer fails on it: Panic") for row in rows)
    assert peak_bytes < 2 << 30
    ended = batchinfer("finish", job, "--allow-partial")
    assert ended.code == 3, ended.err


def memory_of_all(pid: int) -> int:
    """Return the bytes of a process and its children; shared memory counts once."""
    try:
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
        own = int(found[1]) * 1024 if found else 0
        return own + sum(map(memory_of_all, children_of(pid)))
    except OSError:  # it has ended
        return 0
