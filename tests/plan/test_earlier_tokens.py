"""Shards that an earlier run has tokenised: the same tokens without the tokenizer, and only for the same shards."""

from __future__ import annotations

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer import manifest
from batchinfer.config import JobConfig, load_job
from batchinfer.data import validate
from batchinfer.data.encoders import Encoders
from batchinfer.data.prompts import PromptLimits
from batchinfer.data.shards import find_shards
from batchinfer.data.validate import tokenize_shard
from batchinfer.plan.earlier_tokens import EarlierTokens
from batchinfer.run.fingerprint import job_fingerprint
from batchinfer.run.store.folder import FolderStorage
from batchinfer.rundir import RunDir, read_state
from support.damage import flip_bit, truncate
from support.hostile import model_folder
from support.jobs import batchinfer, write_job, write_shard
from support.tiers import first_in_make_test

PROMPTS = [f"row {number} of many" for number in range(3000)]


@pytest.fixture
def first(tmp_path):
    """The job file of a job that is planned, with a bad row in its second batch."""
    model_folder(tmp_path / "model")
    prompts = [None if row == 1500 else text for row, text in enumerate(PROMPTS)]
    write_shard(tmp_path / "prompts" / "a.parquet", {"id": range(3000), "prompt": pa.array(prompts)})
    job = write_job(tmp_path, model={"path": str(tmp_path / "model")})
    assert batchinfer("plan", job).code == 0
    return job


def tokenized(folder, job: JobConfig, monkeypatch) -> tuple[pa.Table, int]:
    """The first shard's rows, and how many of them were encoded."""
    num_encoded = []
    start = Encoders.start
    monkeypatch.setattr(
        Encoders, "start", lambda self, column, *what: num_encoded.append(len(column)) or start(self, column, *what)
    )
    shard = find_shards(job.input.files)[0]
    with Encoders(job, window=2048) as encoders:
        fingerprint = job_fingerprint(job, [shard], encoders.digest)
        earlier = EarlierTokens(FolderStorage(RunDir(folder / "run")), fingerprint).of(shard)
        known = None if earlier is None else earlier.take
        target = folder / "again.parquet"
        limits = PromptLimits(window=2048, vocab_size=1024)
        tokenize_shard(shard, job, encoders, limits, target, lambda num_rows: None, known=known)
    monkeypatch.undo()
    return pq.read_table(target), sum(num_encoded)


def test_only_batches_with_a_bad_row_are_encoded_again_and_all_tokens_are_the_same(first, tmp_path, monkeypatch):
    rows, num_encoded = tokenized(tmp_path, load_job(first), monkeypatch)
    assert num_encoded == 1024
    assert rows.equals(pq.read_table(tmp_path / "run" / "tokens" / "00000.parquet"))
    assert rows["error"].drop_null().to_pylist() == ["prompt is null"]


def test_other_sampling_settings_take_the_tokens_and_not_the_old_limit(first, tmp_path, monkeypatch):
    rows, num_encoded = tokenized(tmp_path, load_job(first, ["sampling.max_tokens=5"]), monkeypatch)
    assert num_encoded == 1024
    assert set(rows["max_tokens"].to_pylist()) == {5, 0}
    assert rows["token_ids"].equals(pq.read_table(tmp_path / "run" / "tokens" / "00000.parquet")["token_ids"])


def other_shard(folder):
    write_shard(folder / "prompts" / "a.parquet", {"id": range(3000), "prompt": [f"{text}!" for text in PROMPTS]})


def edited_in_place(folder):
    """Two prompts exchanged, which the footer does not show."""
    path = folder / "prompts" / "a.parquet"
    footer = pq.read_metadata(path)
    prompts = [None if row == 1500 else text for row, text in enumerate(PROMPTS)]
    prompts[6], prompts[7] = prompts[7], prompts[6]
    write_shard(path, {"id": range(3000), "prompt": pa.array(prompts)})
    assert pq.read_metadata(path).equals(footer)


