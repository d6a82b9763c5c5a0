"""Shards in, checked rows out: every kind of bad file, bad column and bad row."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from batchinfer.config import JobConfig, ModelPart
from batchinfer.data.inputs import id_type, read_batches, shard_schema
from batchinfer.data.kept_fields import conformed, kept_fields
from batchinfer.data.parquet import read_rows, table_writer
from batchinfer.data.prompts import PromptLimits
from batchinfer.data.shards import find_shards
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.data.validate import ShardRows, tokenize_shard
from batchinfer.records import ConfigError, InputError, Shard, sampling_from_json
from support.open_encoders import encoders_of
from support.other_user import as_user, open_folder

SAMPLE = Path(__file__).parents[2] / "sample_data"
LIMITS = PromptLimits(window=2048, vocab_size=1024)
MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(SAMPLE / "model")


def write(path: Path, columns: dict, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path


def map_of(kind: pa.DataType) -> pa.MapType:
    """A map from texts, as a Parquet file of a column `task` gives it back."""
    return pa.map_(pa.string(), pa.field("task", kind))


def one_shard(path: Path) -> Shard:
    return find_shards([str(path)])[0]


def make_job(sampling: dict | None = None, /, **columns: str) -> JobConfig:
    return JobConfig.model_validate(
        {
            "input": {"files": ["unused"], **(columns or {"prompt": "prompt"})},
            "output": {"dir": "unused"},
            "model": {"path": str(SAMPLE / "model")},
            "sampling": {"max_tokens": 16, "n": 2, **(sampling or {})},
        }
    )


def tokenize(shard: Shard, target: Path, job: JobConfig, limits=LIMITS, progress=lambda rows: None) -> ShardRows:
    return tokenize_shard(shard, job, encoders_of(job, window=limits.window), limits, target, progress)


def copy_with(tmp_path: Path, tokenizer_parts: dict) -> Path:
    """The sample model folder with another tokenizer.json."""
    folder = shutil.copytree(SAMPLE / "model", tmp_path / "model")
    parts = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(parts | tokenizer_parts))
    return folder


def check(tmp_path, columns: dict, job: JobConfig | None = None, limits: PromptLimits = LIMITS):
    """(what was found, rows of tokens/<shard>.parquet) for a shard of these columns."""
    shard = one_shard(write(tmp_path / "in.parquet", columns))
    done = []
    found = tokenize(shard, tmp_path / "tokens.parquet", job or make_job(), limits, done.append)
    rows = pq.read_table(tmp_path / "tokens.parquet").to_pylist()
    assert sum(done) == found.num_rows == len(rows) == shard.num_rows
    assert [row["row"] for row in rows] == list(range(len(rows)))
    assert found.num_bad == sum(row["error"] is not None for row in rows)
    for row in rows:
        if row["error"] is not None:
            assert (row["token_ids"], row["max_tokens"], row["sampling"]) == (None, 0, None)
            assert "\n" not in row["error"]
    return found, rows


# ---- finding shards


def test_shards_are_sorted_and_named_below_their_common_folder(tmp_path):
    for name in ("b/2.parquet", "b/1.parquet", "a/deep/x.pq", "a/notes"):
        write(tmp_path / name, {"prompt": ["x"]})
    shards = find_shards([f"{tmp_path}/b/*.parquet", f"{tmp_path}/**/*", f"{tmp_path}/b/1.parquet"])
    assert [shard.name for shard in shards] == ["a/deep/x.pq.parquet", "a/notes.parquet", "b/1.parquet", "b/2.parquet"]
    assert [shard.index for shard in shards] == [0, 1, 2, 3]
    assert [shard.num_rows for shard in shards] == [1, 1, 1, 1]
    assert one_shard(tmp_path / "b/1.parquet").name == "1.parquet"


def test_a_file_counts_once_however_it_is_reached(tmp_path):
    write(tmp_path / "data/a.parquet", {"prompt": ["x"]})
    (tmp_path / "link").symlink_to(tmp_path / "data")
    assert len(find_shards([f"{tmp_path}/data/*", f"{tmp_path}/link/*", f"{tmp_path}/data/../data/a.parquet"])) == 1


@pytest.mark.parametrize(
    "pattern",
    [
        "data",
        "data/*/*.parquet",
        "data/**/*.parquet",
        "data/**",
        "**",
        "[d]ata/*",
        "data/*/a.parquet",
        "data/day=[12]/a.parquet",
    ],
)
def test_a_folder_that_cannot_be_listed_is_not_passed_over(pattern):
    with open_folder() as folder:
        for day in ("day=1", "day=2"):
            write(folder / "data" / day / "a.parquet", {"prompt": ["x"]})

        def as_another():
            os.chdir(folder)
            with pytest.raises(ConfigError, match=r"cannot list the folder \S*data/day=2/? for its data: Permission d"):
                find_shards([pattern])
            assert len(find_shards(["data/day=1", "data/day=[13]/*"])) == 1

        (folder / "data" / "day=2").chmod(0)
        assert as_user(as_another) == 0


def test_a_folder_beside_files_that_cannot_be_listed_is_named_in_the_warning(capfd):
    with open_folder() as folder:
        write(folder / "data" / "a.parquet", {"prompt": ["x"]})
        (folder / "data" / "closed").mkdir(mode=0)
        (folder / "data" / "empty").mkdir()
        assert as_user(lambda: find_shards([f"{folder}/data/*"])) == 0
        said = capfd.readouterr().err
        assert (
            f"these folders beside them, which are not read; name the folders too if they are meant: {folder}/data/c"
            in said
        )
        assert "empty" not in said


@pytest.mark.parametrize("pattern", ["data", "data/**", "data/**/*.parquet", "data/**/a/**/x.parquet"])
def test_links_that_lead_in_a_circle_end(tmp_path, pattern):
    path = write(tmp_path / "data" / "a" / "x.parquet", {"prompt": ["x"]})
    for link, target in {"here": ".", "also": "../data", "a/up": "..", "a/also": "../also/a"}.items():
        (tmp_path / "data" / link).symlink_to(target)
    assert [shard.path for shard in find_shards([f"{tmp_path}/{pattern}"])] == [str(path)]


def test_the_run_folder_is_not_input(tmp_path):
    write(tmp_path / "a.parquet", {"prompt": ["x"]})
    write(tmp_path / "run/outputs/a.parquet", {"prompt": ["x"]})
    shards = find_shards([f"{tmp_path}/**/*.parquet"], exclude=tmp_path / "run")
    assert [shard.name for shard in shards] == ["a.parquet"]


@pytest.fixture
def beside_a_run(tmp_path):
    """A folder with one file of data, and runs below it with files of their own."""
    write(tmp_path / "a.parquet", {"prompt": ["x"]})
    for run in ("runs/one", "runs/deep/two", "runs/[1]"):
        for name in ("outputs/a", "tokens/00000", "dataset/data/train"):
            write(tmp_path / run / f"{name}.parquet", {"prompt": ["x"]})
        for name in ("run.json", "job.toml"):
            (tmp_path / run / name).touch()
    return tmp_path


@pytest.mark.parametrize("pattern", ["", "**/*.parquet", "**/*t", "[!.]*/../**/*.parquet"])
def test_a_folder_and_two_stars_pass_over_run_folders(beside_a_run, capsys, pattern):
    write(beside_a_run / "b" / "b.parquet", {"prompt": ["x"]})
    (beside_a_run / "b" / "job.toml").touch()  # alone it makes no run folder
    shards = find_shards([str(beside_a_run / pattern)])
    assert [shard.name for shard in shards] == ["a.parquet", "b/b.parquet"]
    runs = beside_a_run / "runs"
    named = f"name one to read it, as in {runs}/[[]1]/outputs/*.parquet: {runs}/[1], {runs}/deep/two, {runs}/one\n"
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pattern", "num_files"),
    [
        ("runs/one/outputs/*.parquet", 1),
        ("runs/one/outputs", 1),
        ("runs/one/**/*.parquet", 3),
        ("runs/one", 3),
        ("runs/one/dataset", 1),
        ("runs/one/dataset/**/*.parquet", 1),
        ("runs/*/outputs/*.parquet", 2),
        ("runs/o*/outputs", 1),
        ("runs/deep/../one/outputs/**", 1),
        ("runs/[[]1]", 3),
        ("runs/[[]1]/**/*.parquet", 3),
    ],
)
def test_a_run_folder_that_is_named_is_input(beside_a_run, capsys, pattern, num_files):
    assert len(find_shards([f"{beside_a_run}/{pattern}"])) == num_files
    assert "passes over" not in capsys.readouterr().err


@pytest.mark.parametrize("pattern", ["runs", "runs/*", "runs/**/*.parquet"])
def test_where_there_are_only_run_folders_nothing_is_found_and_the_note_says_why(beside_a_run, capsys, pattern):
    with pytest.raises(ConfigError):
        find_shards([f"{beside_a_run}/{pattern}"])
    assert f"as in {beside_a_run}/runs/" in capsys.readouterr().err


def test_a_name_with_glob_characters_is_found_as_it_stands(tmp_path):
    path = write(tmp_path / "part[1]?.parquet", {"prompt": ["x"]})
    assert one_shard(path).num_rows == 1


@pytest.mark.parametrize(
    ("files", "pattern", "told"),
    [
        (["a.parquet"], "b*.parquet", "no file matches"),
        (["a.parquet"], "missing.parquet", "no file matches"),
        (["data/a"], "data", "data/*.parquet"),
        (["data.parquet/a"], "*.parquet", "data.parquet/*.parquet"),
        (["a", "a.parquet"], "*", "would share the output file a.parquet"),
        (["a", "a.parquet/b.parquet"], "**/*", "as file and folder"),
    ],
)
def test_patterns_that_cannot_work_are_refused(tmp_path, files, pattern, told):
    for name in files:
        write(tmp_path / name, {"prompt": ["x"]})
    with pytest.raises(ConfigError) as failure:
        find_shards([f"{tmp_path}/{pattern}"])
    assert told in str(failure.value)


def test_a_path_that_is_not_utf_8_is_refused_also_where_that_is_its_folder(tmp_path):
    write(tmp_path / "in" / "a.parquet", {"prompt": ["x"]})
    (tmp_path / "in").rename(tmp_path / "caf\udce9")
    with pytest.raises(ConfigError, match=r"caf\\udce9/a.parquet' is not valid UTF-8; rename the file or its folder"):
        find_shards([f"{tmp_path}/*/*.parquet"])


def test_the_footer_digest_follows_the_file(tmp_path):
    path = write(tmp_path / "a.parquet", {"prompt": ["x", "y"]})
    first = one_shard(path)
    assert one_shard(path) == first
    write(path, {"prompt": ["x", "a longer text"]})
    assert one_shard(path).footer not in ("", first.footer)


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


def test_a_shard_that_shrank_is_noticed(tmp_path):
    path = write(tmp_path / "a.parquet", {"prompt": ["x", "y"]})
    shard = one_shard(path)
    write(path, {"prompt": ["x"]})
    with pytest.raises(InputError, match="holds 1 rows, not the 2"):
        list(read_batches(shard, ["prompt"]))
    path.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        list(read_batches(shard, ["prompt"]))


# ---- reading and writing


def test_batches_hold_the_columns_asked_for_in_order(tmp_path):
    path = write(tmp_path / "a.parquet", {"a": range(10), "b": range(10), "a.b": range(10)}, row_group_size=4)
    batches = list(read_batches(one_shard(path), ["b", "a"], batch_rows=3))
    assert all(batch.schema.names == ["b", "a"] and batch.num_rows <= 3 for batch in batches)
    assert [value for batch in batches for value in batch["a"].to_pylist()] == list(range(10))
    assert sum(batch.num_rows for batch in read_batches(one_shard(path), [], batch_rows=3)) == 10


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
from batchinfer.data.shards import find_shards
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
    """As polars writes text; each batch of the file is cut by the bytes of its rows, not by those they share."""
    texts = [*(letter * 3_000_000 for letter in "abcdefghij"), "short", None, "k" * 20_000_000]
    column = shape(pa.array(["left out", *texts], pa.string_view()).slice(1))
    with pa.ipc.new_file(tmp_path / "a.arrow", pa.schema([("t", column.type)])) as file:
        file.write_batch(pa.record_batch({"t": column}))
    batches = list(read_batches(one_shard(tmp_path / "a.arrow"), ["t"]))
    assert {str(batch["t"].type) for batch in batches} == {str(shape(pa.array(["x"])).type)}
    assert [len(batch) for batch in batches] == [2, 2, 2, 2, 4, 1]
    assert pa.concat_arrays([batch["t"] for batch in batches]).equals(column.cast(batches[0]["t"].type))


# ---- id type and kept columns


def shards_of(tmp_path, *tables: dict) -> list[Shard]:
    for place, columns in enumerate(tables):
        write(tmp_path / f"{place}.parquet", columns)
    (tmp_path / "unreadable.parquet").write_bytes(b"PAR1")
    return find_shards([f"{tmp_path}/*.parquet"])


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([pa.array([1], pa.int8()), pa.array([2], pa.uint32())], pa.int64()),
        ([pa.array([1], pa.int64()), pa.array([None], pa.null())], pa.int64()),
        ([pa.array([1], pa.int64()), None], pa.int64()),
        ([pa.array([1], pa.int64()), pa.array(["a"])], pa.string()),
        ([pa.array([1], pa.uint64())], pa.string()),
        ([pa.array([1.0]), pa.array([2], pa.int32())], pa.int64()),
        ([pa.array([1.0]), pa.array([2], pa.uint64())], pa.string()),
        ([pa.array([1.0], pa.float32()), pa.array([2])], pa.string()),
        ([pa.array([1.0]), pa.array(["a"])], pa.string()),
        ([pa.array([1.0])], pa.string()),
        ([pa.array(["a"], pa.large_string())], pa.string()),
        ([None], pa.string()),
    ],
)
def test_ids_are_integers_only_when_every_shard_has_integers(tmp_path, ids, expected):
    tables = [{"prompt": ["x"]} if column is None else {"id": column} for column in ids]
    assert id_type(shards_of(tmp_path, *tables), "id") == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.int64(), pa.float64(), pa.float64()),
        (pa.null(), pa.string(), pa.string()),
        (pa.string(), pa.large_string(), pa.large_string()),
        (pa.dictionary(pa.int8(), pa.string()), pa.string(), pa.string()),
        (pa.list_(pa.int32()), pa.list_(pa.int64()), pa.list_(pa.int64())),
        (pa.timestamp("us"), pa.timestamp("us"), pa.timestamp("us")),
        (pa.int64(), pa.decimal128(5, 2), pa.decimal128(21, 2)),
        (pa.decimal128(5, 2), pa.uint32(), pa.decimal128(12, 2)),
        (pa.int64(), pa.decimal128(38, 30), pa.decimal256(49, 30)),
        (pa.int8(), pa.decimal128(38, 10), pa.decimal128(38, 10)),
        (pa.uint32(), pa.uint64(), pa.uint64()),
        (pa.json_(), pa.json_(), pa.json_()),
        (pa.json_(), pa.string(), pa.string()),
        (pa.list_(pa.string_view()), pa.list_(pa.string()), pa.list_(pa.string())),
        (pa.struct([("a", pa.string_view())]), pa.struct([("a", pa.string())]), pa.struct([("a", pa.string())])),
    ],
)
def test_kept_columns_get_one_type_that_holds_all(tmp_path, first, second, expected):
    tables = [{"task": pa.array([None], first)}, {"task": pa.array([None], second)}, {"other": [1]}]
    fields = kept_fields(shards_of(tmp_path, *tables), ["task"])
    assert fields == [pa.field("task", expected, nullable=True)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *((pa.string(), pa.int64()), (pa.binary(), pa.string()), (pa.uint64(), pa.int64()), (pa.bool_(), pa.int8())),
        *((pa.decimal128(5, 2), pa.float64()), (pa.int64(), pa.decimal256(76, 60)), (pa.json_(), pa.int64())),
        (pa.list_(pa.field("element", pa.string())), pa.list_(pa.field("element", pa.binary()))),
        (pa.struct([("a", pa.float32())]), pa.struct([("a", pa.decimal128(5, 2))])),
        (map_of(pa.float64()), map_of(pa.decimal128(5, 2))),
        (map_of(pa.string()), map_of(pa.binary())),
    ],
)
def test_kept_columns_of_types_that_do_not_go_together_are_refused(tmp_path, first, second):
    tables = [{"task": pa.array([None], first)}, {"task": pa.array([None], second)}]
    with pytest.raises(ConfigError) as failure:
        kept_fields(shards_of(tmp_path, *tables), ["task"])
    for part in ("'task'", str(first), str(second), "0.parquet", "1.parquet"):
        assert part in str(failure.value)


EXTREMES = {
    pa.int8(): [-128, 127],
    pa.int64(): [-(1 << 63), (1 << 63) - 1],
    pa.uint32(): [0, (1 << 32) - 1],
    pa.uint64(): [0, (1 << 64) - 1],
    pa.float32(): [0.1, 2.0**100],
    pa.float64(): [0.1, 2.0**1000],
    pa.decimal128(5, 2): [Decimal("-999.99"), Decimal("0.01")],
    pa.decimal128(38, 37): [Decimal("9." + "9" * 37), None],
    pa.string(): ["text", ""],
    pa.binary(): [b"bytes", None],
    pa.date32(): [datetime.date(1900, 1, 1), datetime.date(2100, 1, 1)],
    pa.timestamp("s"): [datetime.datetime(1, 1, 1), datetime.datetime(9999, 1, 1)],
    pa.timestamp("ns"): [datetime.datetime(1970, 1, 1), None],
}


@pytest.mark.parametrize("kind", [*EXTREMES, pa.json_()], ids=str)
def test_a_kept_value_is_the_same_in_the_outputs_or_refused(tmp_path, kind):
    tables = {kind: pa.array(values, kind) for kind, values in EXTREMES.items()}
    tables[pa.json_()] = pa.array(['{"a": 1}', None]).cast(pa.json_())
    num_kept = 0
    for other in tables.values():
        shards = shards_of(tmp_path, {"task": tables[kind]}, {"task": other})
        for shard in shards[:2]:
            (batch,) = read_batches(shard, ["task"])
            with suppress(ConfigError):
                found = conformed(batch, kept_fields(shards, ["task"]), shard)["task"]
                assert found.to_pylist() == batch["task"].to_pylist()
                num_kept += 1
    assert num_kept >= 2  # at least beside its like


def test_integers_that_a_double_does_not_hold_are_refused_by_their_value(tmp_path):
    shards = shards_of(tmp_path, {"task": [1, 1 << 53]}, {"task": [1.0, None]}, {"task": [1, (1 << 53) + 1]})
    fields = kept_fields(shards, ["task"])
    fits, _, too_large = [next(read_batches(shard, ["task"])) for shard in shards[:3]]
    assert conformed(fits, fields, shards[0])["task"].to_pylist() == [1.0, 2.0**53]
    with pytest.raises(ConfigError, match=r"is int64 in .*2\.parquet and double in outputs.* 9007199254740993 "):
        conformed(too_large, fields, shards[2])


@pytest.mark.parametrize(
    "column",
    [
        pa.array([[("a", "b")]], pa.map_(pa.string_view(), pa.string_view())),
        pa.array([[]], pa.struct([])),
        pa.array([Decimal(1200)], pa.decimal128(5, -2)),
    ],
    ids=lambda column: str(column.type),
)
def test_kept_columns_of_types_that_cannot_be_copied_are_refused(tmp_path, column):
    with pa.ipc.new_file(tmp_path / "a.arrow", pa.schema([("task", column.type)])) as file:
        file.write_table(pa.table({"task": column}))
    with pytest.raises(ConfigError, match=r"names 'task', which is .*, a type .* in .*a\.arrow; convert it"):
        kept_fields(find_shards([f"{tmp_path}/a.arrow"]), ["task"])


@pytest.mark.parametrize(("name", "told"), [("nowhere", "no shard has"), ("text", "outputs have already")])
def test_kept_columns_that_cannot_be_kept_are_refused(tmp_path, name, told):
    with pytest.raises(ConfigError, match=told):
        kept_fields(shards_of(tmp_path, {"text": ["x"]}), [name])


# ---- rows: prompts


def test_good_prompts_become_tokens(tmp_path, tokenizer):
    found, rows = check(tmp_path, {"id": ["a", None], "prompt": ["hello", "two words"]})
    assert [row["token_ids"] for row in rows] == tokenizer.encode_prompts(["hello", "two words"])
    assert [row["id"] for row in rows] == ["a", None]
    assert {(row["n"], row["max_tokens"], row["sampling"], row["error"]) for row in rows} == {(2, 16, None, None)}
    assert (found.num_bad, found.num_capped, found.first_error, found.id_missing) == (0, 0, None, False)


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int16(), pa.string()),
        pa.dictionary(pa.int8(), pa.large_string()),
    ],
)
def test_every_kind_of_text_column_is_accepted(tmp_path, kind):
    plain = pa.array(["hello", None, "hello"])
    column = plain.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else plain.cast(kind)
    _, rows = check(tmp_path, {"id": column, "prompt": column})
    assert [row["error"] for row in rows] == [None, "prompt is null", None]
    assert [row["id"] for row in rows] == ["hello", None, "hello"]


def invalid_utf8() -> pa.Array:
    """["a", b"\\xff\\xfe" as text]: Parquet writers do not always check."""
    offsets = pa.array([0, 1, 3], pa.int32()).buffers()[1]
    return pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a\xff\xfe")])


def test_bad_prompts_are_rows_with_a_sentence(tmp_path, tokenizer):
    prompts = ["good", None, "", "far too long " * 9000, "long " * 2100, "good"]
    found, rows = check(tmp_path, {"id": range(6), "prompt": prompts})
    errors = [row["error"] for row in rows]
    assert errors[:3] == [None, "prompt is null", "prompt is empty"]
    assert errors[3] == "the prompt has 117000 characters, more than fit into 2048 tokens"
    num_tokens = len(tokenizer.encode_prompts([prompts[4]])[0])
    assert errors[4] == f"the prompt has {num_tokens} tokens, no room for a new one in the window of 2048"
    assert errors[5] is None
    assert found.first_error == "row 1: prompt is null"


def test_text_that_is_not_utf8_is_a_bad_row(tmp_path):
    _, rows = check(tmp_path, {"id": invalid_utf8(), "prompt": invalid_utf8()})
    assert [row["error"] for row in rows] == [None, "prompt is not valid UTF-8"]
    assert [row["id"] for row in rows] == ["a", "\ufffd\ufffd"]


def test_a_prompt_of_no_tokens_is_a_bad_row(tmp_path):
    folder = copy_with(
        tmp_path, {"post_processor": None, "normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}
    )
    job = make_job().model_copy(update={"model": ModelPart(path=str(folder))})
    _, rows = check(tmp_path, {"id": [1], "prompt": [" "]}, job)
    assert rows[0]["error"] == "the prompt has no tokens"


def test_max_tokens_is_cut_to_the_window(tmp_path, tokenizer):
    length = len(tokenizer.encode_prompts(["hello"])[0])
    limits = [PromptLimits(length + extra, 1024) for extra in (0, 1, 15, 16)]
    results = [check(tmp_path, {"id": [1], "prompt": ["hello"]}, limits=limit) for limit in limits]
    assert [rows[0]["max_tokens"] for _, rows in results] == [0, 1, 15, 16]
    assert [found.num_capped for found, _ in results] == [0, 1, 1, 0]
    assert results[0][1][0]["error"] is not None


def test_many_rows_keep_their_order(tmp_path, tokenizer):
    prompts = [f"row {row}" if row % 7 else None for row in range(5000)]
    found, rows = check(tmp_path, {"id": range(5000), "prompt": prompts})
    assert [row["id"] for row in rows] == [str(row) for row in range(5000)]
    good = [row for row in range(5000) if row % 7]
    assert [rows[row]["token_ids"] for row in good] == tokenizer.encode_prompts([prompts[row] for row in good])
    assert found.num_bad == 5000 - len(good)


def test_an_empty_shard_gives_an_empty_table(tmp_path):
    found, rows = check(tmp_path, {"id": pa.array([], pa.string()), "prompt": pa.array([], pa.string())})
    assert (rows, found.num_rows) == ([], 0)


# ---- rows: columns of the wrong type


@pytest.mark.parametrize(
    ("columns", "job", "told"),
    [
        ({"id": [1, 2], "prompt": [1, 2]}, {"prompt": "prompt"}, "column 'prompt' is int64, but must be text"),
        ({"id": [1, 2], "prompt": [b"a", b"b"]}, {"prompt": "prompt"}, "column 'prompt' is binary, but must be text"),
        ({"id": [1, 2]}, {"prompt": "prompt"}, "the shard has no column 'prompt'"),
        ({"other": [1, 2]}, {"prompt": "prompt"}, "the shard has no column 'prompt'"),
        ({"id": [1.5, 2], "prompt": ["a", "b"]}, {"prompt": "prompt"}, "column 'id' is double, but must be text or"),
        ({"id": [[1], [2]], "prompt": ["a", "b"]}, {"prompt": "prompt"}, "column 'id' is list"),
        ({"id": [1, 2], "m": ['[{"role": "user"}]'] * 2}, {"messages": "m"}, "content in message 0"),
        ({"id": [1, 2], "m": [[{"role": "user"}]] * 2}, {"messages": "m"}, "a list of structs"),
        ({"id": [1, 2], "m": [[{"role": "user", "content": [1]}]] * 2}, {"messages": "m"}, "a list of parts"),
        ({"id": [1, 2], "t": [[1.0], [2.0]]}, {"token_ids": "t"}, "column 't' is list<"),
        ({"id": [1, 2], "t": [1, 2]}, {"token_ids": "t"}, "must be a list of integers"),
        ({"id": [1, 2], "p": ["a", "b"], "s": [1, 2]}, {"prompt": "p", "sampling": "s"}, "must be a struct"),
        ({"id": [1, 2], "p": ["a", "b"]}, {"prompt": "p", "sampling": "s"}, "the shard has no column 's'"),
    ],
)
def test_a_wrong_column_makes_each_of_its_rows_bad(tmp_path, columns, job, told):
    _, rows = check(tmp_path, columns, make_job(**job))
    assert len(rows) == 2
    assert all(told in row["error"] and row["n"] == 2 for row in rows)


def test_a_column_that_stands_twice_makes_each_row_bad(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "twice.parquet")
    shard = one_shard(tmp_path / "twice.parquet")
    found = tokenize(shard, tmp_path / "t.parquet", make_job())
    assert found.first_error == "row 0: the shard has more than one column 'prompt'"


def test_a_missing_id_column_gives_null_ids(tmp_path):
    found, rows = check(tmp_path, {"prompt": ["a", "b"]})
    assert found.id_missing
    assert [(row["id"], row["error"]) for row in rows] == [(None, None)] * 2


@pytest.mark.parametrize(
    "kind", [pa.int8(), pa.uint16(), pa.int64(), pa.uint64(), pa.dictionary(pa.int8(), pa.int32())]
)
def test_integer_ids_become_text(tmp_path, kind):
    plain = pa.array([7, None, 9], pa.int32())
    column = plain.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else plain.cast(kind)
    _, rows = check(tmp_path, {"id": column, "prompt": ["a", "b", "c"]})
    assert [row["id"] for row in rows] == ["7", None, "9"]


# ---- rows: messages


def test_bad_messages_are_rows_with_a_sentence(tmp_path, tokenizer):
    hello = {"role": "user", "content": "hello"}
    expected = [
        ([hello], None),
        (None, "m is null"),
        ([], "m is an empty list"),
        ([None], "m has a null in place of message 0"),
        ([hello, {"role": None, "content": "x"}], "m has no role in message 1"),
        ([{"role": "user", "content": None}], "m has no content in message 0"),
        ([{"role": "narrator", "content": "x"}], "the chat template refuses the messages: there is no role narrator"),
        ([{"role": "user", "content": ""}], None),
    ]
    chats = pa.array([chat for chat, _ in expected], pa.list_(MESSAGE))
    _, rows = check(tmp_path, {"id": range(8), "m": chats}, make_job(messages="m"))
    assert [row["error"] for row in rows] == [error for _, error in expected]
    assert rows[0]["token_ids"] == tokenizer.encode_chats([[hello]])[0]


def test_chats_of_the_json_type_are_read_as_their_text(tmp_path):
    """Parquet's JSON, as DuckDB writes it: Arrow makes an extension type of it."""
    chats = [*(json.dumps([{"role": "user", "content": text}]) for text in ("one", "two")), None, "{"]
    overrides = ['{"max_tokens": 3}', None, None, None]
    kinds = {"text": pa.string(), "json": pa.json_(), "large": pa.json_(pa.large_string())}
    found = {}
    for name, kind in kinds.items():
        columns = {"id": range(4), "m": pa.array(chats).cast(kind), "s": pa.array(overrides).cast(kind)}
        found[name] = check(tmp_path, columns, make_job(messages="m", sampling="s"))[1]
    assert found["json"] == found["large"] == found["text"]
    assert [row["error"] is None for row in found["text"]] == [True, True, False, False]


