"""Outputs as lines: the rows of the Parquet file, whole or not at all, vouched for and published like it."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import shutil
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.finish.json_lines import JsonLines
from batchinfer.records import ConfigError
from batchinfer.rundir import RunDir, read_state
from support.jobs import batchinfer, output_bytes, outputs, write_job, write_shard
from support.openai_batches import chat, completion, read_lines, write_batch

OPENAI = {"input": {"files": ["batch.jsonl"], "format": "openai", "prompt": None}, "output": {"format": "openai"}}


def lines_of(table: pa.Table) -> list[dict[str, Any]]:
    found = list(JsonLines(duckdb.connect()).encode(table))
    assert all(file == 0 and data.endswith(b"\n") and data.count(b"\n") == 1 for file, data in found)
    return [json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) for _, data in found]


# ---- values


def test_lines_are_the_rows_of_the_parquet_file(tmp_path):
    columns = {
        "id": [3, 4, 5],
        "prompt": ["Hello", None, "there"],
        "Extra": [[1.5], None, []],
        "extra": ["a", "é\n", ""],
    }
    write_shard(tmp_path / "prompts" / "a.parquet", columns)
    write_shard(tmp_path / "prompts" / "deep" / "b.parquet", {**columns, "id": [6, 7, 8]})
    job = write_job(
        tmp_path,
        input={"files": ["prompts/**/*.parquet"]},
        output={"format": "jsonl", "keep_columns": ["Extra", "extra"]},
        sampling={"n": 2, "logprobs": 2, "max_tokens": 3, "temperature": 1.0},
    )
    assert batchinfer("run", job).code == 3
    for name, rows in outputs(tmp_path / "run").items():
        assert read_lines((tmp_path / "run" / "outputs" / name).with_suffix(".jsonl")) == rows
    assert len(output_bytes(tmp_path / "run")) == 4


VALUES = {
    "numbers": ([1.5, math.nan, math.inf, -math.inf, None], [1.5, None, None, None, None]),
    "large": ([2**63 - 1, -(2**63)], [2**63 - 1, -(2**63)]),
    "texts": (["NaN", '"Infinity" \\', "a\0b\u2028", "é\n"], ["NaN", '"Infinity" \\', "a\0b\u2028", "é\n"]),
    "in lists": ([[math.nan, 1.0], []], [[None, 1.0], []]),
    "in structs": ([{"a": math.inf, "b": "NaN"}], [{"a": None, "b": "NaN"}]),
    "times": ([datetime.datetime(2020, 1, 1, 12, tzinfo=datetime.UTC)], ["2020-01-01 12:00:00+00"]),
    "days": ([datetime.date(2020, 1, 31)], ["2020-01-31"]),
    "flags": ([True, None], [True, None]),
    "nothing": ([None, None], [None, None]),
}


NUMBERS = pa.map_(pa.string(), pa.int64())


@pytest.mark.parametrize(
    ("values", "kind", "wanted"),
    [
        ([[("k", 1), ("k", 2)], None, [("j", 3)]], NUMBERS, [{"k": 2}, None, {"j": 3}]),
        ([[[("k", 1), ("j", 5), ("k", None)], []]], pa.list_(NUMBERS), [[{"k": None, "j": 5}, {}]]),
        ([{"m": [(1, 1), (1, 2)]}], pa.struct([("m", pa.map_(pa.int32(), pa.int64()))]), [{"m": {"1": 2}}]),
        ([[("a", [("k", 1), ("k", 2)])]], pa.map_(pa.string(), NUMBERS), [{"a": {"k": 2}}]),
    ],
)
def test_of_a_key_that_a_map_has_twice_the_last_value_counts(values, kind, wanted):
    column = pa.array(values, kind)
    assert [line["x"] for line in lines_of(pa.table({"x": column, "y": [1.5] * len(column)}))] == wanted


def test_a_value_that_duckdb_cannot_write_is_named_as_the_cause(monkeypatch):
    def fails(self, rows):
        raise duckdb.InvalidInputException("Invalid Input Error: no such value")

    monkeypatch.setattr(JsonLines, "_written", fails)
    with pytest.raises(ConfigError, match=r"written as a line of JSON: .*no such value; leave its column out"):
        lines_of(pa.table({"x": [1]}))


@pytest.mark.parametrize(("values", "wanted"), VALUES.values(), ids=VALUES)
def test_values_are_json_whatever_their_type(values, wanted, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert lines_of(pa.table({"x": values, "NaN": [math.nan] * len(values)})) == [
        {"x": value, "NaN": None} for value in wanted
    ]


def test_decimals_keep_their_digits_beside_a_number_that_is_none():
    table = pa.table({"x": [decimal.Decimal("1234567890123456789.25")], "y": [math.nan]})
    ((_, data),) = JsonLines(duckdb.connect()).encode(table)
    assert data == b'{"x":1234567890123456789.25,"y":null}\n'


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (1_001_999, pa.duration("ns"), "00:00:00.001001"),
        (1_001_999, pa.timestamp("ns"), "1970-01-01 00:00:00.001001999"),
        (2**63 - 1, pa.timestamp("us"), "infinity"),
        (-(2**31) + 1, pa.date32(), "-infinity"),
    ],
)
def test_durations_have_microseconds_and_the_ends_of_times_are_infinity(value, kind, text):
    assert lines_of(pa.table({"x": pa.array([value], kind)})) == [{"x": text}]


def test_bytes_that_are_no_text_cost_their_value_only():
    def text(data: bytes) -> pa.Array:
        offsets = pa.py_buffer(b"".join(end.to_bytes(4, "little") for end in (0, len(data), len(data) + 1)))
        return pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(data + b"x")])

    bad = text(b"a\xffb")
    table = pa.table({"x": bad, "y": pa.StructArray.from_arrays([bad], ["z"]), "n": [1, 2]})
    assert lines_of(table) == [{"x": "a\ufffdb", "y": None, "n": 1}, {"x": "x", "y": {"z": "x"}, "n": 2}]


# ---- files


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """A computed run of an OpenAI batch that is not finished, and its outputs."""
    folder = tmp_path_factory.mktemp("computed")
    lines = [chat(f"row {row}", f"What is {row}?", n=1 + row % 2, logprobs=True) for row in range(30)]
    write_batch(folder / "batch.jsonl", [*lines, completion("text"), "{"])
    job = write_job(folder, **OPENAI, sampling={"max_tokens": 3})
    assert batchinfer("plan", job).code == 0
    assert batchinfer("work", job).code == 0
    calm = folder / "calm"
    shutil.copytree(folder / "run", calm)
    assert batchinfer("finish", calm).code == 3
    return folder / "run", output_bytes(calm)


@pytest.mark.parametrize("name", ["batch.jsonl", "batch.errors.jsonl", "batch.parquet"])
def test_damage_to_a_file_of_lines_is_found_and_repaired(computed, tmp_path, name):
    run, expected = computed
    target = shutil.copytree(run, tmp_path / "run")
    assert batchinfer("finish", target).code == 3
    assert batchinfer("verify", target).code == 0
    path = target / "outputs" / name
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    ended = batchinfer("verify", target)
    assert ended.code != 0
    assert f"outputs/{name}" in ended.out + ended.err
    assert batchinfer("finish", target).code == 3
    assert output_bytes(target) == expected
    path.unlink()
    assert batchinfer("finish", target).code == 3
    assert output_bytes(target) == expected


@pytest.mark.all  # make test: the rows of a file of lines, above
def test_another_format_has_its_own_files_and_no_others(computed, tmp_path):
    run, expected = computed
    target = shutil.copytree(run, tmp_path / "run")
    names = {
        "openai": {"batch.parquet", "batch.jsonl", "batch.errors.jsonl"},
        "jsonl": {"batch.parquet", "batch.jsonl"},
        "parquet": {"batch.parquet"},
    }
    for form in ("openai", "jsonl", "openai", "parquet", "jsonl", "jsonl"):
        ended = batchinfer("finish", target, "--set", f"output.format={form}")
        assert ended.code == 3, ended.err
        found = output_bytes(target)
        assert set(found) == {f"outputs/{name}" for name in names[form]}
        vouched = {name for name in read_state(RunDir(target))["files"] if name.startswith("outputs/")}
        assert vouched == set(found)
        if form == "openai":
            assert found == expected
        if form == "jsonl":
            rows = pq.read_table(target / "outputs" / "batch.parquet").to_pylist()
            assert read_lines(target / "outputs" / "batch.jsonl") == rows
    assert batchinfer("verify", target).code == 0


@pytest.mark.all  # make test: the rows of a file of lines, above
def test_a_finished_run_gets_the_files_when_its_job_asks_for_them(tmp_path):
    write_shard(tmp_path / "prompts" / "a.parquet", {"id": ["x"], "prompt": ["Hello"]})
    for form in ("parquet", "openai", "jsonl"):
        assert batchinfer("run", write_job(tmp_path, output={"format": form})).code == 0
        assert batchinfer("finish", tmp_path / "run").code == 0
        assert (tmp_path / "run" / "outputs" / "a.jsonl").exists() is (form != "parquet")
    assert read_lines(tmp_path / "run" / "outputs" / "a.jsonl") == outputs(tmp_path / "run")["a.parquet"]


def test_files_that_two_shards_would_share_are_refused(tmp_path):
    for name in ("a.parquet", "a.errors.parquet"):
        write_shard(tmp_path / "prompts" / name, {"id": ["x"], "prompt": ["Hello"]})
    ended = batchinfer("plan", write_job(tmp_path, output={"format": "openai"}))
    assert ended.code == 2
    assert "would share the output file a.errors.jsonl; rename one of them" in ended.err
    assert batchinfer("plan", write_job(tmp_path, output={"format": "jsonl"})).code == 0
