"""First job files: the chosen columns, and that the file runs without changes."""

import gzip
import json
import tomllib
from pathlib import Path

import pyarrow as pa
import pytest

from batchinfer.config import load_job
from batchinfer.plan.first_job import SCHEMA, first_job
from batchinfer.records import ConfigError, InputError
from support.jobs import batchinfer, write_shard
from support.openai_batches import DOCUMENTED, read_lines
from support.paths import RANDOM_MODEL

CHAT = [[{"role": "user", "content": "Hello"}]]
SHAREGPT = [[{"from": "human", "value": "Hello"}]]


@pytest.fixture
def made(tmp_path):
    """The job that is made for a shard with these columns."""

    def make(columns):
        write_shard(tmp_path / "data" / "a.parquet", columns)
        target = tmp_path / "job.toml"
        target.write_text(first_job(str(tmp_path / "data"), RANDOM_MODEL, target).text)
        return load_job(target)

    return make


@pytest.mark.parametrize(
    ("columns", "keys"),
    [
        ({"id": [1], "prompt": ["Hello"]}, {"user": "prompt", "id": "id"}),
        ({"text": ["a long text"], "question": ["short"]}, {"user": "question", "id": "none"}),
        ({"title": ["short"], "body": ["a longer text"]}, {"user": "body", "id": "none"}),
        ({"prompt": ["Hello"], "messages": CHAT}, {"messages": "messages"}),
        ({"talk": CHAT, "text": ["Hello"]}, {"messages": "talk"}),
        ({"chat": [json.dumps(CHAT[0])], "text": ["Hello"]}, {"messages": "chat"}),
        ({"conversations": SHAREGPT}, {"messages": "conversations", "format": "sharegpt"}),
        ({"talk": [json.dumps(SHAREGPT[0])]}, {"messages": "talk", "format": "sharegpt"}),
        ({"prompt": ['["not", "a chat"]']}, {"user": "prompt"}),
        ({"input_ids": [[1, 2]], "label": [1]}, {"token_ids": "input_ids", "id": "none"}),
        ({"uuid": ["a"], "numbers": [[1, 2]]}, {"token_ids": "numbers", "id": "uuid"}),
        ({"doc_id": [1], "text": ["Hello"]}, {"user": "text", "id": "doc_id"}),
        ({"id": [1.5], "text": ["Hello"]}, {"user": "text", "id": "none"}),
        ({"Prompt": pa.array(["Hello"]).dictionary_encode()}, {"user": "Prompt"}),
        ({'odd "name"\t': ["Hello"]}, {"user": 'odd "name"\t'}),
    ],
)
def test_columns_are_chosen_by_type_and_name(made, columns, keys):
    chosen = made(columns).input.model_dump()
    assert {key: chosen[key] for key in keys} == keys


@pytest.mark.parametrize(
    ("name", "content", "keys"),
    [
        ("a.jsonl", '{"id": 1, "prompt": "Hello"}\n{"id": 2, "prompt": 7}\nbroken\n', {"user": "prompt", "id": "id"}),
        ("a.jsonl", json.dumps({"chat": CHAT[0]}), {"messages": "chat", "id": "none"}),
        ("a.jsonl", json.dumps({"conversations": SHAREGPT[0]}), {"messages": "conversations", "format": "sharegpt"}),
        ("a.jsonl", json.dumps({"input_ids": [1, 2], "n": 3}), {"token_ids": "input_ids"}),
        ("a.csv", "uuid,question\nx,Hello\n", {"user": "question", "id": "uuid"}),
    ],
)
@pytest.mark.parametrize("as_folder", [True, False])
def test_columns_of_lines_are_chosen_by_what_is_in_them(tmp_path, name, content, keys, as_folder):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text(content)
    target, data = tmp_path / "job.toml", tmp_path / "data"
    target.write_text(first_job(str(data if as_folder else data / name), RANDOM_MODEL, target).text)
    chosen = load_job(target).input.model_dump()
    assert {key: chosen[key] for key in keys} == keys
    assert batchinfer("plan", target).code == 0


@pytest.mark.parametrize("name", ["batch.jsonl", "batch.jsonl.gz", "bare.jsonl"])
def test_lines_of_an_openai_batch_are_known_by_their_keys_and_answered_in_kind(tmp_path, name):
    data = DOCUMENTED.replace("1000", "3").encode()
    if name == "bare.jsonl":
        data = data.replace(b'"method": "POST", "url": "/v1/chat/completions", ', b"")
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    target = tmp_path / "job.toml"
    made = first_job(str(tmp_path / name), RANDOM_MODEL, target)
    assert ("prompts", "lines of an OpenAI batch") in made.choices
    target.write_text(made.text)
    assert (load_job(target).input.format, load_job(target).output.format) == ("openai", "openai")
    assert batchinfer("run", target).code == 0
    found = read_lines(tmp_path / "runs" / "job" / "outputs" / name.removesuffix(".gz"))
    assert [line["custom_id"] for line in found] == ["request-1", "request-2"]