def test_messages_that_are_not_utf8_are_bad_rows(tmp_path):
    texts = invalid_utf8()
    messages = pa.StructArray.from_arrays([pa.array(["user", "user"]), texts], names=["role", "content"])
    chats = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), messages)
    _, rows = check(tmp_path, {"id": [1, 2], "m": chats}, make_job(messages="m"))
    assert [row["error"] for row in rows] == [None, "m is not valid UTF-8"]


@pytest.mark.parametrize("kind", [pa.large_list(MESSAGE), pa.list_(MESSAGE, 1)])
def test_every_kind_of_message_list_is_accepted(tmp_path, kind):
    chats = pa.array([[{"role": "user", "content": "hello"}]] * 2, kind)
    _, rows = check(tmp_path, {"id": [1, 2], "m": chats}, make_job(messages="m"))
    assert [row["error"] for row in rows] == [None, None]


def test_an_assistant_that_called_a_tool_needs_no_content(tmp_path):
    message = pa.struct([*MESSAGE, ("tool_calls", pa.list_(pa.string()))])
    chats = pa.array([[{"role": "assistant", "content": None, "tool_calls": ["f"]}]], pa.list_(message))
    _, rows = check(tmp_path, {"id": [1], "m": chats}, make_job(messages="m"))
    # it is passed on; that this template wants content is the template's word
    assert rows[0]["error"].startswith("the chat template fails on the messages")


