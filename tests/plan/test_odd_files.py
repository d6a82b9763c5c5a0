"""Files that say little of their types, files of which no row can be read, and texts with odd line ends in them."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.data.inputs import read_batches
from batchinfer.data.kept_fields import cast_kept_columns, kept_fields
from batchinfer.data.shard_schemas import id_type
from batchinfer.data.shards import find_shards
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.plan.input_columns import check_columns
from batchinfer.records import ConfigError, ConfigErrors
from support.checked_rows import checked, errors, make_job
from support.jobs import batchinfer, outputs, write_job
from support.openai_batches import chat
from support.paths import RANDOM_MODEL

TEXT_ROLES = {"id": "id", "prompt": "text", "note": "kept"}


def check(folder, *, keep=()):
    """Find the shards of a folder and check their columns against a job that reads `prompt`."""
    job = make_job(f"{folder}/*.*", keep=list(keep))
    shards = find_shards(job.input.files, roles=TEXT_ROLES)
    return shards, check_columns(job, shards, ["prompt"])


# ---- files of which no row can be read

UNREADABLE = {
    "latin-1": ("a.csv", b"id,prompt\n1,Gr\xfc\xdfe\n2,caf\xe9\n", "a.csv: line 2 is not valid UTF-8"),
    "too few fields": ("a.csv", b"id,prompt\n1\n2\n", "a.csv: line 2 has 1 field, but the header 2"),
    "too many fields": ("a.tsv", b"id\tprompt\n1\t2\t3\n", "a.tsv: line 2 has 3 fields, but the header 2"),
    "an open quote": ("a.csv", b'id,prompt\n"1,x\n', "a.csv: line 2 is not valid CSV: unexpected end of data"),
    "no JSON": ("a.jsonl", b"x\ny\n", "can be read: line 1 is not valid JSON: invalid character"),
    "JSON of Latin-1": ("a.jsonl", b'{"prompt": "\xe9"}\n', "can be read: line 1 is not valid UTF-8"),
    "objects over lines": (
        "a.jsonl",
        b'{\n"prompt": "x"\n}\n',
        "can be read: line 1 is not valid JSON: Input data was",
    ),
    "lists": ("a.jsonl", b"[1]\n[2]\n", "can be read: line 1 is a list, not an object"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_without_a_readable_row_says_why_the_first_is_bad(name, tmp_path):
    file, content, reason = UNREADABLE[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError, match=r"^no row of the input can be read") as raised:
        check(tmp_path)
    assert reason in str(raised.value)


def test_objects_over_several_lines_are_named_with_what_to_do(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(UNREADABLE["objects over lines"][1])
    with pytest.raises(ConfigError, match=r"its objects go over several lines: .* \(`jq -c \.`\), as \*\.jsonl$"):
        check(tmp_path)


@pytest.mark.parametrize("name", UNREADABLE)
def test_beside_other_files_such_rows_are_error_rows_each_with_its_reason(name, tmp_path):
    file, content, reason = UNREADABLE[name]
    (tmp_path / file).write_bytes(content)
    (tmp_path / "z.csv").write_text("id,prompt\n3,good\n")
    shards, _ = check(tmp_path)
    assert [shard.num_rows for shard in shards] == [content.count(b"\n") - (file != "a.jsonl"), 1]
    assert errors(tmp_path / file)[0].startswith(reason.partition(": ")[2])


def test_a_plan_names_the_reason_and_no_column_that_is_there(tmp_path):
    (tmp_path / "in.csv").write_bytes(UNREADABLE["latin-1"][1])
    job = write_job(tmp_path, input={"files": ["*.csv"]})
    ended = batchinfer("plan", job)
    reason = f"no row of the input can be read; the first of {tmp_path}/in.csv: line 2 is not valid UTF-8"
    assert (ended.code, ended.err.splitlines()) == (2, [f"error: {reason}"])
    (tmp_path / "other.csv").write_text("id,prompt\n3,good\n")
    (tmp_path / "none.csv").write_text("id,prompt\n")
    ended = batchinfer("plan", job)
    assert ended.code == 0
    assert "warning: 2 bad rows in " in ended.err
    assert "line 2 is not valid UTF-8" in ended.err
    assert "has no column" not in ended.err


def test_a_header_alone_is_an_input_without_rows(tmp_path):
    (tmp_path / "in.csv").write_text("id,prompt,note\n")
    ended = batchinfer("run", write_job(tmp_path, input={"files": ["in.csv"]}, output={"keep_columns": ["note"]}))
    assert (ended.code, outputs(tmp_path / "run")) == (0, {"in.parquet": []})
    assert f"warning: the input has no rows; {tmp_path}/in.csv has columns, but nothing below them" in ended.err
    (tmp_path / "other.csv").write_text("id,text\n")
    with pytest.raises(ConfigErrors, match=r"input\.prompt names 'prompt', which no input shard has"):
        check_columns(make_job(tmp_path / "other.csv"), find_shards([str(tmp_path / "other.csv")]), ["prompt"])


def test_ids_and_kept_values_that_are_all_empty_in_csv_are_null(tmp_path):
    (tmp_path / "in.csv").write_text("id,prompt,note\n,hello,\n,you,\n")
    (shard,), kept = check(tmp_path, keep=["note"])
    assert kept == [pa.field("note", pa.null())]
    (batch,) = read_batches(shard, ["id", "note"])
    assert batch["id"].null_count == batch["note"].null_count == 2
    assert errors(tmp_path / "in.csv") == [None, None]


# ---- files without rows, columns without values

CHAT = [{"role": "user", "content": "hello"}]
EMPTY = {
    "integers": pa.array([], pa.int32()),
    "doubles": pa.array([], pa.float64()),
    "nulls": pa.array([], pa.null()),
    "structs": pa.array([], pa.struct([("x", pa.int64())])),
}


@pytest.mark.parametrize("kind", EMPTY)
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_file_without_rows_clashes_with_nothing(kind, suffix, tmp_path):
    rows = pa.table({"id": [1], "prompt": ["x"], "note": [["a"]]})
    empty = pa.table(dict.fromkeys(["id", "prompt", "note"], EMPTY[kind]))
    for name, table in (("a", rows), ("z", empty)):
        path = str(tmp_path / f"{name}.{suffix}")
        if suffix == "parquet":
            pq.write_table(table, path)
        else:
            with pa.ipc.new_file(path, table.schema) as file:
                file.write_table(table)
                if name == "z":
                    file.write_batch(pa.record_batch([EMPTY[kind]] * 3, schema=table.schema))
    shards, kept = check(tmp_path, keep=["note"])
    assert [shard.num_rows for shard in shards] == [1, 0]
    assert kept == [pa.field("note", pa.list_(pa.string()))]
    assert id_type(shards, "id") == pa.int64()
    for shard in shards:
        for batch in read_batches(shard, ["note"]):
            assert cast_kept_columns(batch, kept, shard).schema.types == [pa.list_(pa.string())]


def test_a_run_passes_over_the_types_of_a_file_without_rows(tmp_path):
    (tmp_path / "prompts").mkdir()
    note = pa.array([["x"], None])
    pq.write_table(pa.table({"id": [1, 2], "m": [CHAT, CHAT], "note": note}), tmp_path / "prompts" / "a.parquet")
    empty = pa.table({"id": pa.array([], pa.string()), "m": EMPTY["integers"], "note": EMPTY["integers"]})
    pq.write_table(empty, tmp_path / "prompts" / "z.parquet")
    job = write_job(tmp_path, input={"prompt": None, "messages": "m"}, output={"keep_columns": ["note"]})
    ended = batchinfer("run", job)
    assert (ended.code, "warning" in ended.err) == (0, False), ended.err
    found = outputs(tmp_path / "run")
    assert [(row["id"], row["status"], row["note"]) for row in found["a.parquet"]] == [
        (1, "ok", ["x"]),
        (2, "ok", None),
    ]
    assert found["z.parquet"] == []
    schemas = [pq.read_schema(tmp_path / "run" / "outputs" / f"{name}.parquet") for name in "az"]
    assert schemas[0].equals(schemas[1])


NOTES = {
    "lists": pa.array([["a"], None]),
    "structs": pa.array([{"a": 1}, None]),
    "maps": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int64())),
    "texts": pa.array(["a", None]),
    "json": pa.array(["{}", None]).cast(pa.json_()),
}


@pytest.mark.parametrize("kind", NOTES)
def test_a_column_of_nulls_goes_with_any_type(kind, tmp_path):
    for name, note, ids in (("a", pa.nulls(2), pa.nulls(2)), ("b", NOTES[kind], pa.array([1, 2]))):
        pq.write_table(pa.table({"id": ids, "prompt": ["x", "y"], "note": note}), tmp_path / f"{name}.parquet")
    shards, kept = check(tmp_path, keep=["note"])
    found = [
        cast_kept_columns(batch, kept, shard)["note"] for shard in shards for batch in read_batches(shard, ["note"])
    ]
    assert [part.to_pylist() for part in found] == [[None, None], NOTES[kind].to_pylist()]
    assert id_type(shards, "id") == pa.int64()


def test_prompts_of_a_column_of_nulls_are_error_rows(tmp_path):
    for name, chats in (("a", pa.nulls(2)), ("b", [CHAT, CHAT])):
        pq.write_table(pa.table({"m": chats}), tmp_path / f"{name}.parquet")
    job = make_job(f"{tmp_path}/*.parquet", messages="m")
    check_columns(job, find_shards(job.input.files), ["m"])
    found = {
        name: errors(tmp_path / f"{name}.parquet", make_job(tmp_path / f"{name}.parquet", messages="m"))
        for name in "ab"
    }
    assert found == {"a": ["m is null"] * 2, "b": [None] * 2}


# ---- line ends

ODD = ["a\u2028b", "a\u2029b", "a\x85b", "a\x0bb\x0cc", "\ufeffa", "a\x1cb\x1db\x1eb", "last"]
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def file_of(form, texts, end):
    if form == "csv":
        return "prompt" + end + "".join(f'"{text}"{end}' for text in texts)
    if form == "jsonl":
        return "".join(json.dumps({"prompt": text}, ensure_ascii=False) + end for text in texts)
    return "".join(json.dumps(chat(f"q{place}", text), ensure_ascii=False) + end for place, text in enumerate(texts))


@pytest.mark.parametrize("form", ["jsonl", "csv", "openai"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("is_bare", [False, True], ids=["", "mark and no last end"])
def test_only_line_feeds_end_lines(form, end, is_bare, tmp_path):
    path = tmp_path / ("in.csv" if form == "csv" else "in.jsonl")
    content = file_of(form, ODD, end)
    path.write_bytes(BYTE_ORDER_MARK + content.removesuffix(end).encode() if is_bare else content.encode())
    job = make_job(path, format="openai") if form == "openai" else make_job(path)
    _, rows = checked(path, job)
    assert [row["error"] for row in rows] == [None] * len(ODD)
    tokenizer = load_tokenizer(RANDOM_MODEL)
    found = [tokenizer.decode(row["token_ids"]) for row in rows]
    assert all(text in prompt for text, prompt in zip(ODD, found, strict=True))
    if form != "openai":
        assert found == ODD


# ---- folders that name values


@pytest.mark.parametrize(
    ("folder", "value"),
    [
        ("part=007", "007"),
        ("part=abc", "abc"),
        ("part=", ""),
        ("part=__HIVE_DEFAULT_PARTITION__", None),
        ("part=a%20b", "a b"),
        ("part=a%2520b", "a%20b"),
        ("part=a=b", "a=b"),
        ("part=é", "é"),
    ],
)
def test_the_value_of_a_folder_is_its_text(folder, value, tmp_path):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "a.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "part=other").mkdir()
    pq.write_table(pa.table({"prompt": ["x"], "part": ["its own"]}), tmp_path / "part=other" / "a.parquet")
    shards = find_shards([str(tmp_path)], roles={"prompt": "text"})
    kept = kept_fields(shards, ["part"])
    assert kept == [pa.field("part", pa.string())]
    found = {shard.path: next(read_batches(shard, ["part"]))["part"].to_pylist() for shard in shards}
    assert found == {
        str(tmp_path / folder / "a.jsonl"): [value],
        str(tmp_path / "part=other" / "a.parquet"): ["its own"],
    }


@pytest.mark.parametrize(("delimiter", "words"), [(";", "semicolons"), ("|", "bars"), ("\t", "tabs")])
def test_fields_with_another_delimiter_are_told_as_such(tmp_path, delimiter, words):
    (tmp_path / "in.csv").write_text(f"id{delimiter}prompt\n1{delimiter}Hello\n")
    told = f"its fields seem to be separated by {words}: write it with commas, or with tabs as *.tsv"
    assert told in batchinfer("plan", write_job(tmp_path, input={"files": ["in.csv"]})).err
    made = batchinfer("init", tmp_path / "in.csv", "--model", RANDOM_MODEL, "-o", tmp_path / "new.toml")
    assert (made.code, made.out) == (2, "")
    assert told in made.err


def test_a_star_names_no_columns(tmp_path):
    (tmp_path / "in.csv").write_text("id,prompt,note\n1,Hello,x\n")
    with pytest.raises(
        ConfigErrors, match=r"names '\*', which no shard has; write the names of the columns: id, prompt"
    ):
        check(tmp_path, keep=["*"])
