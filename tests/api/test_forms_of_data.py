"""Rows and columns as dicts, one text, one chat: the forms in which people have their prompts at hand."""

import collections

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import batchinfer
from batchinfer.api import prompts
from support.paths import RANDOM_MODEL

USER = {"role": "user", "content": "What is 2 plus 3?"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "What is 2 plus 3?"}]}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
OTHERS = {"id", "tools", "sampling", "choices", "chat_template_kwargs"}


def read(data, **named):
    """Return the columns of prompts, and the rows as a job reads them."""
    reader, columns = prompts.reader_of(data, named, OTHERS)
    return columns, reader.read_all().to_pylist()


def refusal(data, **named):
    with pytest.raises((batchinfer.InputError, batchinfer.ConfigError)) as raised:
        read(data, **named)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("one", ["What is 2 plus 3?", [USER], (USER, CALL), [PARTS]])
def test_one_text_and_one_chat_are_one_row(one):
    assert read(one) == read([one])
    assert len(read(one)[1]) == 1


def test_rows_as_dicts_have_the_columns_of_all_rows():
    rows = [{"prompt": "a"}, {"prompt": "b", "id": "x", "n": 1}, None]
    assert read(rows) == (
        {"prompt": "prompt"},
        [
            {"prompt": "a", "id": None, "n": None},
            {"prompt": "b", "id": "x", "n": 1},
            {"prompt": None, "id": None, "n": None},
        ],
    )
    assert read([{"prompt": "a"}, {"prompt": "b"}])[1] == [{"id": 0, "prompt": "a"}, {"id": 1, "prompt": "b"}]


@pytest.mark.parametrize("named", [{}, {"user": "prompt"}, {"messages": "prompt"}, {"token_ids": "prompt"}])
@pytest.mark.parametrize(
    "frame",
    [
        pd.DataFrame({"id": [], "prompt": []}),
        pd.DataFrame({"prompt": [[USER]], "n": [1]})[:0],
        pd.DataFrame(columns=["id", "prompt"]),
        pl.DataFrame({"prompt": []}),
    ],
    ids=["doubles", "objects", "columns alone", "polars"],
)
def test_a_frame_without_rows_has_no_type_for_its_prompts(frame, named):
    reader, columns = prompts.reader_of(frame, named, OTHERS)
    assert columns == (named or {"prompt": "prompt"})
    assert reader.schema.field("prompt").type == pa.null()
    assert "id" not in reader.schema.names or reader.schema.field("id").type == pa.null()
    assert reader.read_all().num_rows == 0


def test_other_columns_of_a_frame_without_rows_keep_their_types():
    frame = pd.DataFrame({"prompt": ["a"], "score": [0.5]})[:0]
    assert prompts.reader_of(frame, {}, OTHERS, ["score"])[0].schema.field("score").type == pa.float64()
    assert "it has prompt" in refusal(pl.DataFrame({"prompt": []}, schema={"prompt": pl.Int64}))


def test_empty_lists_alone_are_token_ids_unless_they_are_named():
    assert read([[], None]) == ({"token_ids": "token_ids"}, [{"id": 0, "token_ids": []}, {"id": 1, "token_ids": None}])
    assert read([[]], messages="chat") == ({"messages": "chat"}, [{"id": 0, "chat": "[]"}])
    assert refusal([[]], user="prompt") == "user is 'prompt', but data is a list of token_ids; leave user out"


def test_chats_in_rows_are_those_of_a_list_message_by_message():
    chats = [[USER, CALL], [PARTS], None]
    columns, rows = read([{"messages": chat, "expected": "5"} for chat in chats])
    assert columns == {"messages": "messages"}
    assert [row["messages"] for row in rows] == [row["messages"] for row in read(chats)[1]]


def test_a_row_may_have_a_role_without_being_a_message():
    assert read([{"role": "doctor", "question": "Why?"}])[0] == {"prompt": "question"}
    assert read([{"role": "doctor", "content": "c", "prompt": "Why?"}])[0] == {"prompt": "prompt"}


def test_columns_as_a_dict_are_a_table():
    rows = [{"id": "x", "prompt": "a"}, {"id": "y", "prompt": "b"}]
    for columns in (
        {"id": ["x", "y"], "prompt": ["a", "b"]},
        {"id": np.array(["x", "y"]), "prompt": pa.array(["a", "b"])},
        {"id": pd.Series(["x", "y"]), "prompt": pl.Series(["a", "b"])},
    ):
        assert read(columns) == ({"prompt": "prompt"}, rows)
    assert read({"prompt": pd.Series(["a", None])})[1][1] == {"id": 1, "prompt": None}
    assert read({"prompt": []}) == ({"prompt": "prompt"}, [])
    assert read({"ids": [np.array([1, 2]), np.array([3])]})[0] == {"token_ids": "ids"}


def test_arrays_are_lists():
    assert read(np.array(["a", "b"])) == read(["a", "b"])
    assert read(np.array([[1, 2], [3, 4]])) == read([[1, 2], [3, 4]])


def test_arrays_inside_of_chats_are_lists():
    """As pandas reads lists of lists from Parquet, in frame["messages"].tolist() or frame.to_dict("records")."""
    chat = np.array([{**PARTS, "content": np.array(PARTS["content"])}, {**USER, "n": np.int64(3)}])
    expected = read([[PARTS, {**USER, "n": 3}]])
    assert read([chat]) == expected
    assert read([{"messages": chat}]) == expected
    assert "Object of type datetime is not JSON serializable" in refusal(
        [[{**USER, "n": np.datetime64("2026-01-31", "s")}]]
    )