# ---- rows: token ids


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int64()), pa.list_(pa.int16()), pa.large_list(pa.int32()), pa.list_(pa.uint64())]
)
def test_token_ids_are_checked_against_the_vocabulary(tmp_path, kind):
    expected = [
        ([1, 2, 1023], None),
        (None, "t is null"),
        ([], "the prompt has no tokens"),
        ([5, None, 2000], "a token id is null"),
        ([5, 1024, 2000], "a token id is 1024, which is not in [0, 1024)"),
        ([7] * 2048, "the prompt has 2048 tokens, no room for a new one in the window of 2048"),
        ([7] * 2047, None),
    ]
    lists = pa.array([ids for ids, _ in expected], kind)
    found, rows = check(tmp_path, {"id": range(7), "t": lists}, make_job(token_ids="t"))
    assert [row["error"] for row in rows] == [error for _, error in expected]
    assert rows[0]["token_ids"] == [1, 2, 1023]
    assert (rows[6]["max_tokens"], found.num_capped) == (1, 1)


def test_negative_and_huge_token_ids_are_bad(tmp_path):
    signed, unsigned = pa.array([[-1], [3]], pa.list_(pa.int32())), pa.array([[2**64 - 1], [3]], pa.list_(pa.uint64()))
    for lists, shown in ((signed, "-1"), (unsigned, str(2**64 - 1))):
        _, rows = check(tmp_path, {"id": [1, 2], "t": lists}, make_job(token_ids="t"))
        assert [row["error"] for row in rows] == [f"a token id is {shown}, which is not in [0, 1024)", None]


