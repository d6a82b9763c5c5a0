"""Long answers pass by the sort of their rows: outputs are the same, and memory does not grow with the answers."""

from __future__ import annotations

import itertools
import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from batchinfer.checked_json import publish_json, read_json
from batchinfer.data.schemas.internal import RESULTS
from batchinfer.finish import join, long_answers
from batchinfer.finish.long_answers import LongAnswers
from batchinfer.records import ConfigError
from batchinfer.run.units.result_files import write_results
from batchinfer.rundir import RunDir
from support.damage import make_computed_run
from support.jobs import batchinfer, output_bytes, outputs, question, write_job, write_shard
from support.tiers import first_in_make_test

FORMS = ("parquet", "jsonl", "openai")


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """A run with duplicates, several samples, bad rows and all that an answer may have, not finished yet."""
    folder = tmp_path_factory.mktemp("computed")
    prompts = [*map(question, range(7)), question(0), "", question(1)]
    sampling = [{"prompt_logprobs": 2 if row % 3 else None, "max_tokens": 2 + row % 4} for row in range(len(prompts))]
    columns = {"id": list(range(len(prompts))), "prompt": prompts, "sampling": sampling}
    write_shard(folder / "prompts" / "a.parquet", columns)
    write_shard(folder / "prompts" / "b.parquet", columns)
    job = write_job(
        folder,
        input={"sampling": "sampling"},
        output={"reasoning": "auto"},
        sampling={"max_tokens": 4, "n": 2, "logprobs": 2},
    )
    assert batchinfer("plan", job).code == 0
    assert batchinfer("work", job).code == 0
    return folder / "run"


def finish(computed, target, form):
    shutil.copytree(computed, target)
    assert batchinfer("finish", target, "--set", f"output.format={form}").code == 3  # of bad rows
    return output_bytes(target), pq.read_table(target / "stats" / "requests.parquet")


@pytest.mark.parametrize(("form", "long_bytes"), first_in_make_test([*itertools.product(FORMS, (0, 150))], 2))
def test_outputs_are_the_same_wherever_answers_wait(computed, tmp_path, monkeypatch, form, long_bytes):
    plain_files, plain_stats = finish(computed, tmp_path / "plain", form)
    written = []
    as_delivered = long_answers._as_delivered
    monkeypatch.setattr(long_answers, "LONG_BYTES", long_bytes)
    monkeypatch.setattr(long_answers, "BATCH_BYTES", 1 << 10)
    monkeypatch.setattr(long_answers, "GROUP_ROWS", 3)
    monkeypatch.setattr(long_answers, "_as_delivered", lambda row: written.append(row) or as_delivered(row))
    files, stats = finish(computed, tmp_path / "long", form)
    assert files == plain_files
    assert stats.equals(plain_stats)
    num_results = sum(pq.read_metadata(path).num_rows for path in computed.glob("units/*/*/part-*.parquet"))
    assert len(written) == num_results if long_bytes == 0 else 0 < len(written) < num_results


def test_rows_come_fewer_at_a_time_with_long_answers(computed, tmp_path, monkeypatch):
    finish(computed, tmp_path / "plain", "parquet")
    monkeypatch.setattr(long_answers, "LONG_BYTES", 0)
    monkeypatch.setattr(long_answers, "FILLED_BYTES", 1 << 10)
    finish(computed, tmp_path / "long", "parquet")
    assert outputs(tmp_path / "long") == outputs(tmp_path / "plain")
    file = pq.ParquetFile(tmp_path / "long" / "outputs" / "a.parquet")
    assert file.num_row_groups > 3


def scored(num_rows, num_tokens=200_000, num_top=2):
    """Return the log-probabilities of `num_rows` answers."""

    def tokens(number, **more):
        columns = {"token_id": pa.array(np.zeros(number, np.int32)), "logprob": pa.array(np.ones(number, np.float32))}
        columns |= more
        return pa.StructArray.from_arrays([*columns.values()], [*columns])

    def lists(number, length, values):
        return pa.ListArray.from_arrays(pa.array(np.arange(number + 1) * length, pa.int32()), values)

    number = num_rows * num_tokens
    return lists(num_rows, num_tokens, tokens(number, top=lists(number, num_top, tokens(number * num_top))))


@pytest.fixture
def run_of_wide_rows(tmp_path, monkeypatch):
    """13 answers of 4 MiB each, their log-probabilities of 5 MB, and 48 MiB for all of DuckDB."""
    run = RunDir(make_computed_run(tmp_path))
    for mark in run.done_marks.iterdir():
        files = {}
        for name in read_json(mark)["files"]:
            table = pq.read_table(run.root / name)
            place = table.schema.get_field_index("text")
            text = pc.binary_repeat(table["text"].combine_chunks(), (4 << 20) // 8)
            table = table.set_column(place, "text", text.cast(pa.string()))
            place = table.schema.get_field_index("logprobs")
            table = table.set_column(place, "logprobs", scored(len(table)))
            path = write_results((run.root / name).parent, 90, table.cast(RESULTS.schema))
            files[str(path.relative_to(run.root))] = path.stat().st_size
        publish_json(mark, {**read_json(mark), "files": files})
    for name in ("SORT_BYTES", "MOST_SORT_BYTES"):
        monkeypatch.setattr(join, name, 48 << 20)
    return run.root


@pytest.mark.all  # make test: wherever answers wait, above
def test_answers_of_any_length_fit_into_the_memory_of_the_sort(run_of_wide_rows):
    ended = batchinfer("finish", run_of_wide_rows)
    assert ended.code == 0, ended.err
    texts = [row["text"] for rows in outputs(run_of_wide_rows).values() for row in rows]
    assert len(texts) == 13
    assert min(map(len, texts)) >= 1 << 20


@pytest.mark.all  # make test: a report that has too little memory
def test_a_report_of_what_is_computed_takes_no_more_memory(run_of_wide_rows):
    ended = batchinfer("report", run_of_wide_rows, "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["rows"] == 13


def test_a_report_that_has_too_little_memory_names_the_run(run_of_wide_rows, monkeypatch):
    monkeypatch.setattr(long_answers, "LONG_BYTES", 1 << 40)
    ended = batchinfer("report", run_of_wide_rows)
    assert ended.code == 2
    assert f"cannot report {run_of_wide_rows}: its rows are too wide" in ended.err


def test_rows_that_do_not_fit_are_said_to_be_too_wide(run_of_wide_rows, monkeypatch):
    monkeypatch.setattr(long_answers, "LONG_BYTES", 1 << 40)  # as if none were long
    ended = batchinfer("finish", run_of_wide_rows)
    assert ended.code == 2
    assert "its rows are too wide to be sorted in 48 MiB; repeat `batchinfer finish" in ended.err


def test_a_folder_that_cannot_be_written_is_named(computed, tmp_path, monkeypatch):
    monkeypatch.setattr(long_answers, "LONG_BYTES", 0)
    files = list(computed.glob("units/*/*/part-*.parquet"))
    with (
        join.open_database(RunDir(tmp_path)) as connection,
        pytest.raises(ConfigError, match=r"cannot write .*missing"),
    ):
        LongAnswers(tmp_path / "missing").set_apart(connection, files)
