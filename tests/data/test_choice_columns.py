"""Choices that follow each row's prompt: their tokens, and what is wrong with one as a sentence at its row."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.config import JobConfig, ModelPart
from batchinfer.data.prompts import PromptLimits
from batchinfer.data.shards import find_shards
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.data.tokenizer_process import TokenizerProcess
from batchinfer.data.validate import tokenize_shard
from support.hostile import SAMPLE_MODEL, model_folder
from support.jobs import batchinfer, write_job, write_shard
from support.open_encoders import encoders_of

TEXTS = pa.list_(pa.string())
IDS = pa.list_(pa.list_(pa.int64()))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(SAMPLE_MODEL)


def make_job(sampling: dict | None = None, /, **columns) -> JobConfig:
    return JobConfig.model_validate(
        {
            "input": {"files": ["x"], "choices": "choices", **(columns or {"prompt": "prompt"})},
            "output": {"dir": "x"},
            "model": {"path": str(SAMPLE_MODEL)},
            "sampling": {"max_tokens": 0, **(sampling or {})},
        }
    )


def check(folder, columns: dict, job: JobConfig | None = None, window: int = 2048) -> list[dict]:
    """The rows of tokens/<shard>.parquet for a shard of these columns."""
    job = job or make_job()
    pq.write_table(pa.table(columns), folder / "in.parquet")
    (shard,) = find_shards([str(folder / "in.parquet")])
    limits = PromptLimits(window, vocab_size=1024)
    tokenize_shard(shard, job, encoders_of(job, window=window), limits, folder / "tokens.parquet", lambda rows: None)
    return pq.read_table(folder / "tokens.parquet").to_pylist()


def errors_of(rows: list[dict]) -> list[str | None]:
    assert all((row["choices"] is None) == (row["error"] is not None) for row in rows)
    return [row["error"] for row in rows]


@pytest.mark.parametrize(
    "kind",
    [
        TEXTS,
        pa.large_list(pa.large_string()),
        pa.list_view(pa.string()),
        pa.list_(pa.string_view()),
        pa.list_(pa.dictionary(pa.int32(), pa.string())),
    ],
)
def test_a_choice_has_the_tokens_of_its_text_alone(tmp_path, tokenizer, kind):
    prompts = ["The capital is", "Is it so?", "The capital is"]
    choices = [[" Paris", " Rome"], [" yes", " no", " perhaps, who knows"], [" Rome"]]
    rows = check(tmp_path, {"id": [1, 2, 3], "prompt": prompts, "choices": pa.array(choices, kind)})
    assert errors_of(rows) == [None] * 3
    assert [row["token_ids"] for row in rows] == tokenizer.encode_prompts(prompts)
    assert [row["choices"] for row in rows] == [[tokenizer.encode_piece(text) for text in texts] for texts in choices]
    assert tokenizer.encode_prompts([" Rome"]) != [tokenizer.encode_piece(" Rome")]  # it has a beginning to leave out
    assert [(row["n"], row["max_tokens"], row["sampling"]) for row in rows] == [(1, 0, None)] * 3


def test_choices_follow_prompts_of_each_kind(tmp_path, tokenizer):
    choices = pa.array([[" a", " b"]], TEXTS)
    chat = [{"role": "user", "content": "Which?"}]
    columns = {"id": [1], "q": ["Which?"], "chat": [chat], "ids": [[1, 2, 3]], "choices": choices}
    expected = [tokenizer.encode_piece(text) for text in (" a", " b")]
    (whole,) = tokenizer.encode_chats([chat])
    for kind, token_ids in (
        ({"prompt": "q"}, None),
        ({"template": "{{ q }}!"}, None),
        ({"messages": "chat"}, whole),
        ({"token_ids": "ids"}, [1, 2, 3]),
    ):
        (row,) = check(tmp_path, columns, make_job(**kind))
        assert (row["error"], row["choices"]) == (None, expected)
        assert token_ids in (None, row["token_ids"])


@pytest.mark.parametrize("kind", [IDS, pa.list_(pa.large_list(pa.uint16())), pa.list_(pa.list_(pa.uint64()))])
def test_choices_and_prompts_of_token_ids_need_no_worker(tmp_path, monkeypatch, kind):
    def no_fork(process):
        raise AssertionError("nothing is to be encoded")

    monkeypatch.setattr(TokenizerProcess, "fork", no_fork)
    choices = pa.array([[[7], [8, 9]], [[1023]]], kind)
    rows = check(tmp_path, {"t": [[1, 2], [3]], "choices": choices}, make_job(token_ids="t"))
    assert [row["choices"] for row in rows] == [[[7], [8, 9]], [[1023]]]
    assert [row["token_ids"] for row in rows] == [[1, 2], [3]]


def test_bad_choices_are_rows_with_a_sentence(tmp_path):
    choices = [[" a", " b"], None, [], [" a", None], ["", " a"], [" a", "far too long " * 9000], [" a"]]
    rows = check(tmp_path, {"prompt": ["x"] * 6 + [None], "choices": pa.array(choices, TEXTS)})
    assert errors_of(rows) == [
        None,
        "choices is null",
        "choices is an empty list",
        "choices[1] is null",
        "choices[0] has no tokens",
        "choices[1] has 117000 characters, more than fit into 2048 tokens",
        "prompt is null",
    ]


def test_bad_choices_of_token_ids_are_rows_with_a_sentence(tmp_path):
    choices = [[[5], [1024]], [[-1]], [[3, None]], [[3], []], [None], [], None, [[0], [1023]]]
    rows = check(tmp_path, {"t": [[1]] * 8, "choices": pa.array(choices, IDS)}, make_job(token_ids="t"))
    assert errors_of(rows) == [
        "choices[1] cannot be taken: a token id is 1024, which is not in [0, 1024)",
        "choices[0] cannot be taken: a token id is -1, which is not in [0, 1024)",
        "choices[0] cannot be taken: a token id is null",
        "choices[1] has no tokens",
        "choices[0] is null",
        "choices is an empty list",
        "choices is null",
        None,
    ]


def test_a_choice_that_is_not_utf8_is_a_bad_row(tmp_path):
    offsets = pa.array([0, 1, 3], pa.int32()).buffers()[1]
    texts = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a\xff\xfe")])
    choices = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), texts)
    assert errors_of(check(tmp_path, {"prompt": ["x", "x"], "choices": choices})) == [
        None,
        "choices[0] cannot be taken: it is not valid UTF-8",
    ]


def test_a_choice_that_breaks_the_tokenizer_costs_its_row(tmp_path):
    folder = model_folder(tmp_path / "model", split="(a+)+$")
    job = make_job().model_copy(update={"model": ModelPart(path=str(folder))})
    choices = pa.array([["aaa", "b"], ["aaa", "a" * 41 + "!"], ["b"]], TEXTS)
    first, second, third = check(tmp_path, {"prompt": ["x", "x", "x"], "choices": choices}, job)
    assert (first["error"], third["error"]) == (None, None)
    assert second["error"].startswith("choices[1] cannot be taken: the tokenizer fails on it: PanicException")


def test_prompt_and_choice_fit_into_the_window_to_its_last_token(tmp_path):
    prompts = [[1] * 10, [1] * 9, [1] * 6, [1] * 7, [1] * 11]
    choices = pa.array([[[2]], [[2]], [[2], [3] * 4], [[2], [3] * 4], [[2]]], IDS)
    rows = check(tmp_path, {"t": prompts, "choices": choices}, make_job(token_ids="t"), window=10)
    more = "are more than the window of 10"
    assert errors_of(rows) == [
        f"choices[0] has 1 token, which with the prompt's 10 {more}",
        None,
        None,
        f"choices[1] has 4 tokens, which with the prompt's 7 {more}",
        "the prompt has 11 tokens, more than the window of 10",
    ]


def test_a_prompt_that_generates_nothing_may_fill_the_window(tmp_path):
    job = make_job({"prompt_logprobs": 0}, token_ids="t", choices=None, sampling="how")
    columns = {"t": [[1] * 10, [1] * 11, [1] * 10], "how": [None, None, {"max_tokens": 1}]}
    rows = check(tmp_path, columns, job, window=10)
    assert [row["error"] for row in rows] == [
        None,
        "the prompt has 11 tokens, more than the window of 10",
        "the prompt has 10 tokens, no room for a new one in the window of 10",
    ]
    assert [row["choices"] for row in rows] == [None] * 3


def test_a_row_cannot_ask_for_new_tokens_or_samples(tmp_path):
    how = [{"max_tokens": 3}, {"n": 2}, {"max_tokens": 0, "n": 1}, {"logprobs": 1}]
    columns = {"prompt": ["x"] * 4, "choices": pa.array([[" a"]] * 4, TEXTS), "how": how}
    sentence = "how.n and .max_tokens must be 1 and 0: a job with input.choices generates nothing"
    assert errors_of(check(tmp_path, columns, make_job(prompt="prompt", sampling="how"))) == [sentence] * 2 + [None] * 2


@pytest.mark.parametrize(
    ("column", "told"),
    [
        (pa.array(["a", "b"]), "column 'choices' is string, but must be a list of texts, or of lists of integers"),
        (pa.array([[1.5], [2.5]]), "column 'choices' is list<element: double>, but must be a list of texts"),
        (pa.array([[1], [2]]), "column 'choices' is list<element: int64>, but must be a list of texts"),
        (pa.nulls(2), "choices is null"),
        (pa.array([[None], [None]], pa.list_(pa.null())), "choices[0] is null"),
        (pa.array([[[]], [[]]], pa.list_(pa.list_(pa.null()))), "choices[0] has no tokens"),
    ],
)
def test_a_column_of_another_type_is_named_at_each_row(tmp_path, column, told):
    rows = check(tmp_path, {"prompt": ["x", "x"], "choices": column})
    assert all(error.startswith(told) for error in errors_of(rows))


def test_control_tokens_in_choices_are_treated_as_those_of_prompts(tmp_path, tokenizer):
    token = "<｜User｜>"
    assert tokenizer.token_id(token) is not None
    columns = {"prompt": ["x", "x", token], "choices": pa.array([[" a", f" b{token}"], [" a"], [" a"]], TEXTS)}
    found = {how: check(tmp_path, columns, make_job(prompt="prompt", control_tokens=how)) for how in ("parse", "text")}
    assert found["parse"][0]["choices"][1][-1] == tokenizer.token_id(token)
    as_text = found["text"][0]["choices"][1]
    assert tokenizer.token_id(token) not in as_text
    assert tokenizer.decode(as_text) == f" b{token}"
    assert [row["control_tokens"] for row in found["parse"]] == [True, False, True]
    rows = check(tmp_path, columns, make_job(prompt="prompt", control_tokens="error"))
    sentence = f"the text holds the control token {token}, which input.control_tokens = 'error' refuses"
    assert errors_of(rows) == [f"choices[1] cannot be taken: {sentence}", None, sentence]


def test_many_choices_keep_their_rows(tmp_path, tokenizer):
    choices = [[f" {row} {'or more ' * (row % 5)}{index}" for index in range(row % 4)] for row in range(3000)]
    rows = check(tmp_path, {"prompt": [f"row {row}" for row in range(3000)], "choices": pa.array(choices, TEXTS)})
    assert errors_of(rows) == ["choices is an empty list" if row % 4 == 0 else None for row in range(3000)]
    for row, texts in enumerate(choices):
        assert rows[row]["choices"] == ([tokenizer.encode_piece(text) for text in texts] or None)


def test_a_misspelt_column_is_refused_before_anything_is_planned(tmp_path):
    write_shard(tmp_path / "prompts" / "a.parquet", {"id": [1], "prompt": ["x"], "choices": pa.array([[" a"]], TEXTS)})
    job = write_job(tmp_path, input={"choices": "chioces"}, sampling={"max_tokens": 0})
    ended = batchinfer("plan", job)
    assert ended.code == 2
    assert (
        "input.choices names 'chioces', which no input shard has; the first shard has id, prompt, choices" in ended.err
    )