def test_text_whose_tokens_the_model_does_not_have_is_bad(tmp_path):
    limits = PromptLimits(window=2048, vocab_size=300)
    _, rows = check(tmp_path, {"id": [1], "prompt": ["kitchen"]}, limits=limits)
    assert "which is not in [0, 300)" in rows[0]["error"]


# ---- rows: sampling


def test_a_row_overrides_the_jobs_sampling(tmp_path):
    overrides = [None, {}, {"n": 3, "seed": 7}, {"max_tokens": 5, "stop": ["x"]}, {"max_tokens": 16, "n": 2}]
    columns = {"id": range(5), "prompt": ["hello"] * 5, "s": overrides}
    _, rows = check(tmp_path, columns, make_job({"temperature": 0.5}, prompt="prompt", sampling="s"))
    assert [row["error"] for row in rows] == [None] * 5
    assert [row["n"] for row in rows] == [2, 2, 3, 2, 2]
    assert [row["max_tokens"] for row in rows] == [16, 16, 16, 5, 16]
    # what equals the job's own needs no text
    assert [row["sampling"] is None for row in rows] == [True, True, False, False, True]
    third, fourth = (sampling_from_json(rows[row]["sampling"]) for row in (2, 3))
    assert (third.seed, third.temperature, third.max_tokens) == (7, 0.5, 16)
    assert (fourth.stop, fourth.n) == (("x",), 2)
    assert json.loads(rows[2]["sampling"])["seed"] == 7


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ({"temprature": 0.5}, "s.temprature is not a sampling key"),
        ({"temperature": -0.5}, "s.temperature is -0.5, but"),
        ({"temperature": float("nan")}, "s.temperature is nan, but"),
        ({"max_tokens": -1}, "s.max_tokens is -1, but"),
        ({"max_tokens": 0}, "s.max_tokens is 0, but nothing is scored"),
        ({"max_tokens": 2.0}, "s.max_tokens is 2.0, but"),
        ({"n": "3"}, "s.n is '3', but"),
        ({"ignore_eos": 1}, "s.ignore_eos is 1, but"),
        ({"stop": 5}, "s.stop is 5, but"),
        ({"stop": ["x", None]}, "s.stop.1 is None, but"),
        ({"stop_token_ids": [-1]}, "s.stop_token_ids.0 is -1, but"),
        ({"top_p": b"1"}, "s.top_p is b'1', but"),
    ],
)
def test_an_override_that_cannot_be_is_a_bad_row(tmp_path, override, told):
    columns = {"id": [1, 2, 3], "prompt": ["hello"] * 3, "s": [None, override, dict.fromkeys(override)]}
    found, rows = check(tmp_path, columns, make_job(prompt="prompt", sampling="s"))
    assert [row["error"] is None for row in rows] == [True, False, True]
    assert told in rows[1]["error"]
    assert rows[1]["n"] == 2
    assert found.first_error.startswith("row 1: s.")


