"""Lines of JSON and of CSV: a bad one is a row that names it, and columns have types in which nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchinfer.data.formats import lines
from batchinfer.data.inputs import read_batches
from batchinfer.data.shard_schemas import shard_schema
from batchinfer.data.shards import find_shards
from batchinfer.data.tokenizer import load_tokenizer
from support.checked_rows import checked, errors, make_job
from support.formats import csv_text, json_lines
from support.paths import RANDOM_MODEL

GOOD = b'{"prompt": "What?"}'


def column(path: Path, name: str, role: str = "kept") -> pa.Array:
    """Return the values read from a column of a shard of lines."""
    (shard,) = find_shards([str(path)], roles={name: role})
    assert shard.problem is None, shard.problem
    return pa.chunked_array([batch[name] for batch in read_batches(shard, [name])])


# ---- JSON lines


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
        (b'{"prompt": "\\ud800"}', "line 2 is not valid JSON: unexpected end of escaped utf-16 surrogate pair"),
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


@pytest.mark.parametrize("key", ["prompt", "user"])
def test_a_prompt_of_another_kind_is_an_error_row_whatever_the_key(tmp_path, key):
    lines_of = [b'{"q": "What?"}', b'{"q": 5}', b'{"q": ["x"]}', b'{"q": {"x": 1}}', b'{"q": null}']
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines_of))
    assert errors(tmp_path / "in.jsonl", make_job(tmp_path / "in.jsonl", keep=["q"], **{key: "q"})) == [
        None,
        "line 2: q is a number, not text",
        "line 3: q is a list, not text",
        "line 4: q is an object, not text",
        "q is null",
    ]


@pytest.mark.parametrize("key", ["prompt", "user"])
def test_a_prompt_of_digits_in_csv_is_text(tmp_path, key):
    (tmp_path / "in.csv").write_bytes(b"q\n7\n8\n")
    _, rows = checked(tmp_path / "in.csv", make_job(tmp_path / "in.csv", **{key: "q"}))
    assert [row["error"] for row in rows] == [None, None]
    assert len({tuple(row["token_ids"]) for row in rows}) == 2


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


# ---- CSV


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"a", "line 2 has 1 field, but the header 2"),
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
        (["1234567890123456789", "-9223372036854775808", "9223372036854775807"], pa.int64()),
        (["9223372036854775808", "1"], pa.string()),
        (["true", "false"], pa.bool_()),
        (["True", "1"], pa.string()),
        (["nan"], pa.string()),
        (["3", "2.5", "1e5", "0.123456789012345"], pa.float64()),
        (["1234567890123.4567"], pa.string()),
        (["1234567890123.456", "0.1234567890123456"], pa.float64()),
        (["0.12345678901234567"], pa.string()),
    ],
)
def test_csv_columns_are_numbers_only_where_nothing_is_lost(tmp_path, texts, kind):
    (tmp_path / "in.csv").write_bytes(csv_text([{"x": text, "y": 1} for text in texts]))
    found = column(tmp_path / "in.csv", "x")
    assert found.type == kind
    if kind == pa.string():
        assert found.to_pylist() == texts
    if kind == pa.int64():
        assert found.to_pylist() == [int(text) if text else None for text in texts]


@pytest.mark.parametrize(
    ("texts", "is_text"),
    [
        (["2.5", "1e-05", "-0.1", "3.0"], False),
        (["3", "-12"], False),
        *((["2.5", text], True) for text in ("3", "2.50", "1e5", "1E-05", "-0", "1234567890123.4567")),
    ],
)
def test_a_template_writes_numbers_of_csv_as_they_are_spelled(tmp_path, texts, is_text):
    path = tmp_path / "in.csv"
    path.write_bytes(csv_text([{"x": text, "id": "a"} for text in texts]))
    of_row = "{{ x }} {{ 'text' if x is string else 'number' }}"
    shard, rows = checked(path, make_job(path, id="id", template=of_row, keep=["x"]))
    decode = load_tokenizer(RANDOM_MODEL).decode
    kind = "text" if is_text else "number"
    assert [decode(row["token_ids"]) for row in rows] == [f"{text} {kind}" for text in texts]
    # whether a template names a column does not change what is kept of it
    assert shard_schema(shard).field("x").type == column(path, "x").type


def test_a_template_writes_true_and_false_of_csv_as_booleans(tmp_path):
    path = tmp_path / "in.csv"
    path.write_bytes(csv_text([{"x": "true", "id": "a"}]))
    (row,) = checked(path, make_job(path, id="id", template="{{ x }}"))[1]
    assert load_tokenizer(RANDOM_MODEL).decode(row["token_ids"]) == "True"
