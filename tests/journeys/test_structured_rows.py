"""Rows that ask for structured outputs of every kind, good and bad, in whole jobs of every kind of input."""

from __future__ import annotations

import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer import generate
from support.jobs import batchinfer, output_bytes, outputs, write_job
from support.openai_batches import chat, read_lines, write_batch
from support.paths import SAMPLE_MODEL

MODEL = {"path": str(SAMPLE_MODEL), "dtype": "float32"}
BIG = 9007199254740993
LOOSE = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
IDS = {"type": "object", "properties": {"id": {"enum": [BIG]}}, "required": ["id"], "additionalProperties": False}
# the requested constraint as text, and the answer or the error
ROWS = [
    (f'{{"json": {{"const": {BIG}}}}}', f"{BIG}"),
    ('{"json": {"enum": [12345678901234567890]}}', "12345678901234567890"),
    (f'{{"json": {{"type": "integer", "minimum": {BIG}, "maximum": {BIG}}}}}', f"{BIG}"),
    ('{"json": {"type": "integer", "minimum": 1e20, "maximum": 1e20}}', "100000000000000000000"),
    ('{"json": {"const": 93859586.77423489}}', "93859586.77423489"),
    ('{"json": {"const": 3.14159265358979323846}}', "3.14159265358979323846"),
    ('{"json": "{\\"const\\": 3.14159265358979323846}"}', "3.14159265358979323846"),
    ('{"json": {"const": 1e-400}}', "1e-400"),
    ('{"json": {"type": "number", "multipleOf": 0.07}}', "error: the number 0.07 at #/multipleOf"),
    (json.dumps({"json": LOOSE | {"x-guidance": {"key_separator": "\\s{1,3}:"}}}), "error: #/x-guidance"),
    ('{"choice": ["<｜User｜>"]}', "<｜User｜>"),
    ('{"json": {"const": "ends with <｜end▁of▁sentence｜>"}}', '"ends with <｜end▁of▁sentence｜>"'),
    ('{"regex": "<｜Assistant｜>7"}', "<｜Assistant｜>7"),
    ('{"grammar": "%llguidance {\\"no_forcing\\": true}\\nstart: \\"<｜User｜>\\""}', "<｜User｜>"),
    ('{"json": {"$ref": "#"}}', "error: no text satisfies it"),
    ('{"regex": "[^\\\\s\\\\S]"}', "error: no text satisfies it"),
    ('{"grammar": "start: \\"a\\" start"}', "error: no text satisfies it"),
    ('{"grammar": "start: <nobody> \\"a\\""}', 'error: unknown special token: "<nobody>"'),
    ('{"json": {"type": "strng"}}', "error: Invalid type: strng"),
    ('{"choice": [""]}', "error: at least 1 character"),
    ('{"json": {"type": "null", "nullable": true}}', "null"),
    ('{"json": {"enum": [null], "nullable": true, "requird": []}}', "null"),
    ('{"json": {"type": "null", "title": "T", "x-a": 1}}', "null"),
    ('{"choice": ["yes, but"]}', "yes, but"),
]
OTHER_LINES = [  # lines that are bad in other ways, with a part of the error
    ('{"id": "cut"', "is not valid JSON: Input data was truncated"),
    ('{"id": "half", "prompt": "\\ud83d"}', "is not valid JSON: unexpected end of escaped utf-16 surrogate pair"),
    ("[1]", "is a list, not an object"),
    ('{"id": "none"}', "prompt is null"),
    ('{"id": "empty", "prompt": ""}', "prompt is empty"),
    ('{"id": "number", "prompt": 5}', "prompt is a number, not text"),
    (f'{{"id": "long", "prompt": "{9000 * "word "}"}}', "the prompt has 45000 characters"),
    ('{"id": 1, "prompt": "Give", "sampling": {"max_tokens": 0}}', "max_tokens is 0"),
    ('{"id": 1, "prompt": "Give", "sampling": {"temperature": -1}}', "temperature is -1"),
    ('{"id": 1, "prompt": "Give", "sampling": {"stop": [""]}}', "stop.0 is ''"),
    ('{"id": 1, "prompt": "Give", "sampling": {"logit_bias": {"99999": 1}}}', "names token 99999"),
    ('{"id": 1, "prompt": "Give", "sampling": {"min_tokens": 99}}', "min_tokens is 99, more than max_tokens"),
    ('{"id": 1, "prompt": "Give", "sampling": {"Stop": ["a"]}}', "Stop is not a sampling key"),
    ('{"id": 1, "prompt": "Give", "sampling": 5}', "sampling"),
]
SAID_OF = [  # warnings, each once
    "warning: structured_outputs of 2 rows: nullable at # has no effect",
    "warning: structured_outputs of 1 row: 'requird' at # is no keyword of JSON Schema",
    "warning: structured_outputs of 1 row: the grammar names tokens of the tokenizer",
]


def lines_job(folder, name, lines, **parts):
    path = folder / "in.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return write_job(
        folder,
        name=f"{name}.toml",
        input={"files": ["in.jsonl"], "sampling": "sampling"},
        model=MODEL,
        sampling={"max_tokens": 60},
        output={"dir": name, "format": "jsonl"},
        **parts,
    )


def texts_of(run):
    ((_, rows),) = outputs(run).items()
    return [row["text"] if row["status"] == "ok" else f"error: {row['error']}" for row in rows]