def other_template(folder):
    (folder / "model" / "chat_template.jinja").write_text("{{ messages }}")


def writable_by_others(folder):
    (folder / "run").chmod(0o777)


@pytest.mark.parametrize("change", [other_shard, edited_in_place, other_template, writable_by_others])
def test_nothing_is_taken_when_something_is_not_the_same(first, tmp_path, monkeypatch, change):
    change(tmp_path)
    assert tokenized(tmp_path, load_job(first), monkeypatch)[1] == 3000


@pytest.mark.parametrize(
    "change",
    first_in_make_test(
        [
            {"control_tokens": "text"},
            {"format": "sharegpt"},
            {"template": "{{ prompt }}"},
            {"system": "Be brief."},
            {"chat_template_kwargs": {"thinking": True}},
            {"tools": "tools"},
            {"continue_final_message": True},
            {"choices": "choices"},
        ],
        2,
    ),
)
def test_nothing_is_taken_when_prompts_are_made_in_another_way(first, tmp_path, change):
    job, run = load_job(first), RunDir(tmp_path / "run")
    shards = find_shards(job.input.files)
    recorded = read_state(run)["fingerprint"]
    assert EarlierTokens(FolderStorage(run), recorded).of(shards[0]) is not None
    other = {**recorded, "input columns": {**recorded["input columns"], **change}}
    assert EarlierTokens(FolderStorage(run), other).of(shards[0]) is None


@pytest.mark.parametrize("kind", first_in_make_test([flip_bit, truncate, lambda path, rng: path.unlink()]))
def test_a_damaged_token_file_is_named_and_its_rows_are_encoded_again(first, tmp_path, monkeypatch, capsys, kind):
    path = tmp_path / "run" / "tokens" / "00000.parquet"
    expected = pq.read_table(path)
    kind(path, random.Random(0))
    rows, num_encoded = tokenized(tmp_path, load_job(first), monkeypatch)
    assert num_encoded == 3000
    assert rows.equals(expected)
    assert capsys.readouterr().err.count(f"warning: {path} is damaged (") == 1


def test_damage_behind_the_first_rows_costs_only_the_rest(first, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(validate, "GROUP_ROWS", 1024)
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 1 << 10)
    draw = random.Random(0)
    prompts = [" ".join(str(draw.random()) for _ in range(10)) for _ in range(3000)]
    write_shard(tmp_path / "prompts" / "a.parquet", {"id": range(3000), "prompt": prompts})
    assert batchinfer("plan", first).code == 0
    path = tmp_path / "run" / "tokens" / "00000.parquet"
    expected = pq.read_table(path)
    (place,) = [index for index, name in enumerate(expected.column_names) if name == "token_ids"]
    content = bytearray(path.read_bytes())
    content[pq.read_metadata(path).row_group(1).column(place).data_page_offset + 100] ^= 1
    path.write_bytes(content)
    rows, num_encoded = tokenized(tmp_path, load_job(first), monkeypatch)
    assert num_encoded == 3000 - 1024
    assert rows.equals(expected)
    assert f"{path} is damaged (" in capsys.readouterr().err


def test_prompts_of_a_job_with_choices_are_taken_and_their_choices_encoded_again(tmp_path, monkeypatch):
    choices = pa.array([[f" {number}", f" not {number}"] for number in range(3000)])
    write_shard(tmp_path / "prompts" / "a.parquet", {"id": range(3000), "prompt": PROMPTS, "choices": choices})
    job = write_job(tmp_path, input={"choices": "choices"}, sampling={"max_tokens": 0})
    assert batchinfer("plan", job).code == 0
    rows, num_encoded = tokenized(tmp_path, load_job(job), monkeypatch)
    assert num_encoded == 6000
    assert rows.equals(pq.read_table(tmp_path / "run" / "tokens" / "00000.parquet"))
