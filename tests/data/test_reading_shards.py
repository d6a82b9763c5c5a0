"""Damaged files, and files and tables as they are read and written."""

from __future__ import annotations

import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from batchinfer.data.inputs import read_batches
from batchinfer.data.parquet import table_writer
from batchinfer.data.shard_schemas import shard_schema
from batchinfer.data.shards import find_shards, with_content
from batchinfer.records import InputError, RunMismatchError
from support.prompt_tables import (
    SAMPLE,
    make_job,
    one_shard,
    tokenize,
    write,
)

# ---- damaged files


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1PAR1", b"hello world, hello", b"PAR1\0\0\0\0PAR1", b"{}" * 99])
def test_what_is_no_parquet_file_is_a_problem_not_a_crash(tmp_path, content):
    (tmp_path / "bad.parquet").write_bytes(content)
    shard = one_shard(tmp_path / "bad.parquet")
    assert shard.problem
    assert (shard.footer, shard.num_rows, shard.size_bytes) == ("", 0, len(content))


def test_files_that_cannot_be_opened_are_a_problem(tmp_path):
    (tmp_path / "gone.parquet").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.parquet")
    assert all(shard.problem for shard in find_shards([f"{tmp_path}/*.parquet"]))


def test_a_shard_cut_anywhere_is_a_problem(tmp_path):
    content = write(tmp_path / "a.parquet", {"prompt": [f"text {i}" for i in range(500)]}).read_bytes()
    for size in range(0, len(content), 41):
        (tmp_path / "cut.parquet").write_bytes(content[:size])
        assert one_shard(tmp_path / "cut.parquet").problem


@pytest.mark.parametrize("seed", range(40))
def test_damage_in_the_middle_is_an_input_error(tmp_path, seed):
    # pages with checksums: no flipped bit goes unnoticed
    columns = {"prompt": [f"text {i} {i * seed}" for i in range(500)]}
    path = write(tmp_path / "a.parquet", columns, write_page_checksum=True, use_dictionary=False)
    shard = one_shard(path)
    content = bytearray(path.read_bytes())
    content[200 + 50 * seed] ^= 1 << (seed % 8)
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"a\.parquet"):
        tokenize(shard, tmp_path / "tokens.parquet", make_job())
    assert sorted(os.listdir(tmp_path)) == ["a.parquet"]


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_footer_is_a_problem_or_reads_as_some_table(tmp_path, seed):
    path = write(tmp_path / "a.parquet", {"prompt": [f"text {i}" for i in range(50)]})
    content = bytearray(path.read_bytes())
    content[len(content) - 9 - 17 * seed] ^= 0xFF
    path.write_bytes(content)
    shard = one_shard(path)
    if shard.problem is None:
        try:
            list(read_batches(shard, [name for name in shard_schema(shard).names if name == "prompt"]))
        except InputError as error:
            assert "a.parquet" in str(error)  # noqa: PT017  (either outcome is right)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("rows", [["x"], ["y", "x"], None])
def test_a_shard_that_is_replaced_before_it_is_read_is_refused(tmp_path, suffix, rows):
    path = tmp_path / f"a.{suffix}"
    put = {"parquet": pq.write_table, "arrow": feather.write_feather}[suffix]
    put(pa.table({"prompt": ["x", "y"]}), path)
    shard = with_content(one_shard(path))
    assert [len(batch) for batch in read_batches(shard, ["prompt"])] == [2]
    path.write_bytes(path.read_bytes())
    assert [len(batch) for batch in read_batches(shard, ["prompt"])] == [2]
    if rows is None:
        path.unlink()
    else:
        put(pa.table({"prompt": rows}), path)
    with pytest.raises(RunMismatchError, match="restore it"):
        list(read_batches(shard, ["prompt"]))


# ---- reading and writing


def test_batches_hold_the_columns_asked_for_in_order(tmp_path):
    path = write(tmp_path / "a.parquet", {"a": range(10), "b": range(10), "a.b": range(10)}, row_group_size=4)
    batches = list(read_batches(one_shard(path), ["b", "a"], batch_rows=3))
    assert all(batch.schema.names == ["b", "a"] and batch.num_rows <= 3 for batch in batches)
    assert [value for batch in batches for value in batch["a"].to_pylist()] == list(range(10))
    assert sum(batch.num_rows for batch in read_batches(one_shard(path), [], batch_rows=3)) == 10


def test_short_rows_come_in_full_batches_though_the_file_has_a_dictionary(tmp_path):
    # a dictionary of 1 MB: with a value of that size in each row, 256 rows would be all that memory allows
    texts = [f"{row:030}" for row in range(30_000)]
    path = write(tmp_path / "a.parquet", {"prompt": texts})
    with pq.ParquetFile(path) as file:
        assert file.metadata.row_group(0).column(0).has_dictionary_page
    found = list(read_batches(one_shard(path), ["prompt"]))
    assert [value for batch in found for value in batch["prompt"].to_pylist()] == texts
    assert all(1024 - 256 < batch.num_rows <= 1024 for batch in found[:-1])


