"""Inputs of every format: the same rows give the same outputs, bad lines are rows, memory stays small."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from batchinfer.config import DEFAULT_S3
from batchinfer.data.formats import jsonl, lines
from batchinfer.data.formats.names import format_of, output_name
from batchinfer.data.formats.values import column_roles
from batchinfer.data.inputs import read_batches, shard_schema
from batchinfer.data.kept_fields import kept_fields
from batchinfer.data.shards import find_shards, refuse_changed
from batchinfer.records import ConfigError, InputError, RunMismatchError, sampling_from_json
from batchinfer.run.fingerprint import settings_fingerprint
from support.checked_rows import checked, errors, make_job
from support.jobs import batchinfer, output_bytes, outputs, write_job

ROWS = [
    {
        "id": f"row {row}",
        "prompt": f'Line {row}, "quoted", é 你好\tand\nmore' if row % 3 else f"Question {row}?",
        "number": row * 10**12 if row % 7 else None,
        "share": row / 7,
        "is_odd": row % 2 == 1,
        "code": f"{row:04d}",
    }
    for row in range(1000)
]
KEPT = ["number", "share", "is_odd", "code"]


def as_parquet(rows: list[dict], path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


def json_lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def csv_text(rows: list[dict], delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(data)
    return sink.getvalue().to_pybytes()


def as_arrow(rows: list[dict], path: Path, new=pa.ipc.new_file) -> None:
    table = pa.Table.from_pylist(rows)
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=300)


FORMATS = {
    "in.parquet": as_parquet,
    "in.jsonl": lambda rows, path: path.write_bytes(json_lines(rows)),
    "in.jsonl.gz": lambda rows, path: path.write_bytes(gzip.compress(json_lines(rows))),
    "in.jsonl.zst": lambda rows, path: path.write_bytes(as_zstd(json_lines(rows))),
    "in.csv": lambda rows, path: path.write_bytes(csv_text(rows)),
    "in.csv.zst": lambda rows, path: path.write_bytes(as_zstd(csv_text(rows))),
    "in.tsv": lambda rows, path: path.write_bytes(csv_text(rows, "\t")),
    "in.tsv.gz": lambda rows, path: path.write_bytes(gzip.compress(csv_text(rows, "\t"))),
    "in.arrow": as_arrow,
    "in.stream.arrow": lambda rows, path: as_arrow(rows, path, pa.ipc.new_stream),
    "in.feather": lambda rows, path: feather.write_feather(pa.Table.from_pylist(rows), str(path)),
}


def column(path: Path, name: str, role: str = "kept") -> pa.Array:
    """A column of a shard of lines as it is read."""
    (shard,) = find_shards([str(path)], roles={name: role})
    assert shard.problem is None, shard.problem
    return pa.chunked_array([batch[name] for batch in read_batches(shard, [name])])


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
    assert shard.problem == wrong if told is None else shard.problem.startswith(f"{wrong}; it {told}")


# ---- JSON lines


GOOD = b'{"prompt": "What?"}'


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"prompt": "cut', "line 2 is not valid JSON: Input data was truncated"),
        (b"{'prompt': 'x'}", "line 2 is not valid JSON: "),
        (GOOD + b" " + GOOD, "line 2 is not valid JSON: trailing characters"),
        (b"[1, 2]", "line 2 is a list, not an object"),
        (b"null", "line 2 is null, not an object"),
        (b'"text"', "line 2 is text, not an object"),
        (b"12", "line 2 is a number, not an object"),
        (b"[" * 100_000, "line 2 is not valid JSON: it is nested too deeply"),
        (b'{"prompt": "x", "n": 1e999}', "line 2 is not valid JSON: Number out of range"),
        (b'{"prompt": "x", "n": NaN}', "line 2 is not valid JSON: "),
        (b'{"prompt": "\xff"}', "line 2 is not valid UTF-8"),
        (b'{"prompt": "\\ud800"}', "line 2 is not valid JSON: "),
        (b'{"prompt": "a\0b"}', "line 2 is not valid JSON: "),
        (b"\0" * 50, "line 2 is not valid JSON: "),
        (b'{"prompt": 5}', "line 2: prompt is a number, not text"),
        (b'{"prompt": true}', "line 2: prompt is true, not text"),
        (b'{"prompt": ["x"]}', "line 2: prompt is a list, not text"),
        (b'{"prompt": {"x": 1}}', "line 2: prompt is an object, not text"),
        (b'{"prompt": "x", "id": 1.5}', "line 2: id is a number, not text or an integer"),
        (b'{"prompt": "x", "id": []}', "line 2: id is a list, not text or an integer"),
        (b'{"prompt": null}', "prompt is null"),
        (b'{"id": "x"}', "prompt is null"),
        (b"{}", "prompt is null"),
        (b'{"prompt": ""}', "prompt is empty"),
        (b"\r" + GOOD, None),
        (b'{"prompt": "x", "id": 123456789012345678901234567890}', None),
        (b'{"prompt": "\\u0000 zero"}', None),
        (b'{"prompt": "a", "prompt": "b"}', None),
        (b'{"other": {"a": [1, "x", {}]}, "prompt": "x"}', None),
    ],
)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_bad_line_is_a_row_that_names_it(tmp_path, line, told, end):
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + end.join([GOOD, line, b"", b"  ", GOOD]))
    first, bad, last = errors(tmp_path / "in.jsonl")
    assert (first, last) == (None, None)
    assert bad is None if told is None else bad.startswith(told), bad


def test_lines_of_other_kinds_keep_their_place_in_a_large_file(tmp_path):
    bad = {row for row in range(5000) if row % 37 == 5}
    rows = [b"{" if row in bad else json.dumps({"id": row, "prompt": f"Row {row}"}).encode() for row in range(5000)]
    (tmp_path / "in.jsonl").write_bytes(b"\n\n".join(rows))
    found = checked(tmp_path / "in.jsonl")[1]
    assert [row["id"] for row in found] == [None if row in bad else str(row) for row in range(5000)]
    told = [row["error"] and row["error"].partition(" is not")[0] for row in found]
    assert told == [f"line {2 * row + 1}" if row in bad else None for row in range(5000)]


def test_a_line_that_is_not_held_is_a_bad_row(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MOST_LINE_BYTES", 1000)
    long = b'{"prompt": "' + b"x" * 50_000 + b'"}'
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([GOOD, long, GOOD, long]))
    assert errors(tmp_path / "in.jsonl") == [
        *(None, "line 2 is longer than 1000 bytes"),
        *(None, "line 4 is longer than 1000 bytes"),
    ]


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("in.jsonl", '{"prompt": "x"}\n'.encode("utf-16"), "it is UTF-16 text"),
        ("in.jsonl.gz", gzip.compress(json_lines(ROWS))[:-500], "Truncated compressed stream"),
        ("in.jsonl.gz", json_lines(ROWS), "zlib inflate failed"),
        ("in.jsonl.zst", as_zstd(json_lines(ROWS))[:-500], ""),
        ("in.csv", b"", "it has no header"),
        ("in.csv", b"a,b,a\n1,2,3\n", "its header names 'a' more than once"),
        ("in.csv", b"a,\xff\n1,2\n", "its header is not valid UTF-8"),
        ("in.csv", b'a,"b"c\n1,2\n', "its header is not valid CSV"),
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


@pytest.mark.parametrize(
    ("values", "kind", "read"),
    [
        ([1, None, -3], pa.int64(), [1, None, -3]),
        ([1, 2.5], pa.float64(), [1.0, 2.5]),
        ([2**60, 1], pa.int64(), [2**60, 1]),
        ([2**60 + 1, 0.5], pa.string(), ["1152921504606846977", "0.5"]),
        ([2**70, 1], pa.string(), [str(2**70), "1"]),
        ([True, False], pa.bool_(), [True, False]),
        ([True, 1], pa.string(), ["true", "1"]),
        (["x", 1, [2]], pa.string(), ['"x"', "1", "[2]"]),
        ([[1], None, [2, None]], pa.list_(pa.int64()), [[1], None, [2, None]]),
        ([[1], ["x"]], pa.string(), ["[1]", '["x"]']),
        ([{"a": 1}, {"b": "x"}], pa.struct([("a", pa.int64()), ("b", pa.string())]), None),
        ([{"a": 1}, {"a": "x"}], pa.string(), ['{"a":1}', '{"a":"x"}']),
        ([{}], pa.string(), ["{}"]),
        ([None, None], pa.null(), [None, None]),
        ([[]], pa.list_(pa.null()), [[]]),
    ],
)
def test_kept_columns_of_lines_have_the_narrowest_type_or_are_json(tmp_path, values, kind, read):
    (tmp_path / "in.jsonl").write_bytes(json_lines([{"x": value} for value in values]))
    found = column(tmp_path / "in.jsonl", "x")
    assert found.type == kind
    assert found.to_pylist() == (read or [{"a": 1, "b": None}, {"a": None, "b": "x"}])


def test_objects_of_ever_other_keys_or_any_depth_are_json(tmp_path):
    deep: Any = 1
    for _ in range(500):
        deep = [deep]
    rows = [{"keys": {f"k{row}": row}, "deep": deep} for row in range(1000)]
    (tmp_path / "in.jsonl").write_bytes(json_lines(rows))
    for name in ("keys", "deep"):
        assert list(map(json.loads, column(tmp_path / "in.jsonl", name).to_pylist())) == [row[name] for row in rows]


def test_a_shard_of_ever_other_columns_has_those_that_the_job_names(tmp_path):
    rows = [{f"c{row}": row} for row in range(5000)] + [{"prompt": "x"}]
    (tmp_path / "in.jsonl").write_bytes(json_lines(rows))
    (shard,) = find_shards([str(tmp_path / "in.jsonl")], roles={"prompt": "text"})
    names = shard_schema(shard).names
    assert len(names) < 300
    assert {"c0", "prompt"} <= set(names)


# ---- columns for prompts


def test_prompts_of_every_kind_come_from_lines_as_from_parquet(tmp_path):
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
    rows = [
        {"prompt": f"p {row}", "messages": messages[: 1 + row % 2], "ids": [1, 2, 3 + row], "choices": [" a", " b"]}
        for row in range(9)
    ]
    as_parquet(rows, tmp_path / "in.parquet")
    (tmp_path / "lines.jsonl").write_bytes(json_lines(rows))
    with_json = [{key: json.dumps(value) if key != "prompt" else value for key, value in row.items()} for row in rows]
    (tmp_path / "text.csv").write_bytes(csv_text(with_json))
    none = {"max_tokens": 0}
    for columns, of_job in [
        ({"prompt": "prompt"}, {}),
        ({"messages": "messages"}, {}),
        ({"token_ids": "ids"}, {}),
        ({"template": "{{ prompt }}!"}, {}),
        ({"prompt": "prompt", "choices": "choices"}, none),
    ]:
        paths = [tmp_path / name for name in ("in.parquet", "lines.jsonl", "text.csv")]
        first, *others = [checked(path, make_job(path, of_job=of_job, **columns))[1] for path in paths]
        assert all(row["error"] is None for row in first)
        assert others == [first, first]


def test_messages_may_differ_from_line_to_line(tmp_path):
    whole = [{"role": "user", "content": "Who?"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Who?"}]}]
    rows = [whole, parts, json.dumps(whole), 5, "not JSON", [{"role": "user"}]]
    (tmp_path / "in.jsonl").write_bytes(json_lines([{"m": row} for row in rows]))
    found = checked(tmp_path / "in.jsonl", make_job(tmp_path / "in.jsonl", messages="m"))[1]
    assert found[0]["token_ids"] == found[1]["token_ids"] == found[2]["token_ids"] != None  # noqa: E711
    assert found[3]["error"] == "m is not a list of messages"
    assert found[4]["error"].startswith("m is not valid JSON")
    assert found[5]["error"] == "m has no content in message 0"


def test_sharegpt_comes_as_lines_too(tmp_path):
    turns = [{"from": "human", "value": "Who?"}]
    (tmp_path / "in.jsonl").write_bytes(json_lines([{"conversations": turns}]))
    as_parquet([{"conversations": turns}], tmp_path / "p.parquet")
    job = {"format": "sharegpt"}
    (row,) = checked(tmp_path / "in.jsonl", make_job(tmp_path / "in.jsonl", **job))[1]
    assert row["error"] is None
    assert row == checked(tmp_path / "p.parquet", make_job(tmp_path / "p.parquet", **job))[1][0]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("x", "line 2: ids is text, not a list of integers"),
        ([1, "x"], "line 2: ids is a list that holds text, not a list of integers"),
        ([1, 2.0], "line 2: ids is a list that holds a number, not a list of integers"),
        ([1, True], "line 2: ids is a list that holds true, not a list of integers"),
        ([1, 2**70], "line 2: ids holds an integer of more than 64 bits"),
        ({"a": 1}, "line 2: ids is an object, not a list of integers"),
        ([1, None], "a token id is null"),
        ([1, 2**40], f"a token id is {2**40}, which is not in [0, 1024)"),
        ([], "the prompt has no tokens"),
        (None, "ids is null"),
    ],
)
def test_token_ids_of_a_wrong_kind_are_bad_rows(tmp_path, value, told):
    (tmp_path / "in.jsonl").write_bytes(json_lines([{"ids": [1]}, {"ids": value}, {"ids": [2]}]))
    assert errors(tmp_path / "in.jsonl", make_job(tmp_path / "in.jsonl", token_ids="ids")) == [None, told, None]


# values of a column of token ids, and what else may stand in its line
IDS = [
    "[1, 2, 3]", "[]", "[ ]", "[0]", "[-1]", "[-0]", "[ 7 ,\t8]", "[9223372036854775807]",
    "[-9223372036854775808, 5]", "[9223372036854775808]", "[1, 99999999999999999999]", "[1.0]", "[1e3]", "[1, 2.5]",
    "[1e999]", "[true]", "[null]",
    "[1, null, 2]", "[1, [2]]", "[[1]]", "null", "true", "3", '"[4, 5]"', '"text"', '{"a": 1}', "[01]", "[1,]", "[,1]",
    "[1 2]", "[1-2]", "[-]", "[0x1]", "[NaN]", "[1", "1]", "", '"\\ud800"', '["1"]',
]  # fmt: skip
ENDS = ["", "}", ",", ', "other": [1, 2]', ', "ids": [5, 6]', ', "other": 1e999', ', "\\u0069ds": [7]', ', "q\\"": 1']


@pytest.mark.parametrize("seed", range(3))
def test_lists_of_integers_are_read_at_once_as_if_each_were_read_alone(tmp_path, monkeypatch, seed):
    choose = random.Random(seed)
    lines_of = [
        f'{{"id": {row}, "ids": {choose.choice(IDS)}{choose.choice(ENDS) if choose.random() < 0.3 else ""}}}'
        for row in range(4000)
    ]
    lines_of[2000:3000] = [f'{{"ids": [{row}, {row}], "id": "{row}"}}' for row in range(1000)]
    lines_of[2500] = '{"ids": ["\xff"]}'
    path = tmp_path / "in.jsonl"
    path.write_bytes("\n".join(lines_of).encode("latin-1"))
    job = make_job(path, token_ids="ids")
    roles = column_roles(job, [])
    (shard,) = find_shards([str(path)], roles=roles)
    found = list(read_batches(shard, ["ids", "id"], 100))
    monkeypatch.setattr(jsonl._Rows, "learn", lambda rows, names: None)
    assert find_shards([str(path)], roles=roles) == [shard]
    assert list(read_batches(shard, ["ids", "id"], 100)) == found
    assert sum(map(len, found)) == 4000


def test_lists_of_integers_stay_text_until_they_are_read_whatever_other_columns_there_are():
    text = b'{"ids": [1]}\n{"ids": [1], "q\\"": 1}\n{"new": 1, "ids": [2, 3]}\n{"new": 2, "ids": [4]}\n{"ids": [5]}\n'
    found = [values["ids"] for _, _, values in jsonl.json_records(io.BufferedReader(io.BytesIO(text)), "ids")]
    assert [isinstance(value, msgspec.Raw) for value in found] == [False, False, False, True, True]
    assert jsonl.integer_lists([*found[3:], None]).to_pylist() == [[4], [5], None]
    assert jsonl.integer_lists(found) is None, "a list that is one already"


def test_each_line_has_its_own_sampling(tmp_path):
    given = [
        *({"temperature": 0, "stop": ["x"]}, {"top_k": 5, "stop": ["a", "b"]}, None, {"logit_bias": {"7": -1.5}}),
        *(json.dumps({"max_tokens": 3}), {"max_token": 3}, 5, "x", {"top_p": [1]}),
    ]
    (tmp_path / "in.jsonl").write_bytes(json_lines([{"prompt": "p", "how": value} for value in given]))
    found = checked(tmp_path / "in.jsonl", make_job(tmp_path / "in.jsonl", prompt="prompt", sampling="how"))[1]
    resolved = [sampling_from_json(row["sampling"]) if row["sampling"] else None for row in found]
    assert (resolved[0].temperature, resolved[0].stop) == (0, ("x",))
    assert (resolved[1].top_k, resolved[1].stop) == (5, ("a", "b"))
    assert resolved[2] is None
    assert resolved[3].logit_bias == ((7, -1.5),)
    assert found[4]["max_tokens"] == 3
    told = [row["error"] for row in found]
    assert told[:5] == [None] * 5
    assert "max_token is not a sampling key" in told[5]
    assert told[6] == "how is not an object of sampling keys"
    assert told[7].startswith("how is not valid JSON")
    assert "how.top_p is [1]" in told[8]


# ---- CSV


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"a", "line 2 has 1 fields, but the header 2"),
        (b"a,b,c", "line 2 has 3 fields, but the header 2"),
        (b"1,\xff", "line 2 is not valid UTF-8"),
        (b'1,"x"y', "line 2 is not valid CSV: "),
        (b"1,", "prompt is null"),
        (b'1,"two\nlines"', None),
        (b"1,nul \0", None),
    ],
)
def test_a_bad_row_of_csv_is_a_row_that_names_its_line(tmp_path, line, told):
    (tmp_path / "in.csv").write_bytes(b"\xef\xbb\xbfid,prompt\r\n" + line + b"\n\n2,good\n")
    bad, good = errors(tmp_path / "in.csv")
    assert good is None
    assert bad is None if told is None else bad.startswith(told), bad


def test_an_open_quote_is_a_bad_row(tmp_path):
    (tmp_path / "in.csv").write_bytes(b'id,prompt\n1,good\n2,"open\n3,lost\n')
    assert errors(tmp_path / "in.csv") == [None, "line 3 is not valid CSV: unexpected end of data"]


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (["1", "", "-30"], pa.int64()),
        (["1", "2.5", "1e-05"], pa.float64()),
        (["007", "8"], pa.string()),  # a number would lose how it is written
        (["1.10", "1.2"], pa.string()),
        (["123456789012345678901"], pa.string()),
        (["true", "false"], pa.bool_()),
        (["True", "1"], pa.string()),
        (["nan"], pa.string()),
    ],
)
def test_csv_columns_are_numbers_only_where_nothing_is_lost(tmp_path, texts, kind):
    (tmp_path / "in.csv").write_bytes(csv_text([{"x": text, "y": 1} for text in texts]))
    found = column(tmp_path / "in.csv", "x")
    assert found.type == kind
    if kind == pa.string():
        assert found.to_pylist() == texts


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
    with pytest.raises(InputError, match="is not there"):
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
        file.write(GOOD)
    assert "changed after it was planned" in batchinfer("work", tmp_path / "run").err
    (tmp_path / "prompts.jsonl").write_bytes(content)
    assert batchinfer("run", job).code == 3
    rows = outputs(tmp_path / "run")["prompts.parquet"]
    assert [row["n"] for row in rows] == [0, 1, 2, 3, 4, None]
    assert rows[5]["error"].startswith("line 6 is not valid JSON")
    with open(tmp_path / "prompts.jsonl", "ab") as file:
        file.write(GOOD)
    assert "belongs to another job: input shards was" in batchinfer("run", job).err


# ---- many files


def test_files_that_are_listed_twice_are_named(tmp_path, capsys):
    for name in ("a.jsonl", "b.jsonl"):
        FORMATS["in.jsonl"](ROWS[:1], tmp_path / name)
    find_shards([f"{tmp_path}/*.jsonl"])
    assert "more than once" not in capsys.readouterr().err
    assert len(find_shards([f"{tmp_path}/*.jsonl", f"{tmp_path}/a.jsonl"])) == 2
    told = capsys.readouterr().err
    assert "more than once" in told
    assert f"{tmp_path}/a.jsonl" in told
    assert "b.jsonl" not in told


def test_a_folder_stands_for_its_data_files(tmp_path):
    for name in ("data/train-0.parquet", "data/x/test.parquet", ".cache/a.parquet", "data/_tmp/b.parquet"):
        (tmp_path / "hub" / name).parent.mkdir(parents=True, exist_ok=True)
        as_parquet(ROWS[:1], tmp_path / "hub" / name)
    FORMATS["in.jsonl"](ROWS[:2], tmp_path / "hub" / "more.jsonl")
    (tmp_path / "hub" / "README.md").write_text("Read me.")
    shards = find_shards([str(tmp_path / "hub")])
    assert [shard.name for shard in shards] == ["data/train-0.parquet", "data/x/test.parquet", "more.parquet"]


def test_input_in_the_run_folder_is_told_as_such(tmp_path):
    as_parquet(ROWS[:1], tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=rf"is in the run folder {tmp_path}; choose another output\.dir"):
        find_shards([f"{tmp_path}/*.parquet"], exclude=tmp_path)


def test_links_to_folders_below_a_folder_are_followed_once(tmp_path):
    for name in ("data/a.parquet", "disk/b.parquet", "disk/deep/c.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        as_parquet(ROWS[:1], tmp_path / name)
    for name, target in (("data/part", "../disk"), ("data/again", "../disk/deep"), ("disk/deep/up", "../../data")):
        (tmp_path / name).symlink_to(target)
    shards = find_shards([str(tmp_path / "data")])
    assert [shard.name for shard in shards] == ["a.parquet", "again/c.parquet", "part/b.parquet"]


def test_a_link_beside_the_folder_that_it_leads_to_hides_no_key(tmp_path):
    for day in ("day=1", "day=2"):
        (tmp_path / day).mkdir()
        as_parquet(ROWS[:1], tmp_path / day / "a.parquet")
    (tmp_path / "at_last").symlink_to("day=2")
    shards = find_shards([str(tmp_path)])
    assert [shard.name for shard in shards] == ["day=1/a.parquet", "day=2/a.parquet"]


def test_folders_beside_the_files_that_a_pattern_matches_are_named_if_they_hold_data(tmp_path, capsys):
    for name in ("a.parquet", "more.parquet/part-0.parquet", "more.parquet/part-1.parquet", "logs/x.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        as_parquet(ROWS[:1], tmp_path / name)
    told = f"which are not read; name the folders too if they are meant: {tmp_path}/more.parquet/\n"
    for pattern in ("*", "*.parquet"):
        assert [shard.name for shard in find_shards([f"{tmp_path}/{pattern}"])] == ["a.parquet"]
        assert capsys.readouterr().err.endswith(told)
    # all of its files are read
    assert len(find_shards([f"{tmp_path}/*.parquet", f"{tmp_path}/more.parquet"])) == 3
    assert len(find_shards([f"{tmp_path}/**/*.parquet"])) == 3
    assert capsys.readouterr().err == ""


def test_a_saved_dataset_stands_for_the_files_that_it_lists(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        for name in ("data-0.arrow", "cache-1.arrow"):
            as_arrow(ROWS[:3], tmp_path / split / name, pa.ipc.new_stream)
        (tmp_path / split / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    shards = find_shards([str(tmp_path)])
    assert [(shard.name, shard.num_rows) for shard in shards] == [
        ("test/data-0.parquet", 3),
        ("train/data-0.parquet", 3),
    ]
    (tmp_path / "test" / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"state\.json, the list of a saved dataset's files"):
        find_shards([str(tmp_path)])


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