def test_a_bad_row_is_as_many_output_rows_as_it_asks_for(tmp_path):
    overrides = [{"n": 3}, {"n": 3, "temperature": -0.5}, {"n": 0}, {"temperature": -0.5}, {"n": 5}, None]
    columns = {"id": range(6), "prompt": ["", "hello", "hello", "hello", "hello", None], "s": overrides}
    _, rows = check(tmp_path, columns, make_job(prompt="prompt", sampling="s"))
    assert [row["error"] is None for row in rows] == [False] * 4 + [True, False]
    assert [row["n"] for row in rows] == [3, 3, 2, 2, 5, 2]


def test_rows_of_a_shard_with_a_wrong_column_are_as_many_as_they_ask_for(tmp_path):
    columns = {"id": [1, 2, 3], "prompt": [1, 2, 3], "s": [{"n": 3}, None, {"n": 1}]}
    _, rows = check(tmp_path, columns, make_job(prompt="prompt", sampling="s"))
    assert [row["n"] for row in rows] == [3, 2, 1]
    assert all("column 'prompt' is int64" in row["error"] for row in rows)


def test_many_different_overrides_are_all_resolved(tmp_path):
    columns = {"id": range(3000), "prompt": ["hello"] * 3000, "s": [{"seed": row} for row in range(3000)]}
    _, rows = check(tmp_path, columns, make_job(prompt="prompt", sampling="s"))
    assert [json.loads(row["sampling"])["seed"] if row["sampling"] else 0 for row in rows] == list(range(3000))