def test_a_written_table_appears_whole_or_not_at_all(tmp_path):
    schema = pa.schema([("a", pa.int64())])

    def write_some(fail: bool) -> None:
        with table_writer(tmp_path / "out" / "t.parquet", schema) as writer:
            for _ in range(3):
                writer.write_batch(pa.record_batch({"a": [1, 2]}))
            if fail:
                raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        write_some(fail=True)
    assert os.listdir(tmp_path / "out") == []
    write_some(fail=False)
    assert pq.ParquetFile(tmp_path / "out" / "t.parquet").num_row_groups == 3


MEMORY_PROGRAM = """
import re, sys
from pathlib import Path
from batchinfer.config import JobConfig
from batchinfer.data.encoders import Encoders
from batchinfer.data.shards import find_shards, with_content
from batchinfer.data.prompts import PromptLimits
from batchinfer.data.validate import tokenize_shard
path, model = sys.argv[1:]
job = JobConfig.model_validate({"input": {"files": [path], "prompt": "prompt"}, "output": {"dir": "x"},
                                "model": {"path": model}, "sampling": {"max_tokens": 1}})
encoders = Encoders(job, window=2048)
def peak_kb():  # not getrusage: its maximum begins with that of the process that started this one
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak_kb()
for shard in find_shards([path]):
    tokenize_shard(shard, job, encoders, PromptLimits(2048, 1024), Path(path + ".out"), lambda rows: None)
print(peak_kb() - before)
encoders.__exit__(None, None, None)
"""


@pytest.mark.parametrize("repeated", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_large_row_group_is_read_in_bounded_memory(tmp_path, repeated):
    # one row group of 300 MB of text; repeated texts are a few bytes in the file
    text = "all work and no play " * 20_000
    texts = [text if repeated else f"{row}{text}" for row in range(700)]
    path = tmp_path / "large.parquet"
    pq.write_table(pa.table({"prompt": texts}), path, compression="zstd", write_batch_size=8)
    del texts
    program = [sys.executable, "-c", MEMORY_PROGRAM, str(path), str(SAMPLE / "model")]
    grown_kb = int(subprocess.run(program, capture_output=True, text=True, check=True).stdout)
    assert grown_kb < 150_000


@pytest.mark.parametrize("nested", [False, True])
def test_a_dictionary_of_large_values_is_read_in_bounded_memory(tmp_path, nested):
    """Two rows of 50 MB, then 90 that repeat them: a file of some kilobytes that holds 3 GB."""
    values = pa.array(["short", "x" * 50_000_000, "y" * 50_000_000])
    texts = pa.DictionaryArray.from_arrays(pa.array([1, 2, None] + [0, 1, 2] * 30, pa.int32()), values)
    column = texts
    if nested:
        role = pa.array(["user"] * len(texts))
        messages = pa.StructArray.from_arrays([role, texts], ["role", "content"])
        column = pa.ListArray.from_arrays(range(len(texts) + 1), messages)
    path = tmp_path / "large.parquet"
    options = {"compression": "zstd", "dictionary_pagesize_limit": 1 << 30, "store_schema": False}
    pq.write_table(pa.table({"prompt": column}), path, **options)
    shard = one_shard(path)
    found = []
    for batch in read_batches(shard, ["prompt"]):
        assert not pa.types.is_dictionary(batch["prompt"].type)
        assert batch.nbytes < 70e6
        texts = batch["prompt"].flatten().field("content") if nested else batch["prompt"]
        found += pc.utf8_slice_codeunits(texts, 0, 5).to_pylist()
    assert found == [*("xxxxx", "yyyyy", None), *["short", "xxxxx", "yyyyy"] * 30]


def test_a_row_that_no_memory_holds_makes_its_shard_unreadable(tmp_path):
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 30, pa.int32()), pa.array(["x" * 50_000_000]))
    path = tmp_path / "large.parquet"
    options = {"compression": "zstd", "dictionary_pagesize_limit": 1 << 30, "store_schema": False}
    pq.write_table(pa.table({"t": pa.ListArray.from_arrays([0, 1, 30], texts)}), path, **options)
    with pytest.raises(InputError, match="row 1 holds 1450000000 bytes, more than 1073741824"):
        list(read_batches(one_shard(path), ["t"]))


def nested(column: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays([pa.ListArray.from_arrays(range(len(column) + 1), column)], ["t"])


@pytest.mark.parametrize("shape", [lambda column: column, nested], ids=["flat", "nested"])
def test_views_become_what_they_show_in_small_batches(tmp_path, shape):
    """polars writes text as views; a batch of the file is cut by the bytes of its rows, not by shared bytes."""
    texts = [*(letter * 3_000_000 for letter in "abcdefghij"), "short", None, "k" * 20_000_000]
    column = shape(pa.array(["left out", *texts], pa.string_view()).slice(1))
    with pa.ipc.new_file(tmp_path / "a.arrow", pa.schema([("t", column.type)])) as file:
        file.write_batch(pa.record_batch({"t": column}))
    batches = list(read_batches(one_shard(tmp_path / "a.arrow"), ["t"]))
    assert {str(batch["t"].type) for batch in batches} == {str(shape(pa.array(["x"])).type)}
    assert [len(batch) for batch in batches] == [2, 2, 2, 2, 4, 1]
    assert pa.concat_arrays([batch["t"] for batch in batches]).equals(column.cast(batches[0]["t"].type))