def test_texts_with_an_id_and_a_body_are_no_batch(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"custom_id": "a", "body": "Once upon a time"}\n')
    made = first_job(str(tmp_path / "a.jsonl"), RANDOM_MODEL, tmp_path / "job.toml")
    assert 'user = "body"' in made.text


def test_data_without_prompts_is_refused_with_its_columns(made):
    with pytest.raises(ConfigError, match=r"no column holds prompts: .*; there are id \(int64\), weight \(double\)"):
        made({"id": [1], "weight": [0.5]})


def test_files_that_cannot_be_read_are_passed_over_while_one_can(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"not parquet")
    with pytest.raises(InputError, match="cannot be read: "):
        first_job(str(tmp_path), RANDOM_MODEL, tmp_path / "job.toml")
    write_shard(tmp_path / "b.parquet", {"prompt": ["Hello"]})
    found = first_job(str(tmp_path), RANDOM_MODEL, tmp_path / "job.toml")
    assert ("data", "1 row in 1 of 2 files that can be read") in found.choices


@pytest.mark.parametrize(("content", "told"), [("", "a.jsonl is empty"), ("id,prompt\n1,x\n", "it looks like CSV")])
def test_files_without_columns_are_refused_with_what_they_are(tmp_path, content, told):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=told):
        first_job(str(tmp_path / "a.jsonl"), RANDOM_MODEL, tmp_path / "job.toml")


def test_lines_with_another_extension_are_told_as_such(tmp_path):
    (tmp_path / "a.json").write_text('{"prompt": "Hello"}')
    ended = batchinfer("init", tmp_path / "a.json", "--model", RANDOM_MODEL, "--output", tmp_path / "job.toml")
    assert ended.code == 2
    assert 'set input.format = "jsonl", or name it *.jsonl' in ended.err
    (tmp_path / "a.json").rename(tmp_path / "a.ndjson")
    assert first_job(str(tmp_path / "a.ndjson"), RANDOM_MODEL, tmp_path / "job.toml").choices[1][0] == "prompts"


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"id": [1.0, None], "text": ["Hello", "Bye"]}, ["column 'id' is double", 'astype("Int64")']),
        ({"uuid": [b"1"], "text": ["Hello"]}, ["column 'uuid' is binary, not text or integer"]),
        ({"text": ["Hello"], "score": [1.5]}, ["none: no column looks like one"]),
    ],
)
def test_ids_of_a_wrong_type_are_named(tmp_path, columns, words):
    write_shard(tmp_path / "a.parquet", columns)
    ids = dict(first_job(str(tmp_path / "a.parquet"), RANDOM_MODEL, tmp_path / "job.toml").choices)["ids"]
    assert all(word in ids for word in words)


@pytest.mark.parametrize(
    ("first", "second", "column", "words"),
    [
        ([1.0, None], [1, 2], "id", "column 'id'"),
        (None, [1, 2], "id", "column 'id'"),
        ([1, 2], ["a", "b"], "id", "column 'id'"),
        ([1, 2], [[1], [2]], "none", "column 'id' is list<element: int64> in {}, not text or integer"),
        (["a", "b"], [1.0, None], "none", "column 'id' is double in {}, not text or integer; pandas"),
        (None, [True, False], "none", "column 'id' is bool in {}, not text or integer"),
    ],
)
def test_ids_are_of_a_right_type_in_all_files(tmp_path, first, second, column, words):
    for name, ids in (("a", first), ("b", second)):
        write_shard(tmp_path / f"{name}.parquet", {"text": ["Hello", "Bye"]} | ({} if ids is None else {"id": ids}))
    found = first_job(str(tmp_path / "*.parquet"), RANDOM_MODEL, tmp_path / "job.toml")
    assert f'id = "{column}"' in found.text
    assert words.format(tmp_path / "b.parquet") in dict(found.choices)["ids"]


def test_paths_are_those_from_the_job_files_folder_and_the_run_folder_is_a_new_one(tmp_path, made):
    job = made({"prompt": ["Hello"]})
    assert 'files = ["data/*.parquet"]' in (tmp_path / "job.toml").read_text()
    assert job.output.dir == str(tmp_path / "runs" / "job")
    (tmp_path / "runs" / "job").mkdir(parents=True)
    assert made({"prompt": ["Hello"]}).output.dir == str(tmp_path / "runs" / "job-2")


def test_a_folder_with_glob_characters_is_meant_as_it_stands(tmp_path):
    write_shard(tmp_path / "data [1]" / "deep" / "a.parquet", {"prompt": ["Hello"]})
    found = first_job(str(tmp_path / "data [1]"), RANDOM_MODEL, tmp_path / "job.toml")
    assert ("data", "1 row in 1 of 1 file that can be read") in found.choices


