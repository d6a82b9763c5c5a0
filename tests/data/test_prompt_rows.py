"""Shards in, checked rows out: every kind of bad column and bad row."""

from __future__ import annotations

import json
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.config import ModelPart
from batchinfer.data.kept_fields import kept_fields
from batchinfer.data.parquet import read_rows, table_writer
from batchinfer.data.prompts import PromptLimits
from batchinfer.data.shards import find_shards
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.records import sampling_from_json
from support.prompt_tables import (
    MESSAGE,
    SAMPLE,
    check,
    copy_with,
    make_job,
    one_shard,
    tokenize,
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(SAMPLE / "model")


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
    drops = {"type": "Replace", "pattern": {"String": "\u00ad"}, "content": ""}
    folder = copy_with(tmp_path, {"post_processor": None, "normalizer": drops})
    job = make_job().model_copy(update={"model": ModelPart(path=str(folder))})
    _, rows = check(tmp_path, {"id": [1], "prompt": ["\u00ad"]}, job)
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
    contents = [None, ""]
    chats = [[{"role": "assistant", "content": content, "tool_calls": ["f"]}] for content in contents]
    _, rows = check(tmp_path, {"id": [1, 2], "m": pa.array(chats, pa.list_(message))}, make_job(messages="m"))
    # this template appends the content to a text; none is "" there, as with vLLM
    assert [row["error"] for row in rows] == [None, None]
    assert rows[0]["token_ids"] == rows[1]["token_ids"]


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
        ({"temprature": 0.5}, "s.temprature is not a sampling key (`batchinfer schema` lists them)"),
        ({"guided_choice": "x"}, 's.guided_choice is not a sampling key; write "structured_outputs": {"choice": […]}'),
        ({"tensor_parallel_size": 2}, "s.tensor_parallel_size is not a sampling key (`batchinfer schema` lists them)"),
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
        ({"structured_outputs": {"json": 5}}, "s.structured_outputs.json is 5, but it should be a JSON schema"),
        (
            {"structured_outputs": {"choice": ["x", ""]}},
            "s.structured_outputs.choice.1 is '', but it should have at least 1",
        ),
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