def expect(found, expected):
    assert len(found) == len(expected)
    for text, wanted in zip(found, expected, strict=True):
        if wanted.startswith("error: "):
            assert text.startswith("error: ")
            assert wanted.removeprefix("error: ") in text
            assert "<state>" not in text
        else:
            assert text == wanted


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same rows three times: the folders and what was said on the way."""
    folder = tmp_path_factory.mktemp("rows")
    lines = [
        f'{{"id": {number}, "prompt": "Give", "sampling": {{"structured_outputs": {asked}}}}}'
        for number, (asked, _) in enumerate(ROWS)
    ]
    lines += [line for line, _ in OTHER_LINES]
    ended = {folder / name: batchinfer("run", lines_job(folder, name, lines)) for name in ("one", "two", "three")}
    assert {one.code for one in ended.values()} == {3}
    return {run: one.err for run, one in ended.items()}


def test_each_row_gets_what_it_asks_for_to_the_last_digit_or_an_error_that_says_why(runs):
    errors = [f"error: {error}" for _, error in OTHER_LINES]
    expect(texts_of(next(iter(runs))), [wanted for _, wanted in ROWS] + errors)


def test_the_same_rows_give_the_same_bytes_each_time(runs):
    first, *others = map(output_bytes, runs)
    assert all(one == first for one in others)


def test_keys_without_an_effect_are_told_once_with_their_rows(runs):
    said = next(iter(runs.values()))
    assert [said.count(warning) for warning in SAID_OF] == [1, 1, 1]
    assert said.count("structured_outputs of") == len(SAID_OF)


def test_a_job_that_no_answer_satisfies_is_refused_before_its_model_is_loaded(tmp_path):
    for asked, said in [
        ({"json": '{"$ref": "#"}'}, "no text satisfies it"),
        ({"json": {"const": 1, "x-guidance": {"lenient": True}}}, "#/x-guidance"),
        ({"json": '{"multipleOf": 0.07}'}, "the number 0.07 at #/multipleOf"),
    ]:
        job = write_job(tmp_path, model=MODEL, sampling={"max_tokens": 9, "structured_outputs": asked})
        ended = batchinfer("run", job)
        assert ended.code == 2
        assert said in ended.err
        assert "loading" not in ended.err


def test_a_job_is_told_of_keys_without_an_effect(tmp_path):
    pq.write_table(pa.table({"id": [1], "prompt": ["Give"]}), tmp_path / "p.parquet")
    job = write_job(
        tmp_path,
        input={"files": ["p.parquet"]},
        model=MODEL,
        sampling={"max_tokens": 9, "structured_outputs": {"json": {"type": "string", "nullable": True}}},
    )
    ended = batchinfer("plan", job)
    assert ended.code == 0
    assert ended.err.count("warning: sampling.structured_outputs: nullable at # has no effect") == 1


def test_numbers_of_a_batch_of_openais_survive(tmp_path):
    def form(schema):
        return f'{{"type": "json_schema", "json_schema": {{"name": "n", "schema": {schema}}}}}'

    schemas = [json.dumps(IDS), '{"const": 3.14159265358979323846}', '{"const": 1, "x-guidance": {}}']
    asked = [f'"response_format": {form(schema)}' for schema in schemas]
    asked += [f'"guided_json": {schemas[1]}', f'"structured_outputs": {{"json": {schemas[1]}}}']
    lines = [
        json.dumps(chat(f"c{number}", "Give", max_tokens=60, mark="@")).replace('"mark": "@"', one)
        for number, one in enumerate(asked)
    ]
    write_batch(tmp_path / "in.jsonl", lines)
    job = write_job(
        tmp_path,
        input={"files": ["in.jsonl"], "format": "openai", "prompt": None},
        model=MODEL,
        sampling={"max_tokens": 60},
        output={"dir": "run", "format": "openai"},
    )
    assert batchinfer("run", job).code == 3
    answers = read_lines(next((tmp_path / "run" / "outputs").glob("in.jsonl")))
    texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"] for one in answers}
    assert json.loads(texts.pop("c0")) == {"id": BIG}
    assert texts == dict.fromkeys(["c1", "c3", "c4"], "3.14159265358979323846")
    (error,) = read_lines(next((tmp_path / "run" / "outputs").glob("in*.errors.jsonl")))
    assert error["custom_id"] == "c2"
    assert "body.response_format: json cannot be used: #/x-guidance" in json.dumps(error)


def test_numbers_of_python_and_of_parquet_survive():
    precise = Decimal("3.14159265358979323846")
    of_row = pa.struct([("json", pa.struct([("const", pa.decimal128(30, 20))]))])
    sampling = pa.array(
        [{"structured_outputs": {"json": {"const": precise}}}, None], pa.struct([("structured_outputs", of_row)])
    )
    answers = generate(
        pa.table({"id": [1, 2], "prompt": ["Give", "Give"], "sampling": sampling}),
        model=SAMPLE_MODEL,
        dtype="float32",
        max_tokens=60,
        input={"sampling": "sampling"},
        structured_outputs={"json": {"enum": [{"id": BIG, "x": precise}]}},
    )
    first, second = answers["text"].to_pylist()
    assert first == f"{precise}"
    assert json.loads(second, parse_float=Decimal) == {"id": BIG, "x": precise}