def test_the_file_says_why_it_has_its_dtype(tmp_path, made):
    job = made({"prompt": ["Hello"]})
    text = (tmp_path / "job.toml").read_text()
    assert job.model.dtype == "bfloat16"
    assert "# float32, bfloat16, fp8 or int4. Why bfloat16: the checkpoint's own; a rank takes 0." in text


def test_the_first_line_names_the_schema_for_editors(tmp_path, made):
    made({"prompt": ["Hello"]})
    first = (tmp_path / "job.toml").read_text().splitlines()[0]
    assert first == f"#:schema {SCHEMA.as_uri()}"
    assert "sampling" in json.loads(SCHEMA.read_text())["properties"]


@pytest.mark.parametrize(
    ("columns", "kept"),
    [
        ({"id": [1], "prompt": ["Hello"], "task": ["a"], "text": ["b"]}, '["task"]'),
        ({"id": [1], "prompt": ["Hello"]}, '["prompt"]'),
    ],
)
def test_columns_that_can_be_kept_are_named(tmp_path, made, columns, kept):
    made(columns)
    text = (tmp_path / "job.toml").read_text()
    assert f"# keep_columns = {kept}" in text
    (tmp_path / "job.toml").write_text(text.replace("# keep_columns", "keep_columns"))
    assert load_job(tmp_path / "job.toml").output.keep_columns == json.loads(kept)


@pytest.mark.parametrize(
    ("names", "files", "left_out"),
    [
        (["a.parquet", "b.csv", "deep/c.parquet"], ["*.parquet"], "2 files (b.csv, deep/c.parquet)"),
        (["deep/c.parquet", "b.jsonl"], ["**/*.parquet"], "1 file (b.jsonl)"),
        (["a.jsonl", "b.ndjson.gz", "c.csv"], ["**/*.jsonl", "**/*.ndjson.gz"], "1 file (c.csv)"),
        (["a.jsonl", "deep/b.jsonl"], None, None),
        (["a.parquet", "notes.txt", ".b.csv"], ["*.parquet"], None),
        (["A.PARQUET", "deep/c.parquet", "b.JSONL"], ["*.PARQUET"], "2 files (b.JSONL, deep/c.parquet)"),
    ],
)
def test_a_folder_of_several_formats_gives_one_and_names_what_is_left_out(tmp_path, names, files, left_out):
    lines = b'{"prompt": "Hello"}\n'
    for name in names:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.lower().endswith(".parquet"):
            write_shard(path, {"prompt": ["Hello"]})
        else:
            path.write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    found = first_job(str(tmp_path / "data"), RANDOM_MODEL, tmp_path / "job.toml")
    assert dict(found.choices).get("left out", "").partition(":")[0] == (left_out or "")
    expected = [f"data/{name}" for name in files] if files else ["data"]
    assert tomllib.loads(found.text)["input"]["files"] == expected


@pytest.mark.parametrize("names", [["a.jsonl"], ["a.jsonl", "c.csv"]])
def test_init_warns_once_of_files_that_no_job_reads(tmp_path, names, capsys):
    (tmp_path / "data").mkdir()
    for name in (*names, "p4.json"):
        (tmp_path / "data" / name).write_text('{"prompt": "Hello"}\n')
    first_job(str(tmp_path / "data"), RANDOM_MODEL, tmp_path / "job.toml")
    told = capsys.readouterr().err
    assert told.count("warning: ") == 1
    assert told.endswith(
        f"1 file in {tmp_path}/data is left out, as its name does not end as data files' do: p4.json\n"
    )


def test_files_of_run_folders_are_not_left_out_but_no_data(tmp_path, made):
    made({"prompt": ["Hello"]})
    job = tmp_path / "job.toml"
    job.write_text(job.read_text().replace('"runs/job"', '"data/run"'))
    assert batchinfer("plan", job).code == 0
    assert "left out" not in dict(first_job(str(tmp_path / "data"), RANDOM_MODEL, tmp_path / "other.toml").choices)


def test_paths_have_no_way_up(tmp_path, monkeypatch):
    write_shard(tmp_path / "data" / "a.parquet", {"prompt": ["Hello"]})
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    found = first_job("../data/a.parquet", RANDOM_MODEL, Path("job.toml"))
    assert tomllib.loads(found.text)["input"]["files"] == [str(tmp_path / "data" / "a.parquet")]
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    write_shard(tmp_path / "elsewhere" / "a.parquet", {"prompt": ["Hello"]})
    (tmp_path / "work" / "link").symlink_to(tmp_path / "elsewhere" / "deep")
    found = first_job("link/../a.parquet", RANDOM_MODEL, Path("job.toml"))  # the folder above where the link leads
    assert tomllib.loads(found.text)["input"]["files"] == [str(tmp_path / "elsewhere" / "a.parquet")]