def test_padded_token_ids_are_refused():
    """What transformers' tokenizers give; without padding all of the mask is 1."""
    encoded = {"input_ids": [[0, 0, 5], [6, 7, 8]], "attention_mask": [[0, 0, 1], [1, 1, 1]]}
    arrays = pl.DataFrame({name: np.array(values) for name, values in encoded.items()})  # lists of a fixed size
    for data in (encoded, pd.DataFrame(encoded), pa.table(encoded), arrays):
        told = refusal(data)
        assert "'attention_mask' of data has zeros, so the token ids in 'input_ids' are padded" in told
        assert "padded" in refusal(data, token_ids="input_ids")
    whole = encoded | {"attention_mask": [[1, 1, 1], [1, 1, 1]]}
    assert [row["input_ids"] for row in read(whole)[1]] == encoded["input_ids"]
    texts = encoded | {"prompt": ["a", "b"]}
    assert [row["prompt"] for row in read(texts, prompt="prompt")[1]] == ["a", "b"]


def test_other_sequences_are_lists():
    assert read(collections.deque(["a", None])) == read(["a", None])
    assert read({"prompt": collections.UserList(["a"])}) == read({"prompt": ["a"]})
    assert refusal({1: "a"}.values()) == "data is a dict_values, which holds no prompts; give list(data)"
    assert "row 0 of data is a int that is no prompt" in refusal(range(3))
    assert "data is a bytes, which holds no prompts; give a list of texts" in refusal(b"a")


def test_what_a_row_has_for_the_job_is_json_text():
    tools, sampling = [{"type": "function", "function": {"name": "f"}}], {"n": 2}
    _, rows = read([{"prompt": "a", "tools": tools, "sampling": sampling}, {"prompt": "b"}])
    assert rows[0]["tools"] == '[{"type": "function", "function": {"name": "f"}}]'
    assert (rows[0]["sampling"], rows[1]["sampling"]) == ('{"n": 2}', None)


def test_a_value_that_arrow_cannot_hold_counts_only_if_the_job_reads_it():
    rows = [{"prompt": "a", "x": 1}, {"prompt": "b", "x": "one"}]
    assert read(rows, prompt="prompt")[1] == [{"id": 0, "prompt": "a"}, {"id": 1, "prompt": "b"}]
    assert "column 'x' of data cannot be taken: Arrow cannot hold its values" in refusal(rows, prompt="x")
    assert "column 'x' of data cannot be taken" in refusal(rows)


@pytest.mark.parametrize("make", [pd.DataFrame, pl.DataFrame, pa.table, dict])
def test_a_frame_with_messages_and_texts_takes_the_messages(make):
    frame = make({"id": [1], "task": ["sum"], "messages": [[USER]], "expected": ["5"]})
    assert prompts.reader_of(frame, {}, OTHERS)[1] == {"messages": "messages"}


def test_columns_with_usual_names_come_first():
    for names, expected in (
        (("answer", "question"), {"prompt": "question"}),
        (("text", "prompt"), {"prompt": "prompt"}),
    ):
        assert read({name: ["a"] for name in names})[0] == expected
    assert refusal({"a": ["x"], "b": ["y"]}).endswith("name one: prompt='a', prompt='b'")
    assert "name one: prompt='p', messages='chosen'" in refusal({"p": ["x"], "chosen": [[USER]], "rejected": [[USER]]})


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({}, "data has no columns"),
        ([{}], "data has no columns"),
        (USER, "data is one message; give the list of messages of a chat: [data]"),
        ({"prompt": np.str_("a")}, "'prompt' of data is a str_, not a column of values"),
        ({"prompt": ["a", "b"], "x": pd.Series([1, "a"])}, "column 'x' of data cannot be taken: Arrow cannot hold"),
        ({"prompt": "a"}, "'prompt' of data is a str, not a column of values; give one row as [data]"),
        ({"messages": [USER]}, "'messages' of data is a list, not a column of values; give one row as [data]"),
        ({"prompt": ["a", "b"], "n": [1]}, "different numbers of values ('prompt': 2, 'n': 1)"),
        ([{1: "a"}], "data has a column 1; give the columns names that are texts"),
        (["a", {"prompt": "a"}], "row 0 of data is a str, but other rows are dicts"),
        ((text for text in "ab"), "data is a generator, which holds no prompts; give list(data)"),
    ],
)  # fmt: skip
def test_other_forms_are_refused_with_what_to_write(data, sentence):
    assert sentence in refusal(data)


def test_all_forms_have_the_answers_of_a_list():
    text, chat = USER["content"], '[{"role": "user", "content": "What is 2 plus 3?"}]'
    with batchinfer.Model(RANDOM_MODEL, dtype="float32") as model:
        expected = model.generate([text], max_tokens=6)["text"].to_pylist()
        for data in (
            text,
            [USER],
            [{"prompt": text}],
            [{"messages": [USER], "expected": "5"}],
            {"question": [text], "answer": ["5"]},
            pl.DataFrame({"messages": [[USER]], "task": ["sum"]}),
            pa.table({"messages": [chat], "task": ["sum"]}),
        ):
            assert model.generate(data, max_tokens=6)["text"].to_pylist() == expected
        raw = model.generate(pa.table({"messages": [chat]}), raw=True, max_tokens=6)
        assert raw.equals(model.generate([chat], raw=True, max_tokens=6).set_column(0, "id", raw["id"]))


def test_the_name_of_a_file_is_no_question(tmp_path):
    file = tmp_path / "questions.csv"
    assert read(str(file))[1][0]["prompt"] == str(file)  # no such file: a text like others
    file.write_text("id,question\n1,Why?\n")
    assert "questions.csv', the name of a file; give its rows, such as pandas.read_csv" in refusal(str(file))
    assert read([str(file)])[1][0]["prompt"] == str(file)
