"""Inputs of every format: the same rows give the same outputs, a changed file is noticed, memory stays small."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import feather

from batchinfer.config import DEFAULT_S3
from batchinfer.data.formats.names import format_of, output_name
from batchinfer.data.inputs import read_batches
from batchinfer.data.kept_fields import kept_fields
from batchinfer.data.shard_schemas import shard_schema
from batchinfer.data.shards import find_shards, refuse_changed
from batchinfer.records import ConfigError, InputError, RunMismatchError
from batchinfer.run.fingerprint import settings_fingerprint
from support.checked_rows import checked, make_job
from support.formats import FORMATS, ROWS, as_arrow, as_zstd, csv_text, json_lines
from support.jobs import batchinfer, output_bytes, outputs, write_job

KEPT = ["number", "share", "is_odd", "code"]


# ---- the same rows


@pytest.fixture(scope="module")
def from_parquet(tmp_path_factory):
    """(rows of tokens, kept columns) of ROWS from Parquet."""
    return read_rows_as("in.parquet", tmp_path_factory.mktemp("parquet"))


def read_rows_as(name: str, folder: Path):
    FORMATS[name](ROWS, folder / name)
    job = make_job(folder / name, keep=KEPT, prompt="prompt")
    shard, tokens = checked(folder / name, job)
    fields = kept_fields([shard], KEPT)
    kept = pa.Table.from_batches([batch.select(KEPT) for batch in read_batches(shard, KEPT)])
    return tokens, fields, kept.to_pylist()


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "in.parquet"])
def test_every_format_gives_the_same_rows_and_kept_columns(tmp_path, from_parquet, name):
    assert read_rows_as(name, tmp_path) == from_parquet


@pytest.mark.parametrize(
    ("names", "num_rows"),
    [
        (("in.parquet", "in.jsonl.gz", "in.csv", "in.stream.arrow"), 40),
        pytest.param(tuple(FORMATS), len(ROWS), marks=pytest.mark.slow),
    ],
)
def test_every_format_gives_the_same_outputs_to_the_byte(tmp_path, names, num_rows):
    found = {}
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        FORMATS[name](ROWS[:num_rows], folder / name)
        parts = {"input": {"files": [name]}, "output": {"keep_columns": KEPT}, "sampling": {"max_tokens": 2}}
        ended = batchinfer("run", write_job(folder, **parts))
        assert ended.code == 0, ended.err
        (data,) = output_bytes(folder / "run").values()
        found[name] = data
        assert list(outputs(folder / "run")) == [output_name(name)]
    assert len(set(found.values())) == 1


@pytest.mark.parametrize(
    ("name", "wanted", "expected"),
    [
        ("a.parquet", None, ("parquet", "a.parquet")),
        ("a.pq", None, ("parquet", "a.pq.parquet")),
        ("a", None, ("parquet", "a.parquet")),
        ("a.jsonl", None, ("jsonl", "a.parquet")),
        ("a.ndjson", None, ("jsonl", "a.parquet")),
        ("a.ndjson.gz", None, ("jsonl", "a.parquet")),
        ("a.b.jsonl.zst", None, ("jsonl", "a.b.parquet")),
        ("a.jsonl", "sharegpt", ("jsonl", "a.parquet")),
        ("a.tsv.gz", None, ("csv", "a.parquet")),
        ("a.feather", None, ("arrow", "a.parquet")),
        ("a.txt", "jsonl", ("jsonl", "a.txt.parquet")),
        ("a.jsonl", "csv", ("csv", "a.parquet")),
        ("s3://bucket/a.csv", None, ("csv", "s3://bucket/a.parquet")),
    ],
)
def test_the_format_is_what_the_job_says_or_the_extension(name, wanted, expected):
    assert (format_of(name, wanted), output_name(name)) == expected


def test_two_files_of_one_stem_are_refused(tmp_path):
    FORMATS["in.jsonl"](ROWS[:1], tmp_path / "in.jsonl")
    FORMATS["in.csv"](ROWS[:1], tmp_path / "in.csv")
    with pytest.raises(ConfigError, match=r"in\.csv and .*in\.jsonl would share the output file in\.parquet"):
        find_shards([f"{tmp_path}/*"])


def test_an_unset_format_is_the_job_that_parquet_was():
    assert settings_fingerprint(make_job("a"))["input columns"]["format"] == "parquet"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (
            "a.json",
            b'{"prompt": "x"}\n{"prompt": "y"}',
            'looks like JSON lines: set input.format = "jsonl", or name it',
        ),
        ("a.txt", b'\xef\xbb\xbf{"prompt": "x"}', 'looks like JSON lines: set input.format = "jsonl"'),
        ("a.json", b'{"prompt": "' + b"x" * 100_000, 'looks like JSON lines: set input.format = "jsonl"'),
        ("a.json", b'[{"prompt": "x"}]', "looks like one JSON array: write each of its items on a line of its own"),
        ("a.txt", b'id,prompt\n1,"Hello, there"\n', 'looks like CSV: set input.format = "csv"'),
        ("a.bin", b"ARROW1\0\0", 'looks like Arrow IPC: set input.format = "arrow"'),
        ("a.jsonx", b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", "is a pointer of Git LFS"),
        ("a.json", b'{\n  "prompt": "x"\n}', None),
        ("a.txt", b"Dear reader, hello\n", None),
        ("a.txt", b"\xff\xfe,a", None),
        ("a.txt", b"\n", None),
    ],
)
def test_a_file_that_is_not_parquet_tells_what_it_looks_like(tmp_path, name, content, told):
    (tmp_path / name).write_bytes(content)
    (shard,) = find_shards([str(tmp_path / name)])
    wrong = "it is not a Parquet file"
    assert shard.problem.startswith(f"{wrong}; for another format set" if told is None else f"{wrong}; it {told}")


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("in.jsonl", '{"prompt": "x"}\n'.encode("utf-16"), "it is UTF-16 text"),
        ("in.jsonl.gz", gzip.compress(json_lines(ROWS), mtime=0)[:-500], "Truncated compressed stream"),
        ("in.jsonl.gz", json_lines(ROWS), "zlib inflate failed"),
        ("in.jsonl.zst", as_zstd(json_lines(ROWS))[:-500], ""),
        ("in.csv", b"", "it has no header"),
        ("in.csv", b"a,b,a\n1,2,3\n", "its header names 'a' more than once"),
        ("in.csv", b"a,\xff\n1,2\n", "its header is not valid UTF-8"),
        ("in.csv", b'a,"b"c\n1,2\n', "its header is not valid CSV"),
        ("in.csv", b"prompt,b\rx,2\r", "end lines with line feeds"),
        ("in.csv", gzip.compress(b"prompt,b\nx,2\n", mtime=0), "its content is compressed; let its name end with .gz"),
        ("in.jsonl", as_zstd(json_lines(ROWS)), "its content is compressed; let its name end with .zst"),
        ("in.arrow", b"", "it is empty"),
        ("in.arrow", b"hello", ""),
        ("in.arrow", b"ARROW1\0\0" + b"x" * 100, ""),
        ("in.feather", b"FEA1" + b"x" * 100, "it is Feather of version 1"),
    ],
)
def test_a_file_that_is_none_of_its_format_is_a_problem(tmp_path, name, data, told):
    (tmp_path / name).write_bytes(data)
    (shard,) = find_shards([str(tmp_path / name)])
    assert shard.problem is not None
    assert told in shard.problem


# ---- Arrow


def test_dictionaries_and_views_of_arrow_are_resolved(tmp_path):
    columns = {
        "prompt": pa.array(["a", "b", "a"]).dictionary_encode(),
        "view": pa.array(["x", None, "y"], pa.string_view()),
    }
    feather.write_feather(pa.table(columns), str(tmp_path / "in.feather"))
    job = make_job(tmp_path / "in.feather", keep=["view"], prompt="prompt")
    shard, rows = checked(tmp_path / "in.feather", job)
    assert [row["error"] for row in rows] == [None] * 3
    assert rows[0]["token_ids"] == rows[2]["token_ids"]
    assert kept_fields([shard], ["view"]) == [pa.field("view", pa.string())]


def test_a_large_batch_of_arrow_is_read_in_slices(tmp_path):
    table = pa.table({"prompt": ["x" * 100_000] * 400})
    with pa.ipc.new_file(str(tmp_path / "in.arrow"), table.schema) as writer:
        writer.write_table(table)
    (shard,) = find_shards([str(tmp_path / "in.arrow")])
    batches = list(read_batches(shard, ["prompt"]))
    assert sum(map(len, batches)) == 400
    assert max(batch["prompt"].slice(0).nbytes for batch in batches) < 9_000_000


@pytest.mark.parametrize("seed", range(30))
def test_a_damaged_arrow_file_never_crashes(tmp_path, seed):
    as_arrow(ROWS[:50], tmp_path / "in.arrow")
    data = bytearray((tmp_path / "in.arrow").read_bytes())
    for place in range(8 + seed * 7, len(data), 211):
        data[place] ^= 0xFF
    (tmp_path / "in.arrow").write_bytes(data)
    (shard,) = find_shards([str(tmp_path / "in.arrow")])
    if shard.problem is None:
        try:
            list(read_batches(shard, [name for name in shard_schema(shard).names if name == "prompt"]))
        except InputError as error:
            assert "in.arrow" in str(error)  # noqa: PT017  (either outcome is right)


def test_a_kept_type_that_parquet_has_not_is_refused(tmp_path):
    columns = {"x": pa.array([(1, 2, 3)], pa.month_day_nano_interval())}
    feather.write_feather(pa.table(columns), str(tmp_path / "in.feather"))
    with pytest.raises(ConfigError, match="'x', which is month_day_nano_interval, a type that Parquet has not"):
        kept_fields(find_shards([str(tmp_path / "in.feather")]), ["x"])


# ---- folders that name values


@pytest.mark.parametrize("name", ["in.parquet", "in.jsonl", "in.arrow"])
def test_folders_that_name_a_value_give_every_row_a_column(tmp_path, name):
    path = tmp_path / "lang=pt%2DBR" / "number=7" / "x=__HIVE_DEFAULT_PARTITION__" / name
    path.parent.mkdir(parents=True)
    FORMATS[name](ROWS[:8], path)
    (shard,) = find_shards([str(tmp_path)], roles={"number": "kept", "prompt": "text"})
    fields = kept_fields([shard], ["lang", "number", "x"])
    assert fields == [pa.field("lang", pa.string()), pa.field("number", pa.int64()), pa.field("x", pa.string())]
    (batch,) = read_batches(shard, ["number", "lang", "x", "prompt"])
    assert batch["lang"].to_pylist() == ["pt-BR"] * 8
    assert batch["number"].to_pylist() == [row["number"] for row in ROWS[:8]]  # the file's own
    assert batch["x"].null_count == 8
    assert sum(map(len, read_batches(shard, ["lang"]))) == 8
    assert checked(path, make_job(path, keep=["lang"], prompt="prompt"))[1][3]["error"] is None


# ---- identity


@pytest.mark.parametrize("name", ["in.jsonl", "in.csv.zst", "in.feather"])
def test_a_changed_file_is_noticed_and_one_that_was_only_touched_is_not(tmp_path, name):
    path = tmp_path / name
    FORMATS[name](ROWS[:50], path)
    shards = find_shards([str(path)], roles={"prompt": "text"})
    path.touch()
    refuse_changed(shards, DEFAULT_S3)
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
    with pytest.raises(RunMismatchError, match="changed after it was planned"):
        refuse_changed(shards, DEFAULT_S3)
    path.unlink()
    with pytest.raises(InputError, match="does not exist"):
        refuse_changed(shards, DEFAULT_S3)


def test_lines_that_change_while_a_job_is_planned_stop_it(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(json_lines([{"prompt": "x"}] * 3))
    (shard,) = find_shards([str(tmp_path / "in.jsonl")], roles={"prompt": "text"})
    (tmp_path / "in.jsonl").write_bytes(json_lines([{"prompt": "y"}] * 3))
    with pytest.raises(RunMismatchError, match="changed after it was planned"):
        list(read_batches(shard, ["prompt"]))


def test_a_run_refuses_other_lines_and_goes_on_with_its_own(tmp_path):
    content = json_lines([{"prompt": "What?", "n": row} for row in range(5)]) + b"{\n"
    (tmp_path / "prompts.jsonl").write_bytes(content)
    parts = {"input": {"files": ["*.jsonl"]}, "output": {"keep_columns": ["n"]}, "sampling": {"max_tokens": 2}}
    job = write_job(tmp_path, **parts)
    assert batchinfer("plan", job).code == 0
    with open(tmp_path / "prompts.jsonl", "ab") as file:
        file.write(b'{"prompt": "What?"}')
    assert "changed after it was planned" in batchinfer("work", tmp_path / "run").err
    (tmp_path / "prompts.jsonl").write_bytes(content)
    assert batchinfer("run", job).code == 3
    rows = outputs(tmp_path / "run")["prompts.parquet"]
    assert [row["n"] for row in rows] == [0, 1, 2, 3, 4, None]
    assert rows[5]["error"].startswith("line 6 is not valid JSON")
    with open(tmp_path / "prompts.jsonl", "ab") as file:
        file.write(b'{"prompt": "What?"}')
    assert (
        f"belongs to another job: {tmp_path}/prompts.jsonl among its input shards has another content"
        in batchinfer("run", job).err
    )


# ---- memory


READER = """
import re, sys
from pathlib import Path
from batchinfer.data.inputs import read_batches
from batchinfer.data.shards import find_shards
def peak_kb():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak_kb()
(shard,) = find_shards([sys.argv[1]], roles={"prompt": "text", "id": "id", "tags": "kept"})
assert sum(len(batch) for batch in read_batches(shard, ["prompt", "id", "tags"])) == shard.num_rows == int(sys.argv[2])
print(peak_kb() - before)
"""


LARGE = pytest.mark.slow  # the other formats go through the same reader


@pytest.mark.parametrize(
    "name", [pytest.param("in.jsonl", marks=LARGE), "in.jsonl.gz", pytest.param("in.csv", marks=LARGE)]
)
def test_lines_are_read_in_bounded_memory(tmp_path, name):
    rows = [{"id": row, "prompt": f"{row} all work and no play " * 40, "tags": "a"} for row in range(1000)]
    first = csv_text(rows) if name == "in.csv" else json_lines(rows)
    head, body = (first.split(b"\n", 1)) if name == "in.csv" else (b"", first)
    opened = gzip.open(tmp_path / name, "wb", compresslevel=1) if name.endswith("gz") else open(tmp_path / name, "wb")  # noqa: SIM115
    with opened as file:
        file.write(head + b"\n" * bool(head))
        for _ in range(100):
            file.write(body)
    program = [sys.executable, "-c", READER, str(tmp_path / name), "100000"]
    grown_kb = int(subprocess.run(program, capture_output=True, text=True, check=True).stdout)
    assert grown_kb < 150_000
