"""Prompts, token ids and sampling keys that come from lines, each of which may hold something else."""

from __future__ import annotations

import io
import json
import random

import msgspec
import pytest

from batchinfer.data.formats import jsonl
from batchinfer.data.formats.values import column_roles
from batchinfer.data.inputs import read_batches
from batchinfer.data.shards import find_shards
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.records import sampling_from_json
from support.checked_rows import checked, errors, make_job
from support.formats import as_parquet, csv_text, json_lines
from support.paths import RANDOM_MODEL

# of columns id, meta and p
SEEN = (
    "{{ 'int' if id is integer else 'text' }} {{ meta | tojson }} {{ (meta.y is defined) if meta else false }} "
    "{{ p | string }}"
)


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


WHAT_TEMPLATES_SEE = [
    ('{"id": 1, "meta": {"b": 1, "a": null}, "p": 3}', 'int {"b": 1, "a": null} False 3'),
    ('{"id": "x", "meta": {"y": 7}, "p": 2.5}', 'text {"y": 7} True 2.5'),
    ('{"id": 2, "meta": {}, "p": "big"}', "int {} False big"),
    ('{"id": 3, "meta": {"y": [1, 2.0, null]}, "p": true}', 'int {"y": [1, 2.0, null]} True True'),
    ('{"id": 4, "p": 3, "meta": {"y": 123456789012345678901}}', 'int {"y": 123456789012345678901} True 3'),
    ('{"id": 5, "p": [3], "meta": null}', "int null False [3]"),
    ('{"id": 6, "p": null}', "a value that is null (meta, p are null)"),
]


@pytest.mark.parametrize("key", ["template", "system"])
def test_a_template_sees_the_values_of_its_line_whatever_other_lines_hold(tmp_path, key):
    path, columns = tmp_path / "in.jsonl", {key: SEEN}
    if key == "system":
        columns["user"] = "q"
    tokenizer = load_tokenizer(RANDOM_MODEL)

    def seen(lines):
        path.write_text("\n".join(line.replace("{", '{"q": "Who?", ', 1) for line in lines))
        rows = checked(path, make_job(path, id="id", keep=["p"], **columns))[1]
        return [row["error"] or tokenizer.decode(row["token_ids"]) for row in rows]

    together = seen([line for line, _ in WHAT_TEMPLATES_SEE])
    for (line, text), found in zip(WHAT_TEMPLATES_SEE, together, strict=True):
        assert text in found
        assert seen([line, '{"id": 9, "meta": null, "p": null}'])[0] == found  # a column may be missing in no file


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


# values of a column of token ids, and other values in its line
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
    monkeypatch.setattr(jsonl, "_with_list_as_json", lambda text, name: None)
    assert find_shards([str(path)], roles=roles) == [shard]
    assert list(read_batches(shard, ["ids", "id"], 100)) == found
    assert sum(map(len, found)) == 4000


def test_lists_of_integers_stay_json_until_they_are_read_whatever_other_columns_there_are():
    lines = (
        *('{"ids": [1]}', '{"ids": [1], "q\\"": 1}', '{"new": 1, "ids": [2, 3]}', '{"new": "\\u00fc", "ids" : [ 4 ]}'),
        *('{"other": [7], "ids": [5]}', '{"other": "ids", "ids": [6]}', '{"other": {"ids": [0]}, "ids": [7]}'),
        *('{"ids": [0], "ids": [8]}', '{"other": "batchinfer:list", "ids": [9]}', '{"ids": [1, "x"]}'),
    )
    content = io.BufferedReader(io.BytesIO("\n".join(lines).encode()))
    found = [values["ids"] for _, _, values in jsonl.json_records(content, "ids")]
    assert [isinstance(value, msgspec.Raw) for value in found] == [True] * 6 + [False] * 4
    assert jsonl.integer_lists([*found[:6], None]).to_pylist() == [[1], [1], [2, 3], [4], [5], [6], None]
    assert found[6:] == [[7], [8], [9], [1, "x"]]
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