# ---- the sample


def test_the_sample_prompts_have_what_they_promise(tmp_path):
    shards = find_shards([str(SAMPLE / "prompts" / "*.parquet")])
    bad, prompts, ids = 0, [], []
    for shard in shards:
        job = make_job(messages="messages")
        bad += tokenize(shard, tmp_path / shard.name, job).num_bad
        for row in pq.read_table(tmp_path / shard.name).to_pylist():
            ids.append(row["id"])
            prompts += [tuple(row["token_ids"])] if row["error"] is None else []
    assert (len(shards), len(ids), bad) == (4, 324, 6)
    assert len(prompts) - len(set(prompts)) >= 12
    assert ids.count(None) == 1
    assert len(set(ids)) == len(ids) - 1
    assert [field.name for field in kept_fields(shards, ["task"])] == ["task"]


def test_a_small_table_can_be_read_while_it_is_replaced(tmp_path):
    schema, path, ended = pa.schema([("text", pa.string())]), tmp_path / "table.parquet", threading.Event()

    def replace(length: int) -> None:
        with table_writer(path, schema) as writer:
            writer.write_table(pa.table({"text": ["x" * length]}))

    def keep_replacing() -> None:
        while not ended.is_set():
            for length in range(200):
                replace(length)

    replace(0)
    writer = threading.Thread(target=keep_replacing)
    writer.start()
    try:
        for _ in range(500):
            assert set(read_rows(path)[0]["text"]) <= {"x"}
    finally:
        ended.set()
        writer.join()
