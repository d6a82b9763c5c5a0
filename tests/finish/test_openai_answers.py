"""Answers in OpenAI's form: what its own types say of them, and that they are the rows of the Parquet file."""

from __future__ import annotations

import json
import math
import re
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import BaseModel, ConfigDict

from batchinfer.data.chat import ChatTemplate
from batchinfer.data.tokenizer import OWN_TEMPLATES, load_tokenizer
from batchinfer.finish.answers import AnswerReader
from batchinfer.finish.openai_answers import OpenAIAnswers
from batchinfer.finish.response_object import response_object
from batchinfer.records import Shard
from support.checked_rows import make_job
from support.faults import fail_some
from support.jobs import batchinfer, output_bytes, outputs, write_job, write_shard
from support.openai_batches import (
    CHAT,
    DOCUMENTED,
    FLAT_WEATHER,
    MODEL,
    WEATHER,
    chat,
    completion,
    read_lines,
    response,
    write_batch,
)
from support.paths import RANDOM_MODEL

LOGPROBS = ["message.output_text.logprobs"]
CALL = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>'
OF_GLM = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>10001</arg_value>\n</tool_call>"
FLAG = {
    "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False
}  # fmt: skip
LINES: list[Any] = [
    chat("plain"),
    chat("one", temperature=1, seed=5),
    chat("several", n=3, temperature=1.5, max_completion_tokens=9),
    chat("scored", logprobs=True, top_logprobs=4, max_tokens=5, temperature=1),
    chat("scored alone", logprobs=True, max_tokens=5),
    chat("several scored", n=2, logprobs=True, top_logprobs=2, temperature=2),
    chat("until", guided_choice=["Hello. It rains."], stop=[" It"]),
    chat(
        "schema", response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": FLAG}}, max_tokens=400
    ),
    chat("called", tools=[WEATHER], guided_choice=[CALL], max_tokens=200),
    chat("said and called", tools=[WEATHER], guided_choice=[f"I look.{CALL}"], max_tokens=200),
    chat("refused", images=[]),
    chat("called with digits", tools=[WEATHER], guided_choice=[OF_GLM], max_tokens=200),
    chat(
        "called by none", tools=[{"type": "function", "function": {"name": "g"}}], guided_choice=[CALL], max_tokens=200
    ),
    chat("not to call", tools=[WEATHER], tool_choice="none", guided_choice=[f"So: {CALL}"], max_tokens=200),
    completion("text"),
    completion("text scored", logprobs=3, max_tokens=5, temperature=1),
    completion("text alone", logprobs=0, n=2, max_tokens=5, temperature=1),
    completion("ids", [5, 6, 7], prompt_logprobs=1),
    "{",
    completion("also refused", "Hello", echo=True),
    # characters of several tokens, and the least log-probability
    chat("emoji", guided_choice=["“😊”"], logprobs=True, top_logprobs=5, max_tokens=40),
    *(chat(f"emoji cut {n}", guided_choice=["😊"], logprobs=True, max_tokens=n) for n in (1, 2, 3)),
    chat("forced", guided_choice=["yes", "no"], logit_bias={"7": -100}, logprobs=True, top_logprobs=20, max_tokens=9),
    *(chat(f"whole {n}", max_tokens=n, ignore_eos=True) for n in (1, 5)),
    response("r plain", instructions="Be brief.", metadata={"key": "value"}),
    response("r cut", max_output_tokens=2, ignore_eos=True),
    response("r scored", include=LOGPROBS, top_logprobs=3, max_output_tokens=5, temperature=1, seed=5),
    response("r schema", text={"format": {"type": "json_schema", "name": "n", "schema": FLAG}}, max_output_tokens=400),
    response("r called", tools=[FLAT_WEATHER], structured_outputs={"choice": [CALL]}, max_output_tokens=200),
    response("r both", tools=[FLAT_WEATHER], structured_outputs={"choice": [f"I look.{CALL}"]}, max_output_tokens=200),
    response("r refused", previous_response_id="resp_1"),
    chat("embedded") | {"url": "/v1/embeddings"},
    {"custom_id": "bare", "body": {"model": MODEL, "input": "Hello"}},
]
BAD = ["refused", None, "also refused", "r refused", "embedded"]
PARTS: dict[str, Any] = {
    "input": {"files": ["batch.jsonl"], "format": "openai", "prompt": None},
    "output": {"format": "openai"},
    "sampling": {"max_tokens": 12},
}


class Envelope(BaseModel):
    """A line of an output or error file, as https://platform.openai.com/docs/api-reference/batch/request-output."""

    class Response(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True)
        status_code: int
        request_id: str
        body: dict[str, Any]

    class Error(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True)
        code: str
        message: str

    model_config = ConfigDict(extra="forbid", strict=True)
    id: str
    custom_id: str | None
    response: Response | None
    error: Error | None


Answer = ChatCompletion | Completion | Response
KINDS = {"chat.completion": ChatCompletion, "text_completion": Completion, "response": Response}


def answered(path: Path) -> dict[str, Any]:
    """The answers in a file by custom_id, each parsed by the types of the openai package without changing a value."""
    found: dict[str, Answer] = {}
    for text in path.read_bytes().splitlines():
        envelope = Envelope.model_validate_json(text)
        assert envelope.error is None
        assert envelope.response is not None
        assert envelope.response.status_code == 200
        body = envelope.response.body
        parsed = KINDS[body["object"]].model_validate_json(json.dumps(body), strict=True)
        assert json.loads(parsed.model_dump_json(exclude_unset=True)) == body
        found[envelope.custom_id or ""] = parsed
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of a finished run of LINES."""
    folder = tmp_path_factory.mktemp("openai")
    write_batch(folder / "batch.jsonl", LINES)
    ended = batchinfer("run", write_job(folder, **PARTS))
    assert ended.code == 3, ended.err
    return folder


@pytest.fixture(scope="module")
def all_answers(ran):
    return answered(ran / "run" / "outputs" / "batch.jsonl")


@pytest.fixture(scope="module")
def answers(all_answers):
    """The answers to chats and completions, by custom_id."""
    return {name: answer for name, answer in all_answers.items() if not isinstance(answer, Response)}


@pytest.fixture(scope="module")
def rows(ran):
    """The rows of the Parquet file by id."""
    found: dict[str | None, list[dict]] = {}
    for row in outputs(ran / "run")["batch.parquet"]:
        found.setdefault(row["id"], []).append(row)
    return found


def test_every_input_line_is_answered_or_refused_once_and_in_order(ran, all_answers, rows):
    ids = [line["custom_id"] if isinstance(line, dict) else None for line in LINES]
    failed = [Envelope.model_validate(line) for line in read_lines(ran / "run" / "outputs" / "batch.errors.jsonl")]
    assert [*all_answers] == [name for name in ids if name not in BAD]
    assert [line.custom_id for line in failed] == BAD
    assert set(rows) == {*all_answers, *BAD}
    folder = ran / "run" / "outputs"
    whole = read_lines(folder / "batch.jsonl") + read_lines(folder / "batch.errors.jsonl")
    assert len({line["id"] for line in whole}) == len({line["response"]["request_id"] for line in whole}) == len(LINES)


def test_answers_say_what_the_rows_say(answers, rows):
    for name, answer in answers.items():
        mine = rows[name]
        assert (answer.created, answer.model) == (0, MODEL)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == mine[0]["prompt_tokens"]
        assert answer.usage.completion_tokens == sum(row["completion_tokens"] for row in mine)
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert [choice.index for choice in answer.choices] == [row["sample"] for row in mine]
        if isinstance(answer, Completion):
            assert [choice.text for choice in answer.choices] == [row["text"] for row in mine]
        elif "called" not in name:
            assert [choice.message.content for choice in answer.choices] == [row["text"] for row in mine]
            assert all(choice.message.tool_calls is None for choice in answer.choices)
        if "called" not in name:
            assert [choice.finish_reason for choice in answer.choices] == [row["finish_reason"] for row in mine]
    assert len(answers["several"].choices) == 3
    assert answers["until"].choices[0].message.content == "Hello."
    assert json.loads(answers["schema"].choices[0].message.content) in ({"ok": True}, {"ok": False})


def test_calls_of_tools_are_in_the_message(answers):
    for name, content in (("called", None), ("said and called", "I look.")):
        (choice,) = answers[name].choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", content)
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "weather")
        assert json.loads(call.function.arguments) == {"city": "Rome"}


def test_calls_have_the_types_and_names_that_their_line_offers(answers, rows):
    (choice,) = answers["called with digits"].choices
    assert choice.message.tool_calls[0].function.arguments == '{"city": "10001"}'
    (choice,) = answers["called by none"].choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", CALL, None)
    assert rows["called by none"][0]["tool_calls"] is None


def test_an_answer_to_a_line_without_tools_calls_none_and_keeps_its_text(answers, rows):
    (choice,) = answers["not to call"].choices
    assert (choice.finish_reason, choice.message.content) == ("stop", f"So: {CALL}")
    assert choice.message.tool_calls is None
    assert rows["not to call"][0]["text"] == f"So: {CALL}"


def test_log_probabilities_have_the_texts_and_bytes_of_their_tokens(answers, rows):
    decode = load_tokenizer(RANDOM_MODEL).decode
    for name, num_top in (("scored", 4), ("scored alone", 0), ("several scored", 2)):
        for choice, row in zip(answers[name].choices, rows[name], strict=True):
            content = choice.logprobs.content
            assert [token.logprob for token in content] == [item["logprob"] for item in row["logprobs"]]
            assert [len(token.top_logprobs) for token in content] == [num_top] * len(row["token_ids"])
            for token, item in zip(content, row["logprobs"], strict=True):
                shown = [(token, item), *zip(token.top_logprobs, item["top"], strict=True)]
                for scored, as_row in shown:
                    assert scored.token == decode([as_row["token_id"]], with_special=True)
                    assert scored.bytes is None or bytes(scored.bytes).decode(errors="replace") == scored.token
            known = [token.bytes for token in content if token.token != "\ufffd"]
            assert None not in known
    for name, num_top in (("text scored", 3), ("text alone", 0)):
        for choice, row in zip(answers[name].choices, rows[name], strict=True):
            found = choice.logprobs
            assert found.token_logprobs == [item["logprob"] for item in row["logprobs"]]
            assert found.tokens == [decode([token], with_special=True) for token in row["token_ids"]]
            assert found.text_offset[0] == 0
            for token, own, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
                assert top[token] >= own
                assert [*top.values()] == sorted(top.values(), reverse=True) or len(top) == num_top + 1
    of_prompt = answers["ids"].model_extra["prompt_logprobs"]
    assert of_prompt[0] is None
    assert [next(iter(item)) for item in of_prompt[1:]] == ["6", "7"]


def test_each_line_is_answered_in_the_form_of_its_endpoint(all_answers):
    kinds = {name: type(answer) for name, answer in all_answers.items()}
    assert kinds["bare"] is Response
    assert {kind for name, kind in kinds.items() if name.startswith("r ")} == {Response}
    assert {kind for name, kind in kinds.items() if name.startswith(("text", "ids"))} == {Completion}
    assert kinds["plain"] is ChatCompletion


def test_responses_say_what_the_rows_say(all_answers, rows):
    for name in ("r plain", "r cut", "r scored", "r schema", "bare"):
        answer, (row,) = all_answers[name], rows[name]
        assert (answer.created_at, answer.model, answer.error) == (0, MODEL, None)
        assert answer.output_text == row["text"]
        usage = answer.usage
        assert (usage.input_tokens, usage.output_tokens) == (row["prompt_tokens"], row["completion_tokens"])
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        assert usage.input_tokens_details.cached_tokens == row["cached_tokens"]
        is_cut = row["finish_reason"] == "length"
        assert answer.status == answer.output[0].status == ("incomplete" if is_cut else "completed")
        assert (answer.incomplete_details is not None) == is_cut
    cut = all_answers["r cut"]
    assert (cut.incomplete_details.reason, cut.usage.output_tokens) == ("max_output_tokens", 2)
    plain = all_answers["r plain"]
    assert (plain.instructions, plain.metadata, plain.tools) == ("Be brief.", {"key": "value"}, [])
    assert json.loads(all_answers["r schema"].output_text) in ({"ok": True}, {"ok": False})


def test_responses_have_the_log_probabilities_of_chats(all_answers, rows):
    (part,) = all_answers["r scored"].output[0].content
    (row,) = rows["r scored"]
    decode = load_tokenizer(RANDOM_MODEL).decode
    assert [token.logprob for token in part.logprobs] == [item["logprob"] for item in row["logprobs"]]
    assert [len(token.top_logprobs) for token in part.logprobs] == [3] * len(row["token_ids"])
    assert [token.token for token in part.logprobs] == [
        decode([token], with_special=True) for token in row["token_ids"]
    ]


def test_calls_in_responses_are_items_of_their_own(all_answers):
    for name, text in (("r called", None), ("r both", "I look.")):
        answer = all_answers[name]
        *said, call = answer.output
        assert [item.content[0].text for item in said] == ([text] if text else [])
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Rome"})
        assert answer.status == "completed"
        (tool,) = answer.tools
        assert (tool.type, tool.name) == ("function", "weather")
        assert call.call_id
        assert call.id != call.call_id


def test_ids_of_responses_and_their_items_are_all_different(all_answers):
    responses = [answer for answer in all_answers.values() if isinstance(answer, Response)]
    ids = [answer.id for answer in responses] + [item.id for answer in responses for item in answer.output]
    assert len(set(ids)) == len(ids)


def test_bytes_of_tokens_that_are_parts_of_a_character_are_those_of_the_text(answers, rows):
    (choice,) = answers["emoji"].choices
    assert choice.message.content == "“😊”"
    tokens = choice.logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens) == "“😊”".encode()
    assert len(tokens) > 3
    decode = load_tokenizer(RANDOM_MODEL).decode
    for token, item in zip(tokens, rows["emoji"][0]["logprobs"], strict=True):
        alone = [decode([other["token_id"]], with_special=True) for other in item["top"]]
        assert [other.token for other in token.top_logprobs] == alone


def test_an_answer_that_is_cut_inside_a_character_is_whole_in_its_tokens(answers, rows):
    for num_tokens in (1, 2, 3):
        name = f"emoji cut {num_tokens}"
        (choice,), (row,) = answers[name].choices, rows[name]
        assert (row["status"], row["finish_reason"], len(row["token_ids"])) == ("ok", "length", num_tokens)
        found = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
        assert found == "😊".encode()[:num_tokens]
        assert choice.message.content == row["text"] == found.decode(errors="replace")


def test_tokens_that_cannot_come_have_the_least_log_probability(answers):
    (choice,) = answers["forced"].choices
    assert choice.message.content in ("yes", "no")
    found = [other.logprob for token in choice.logprobs.content for other in token.top_logprobs]
    assert all(-9999.0 <= logprob <= 0 for logprob in found)
    assert [len(token.top_logprobs) for token in choice.logprobs.content] == [20] * len(choice.logprobs.content)


def test_usage_counts_every_token_up_to_the_limit(answers):
    for num_tokens in (1, 5):
        answer = answers[f"whole {num_tokens}"]
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", num_tokens)


def test_refused_lines_name_the_field_in_the_error_file(ran):
    found = read_lines(ran / "run" / "outputs" / "batch.errors.jsonl")
    told = [(line["response"]["status_code"], line["response"]["body"]["error"]["param"]) for line in found]
    assert told == [(400, "images"), (400, None), (400, "echo"), (400, "previous_response_id"), (400, None)]
    error = found[0]["response"]["body"]["error"]
    assert error["message"] == f"line 11: body.images is not supported for {CHAT}; leave it out"
    assert error["type"] == "invalid_request_error"


def test_equal_jobs_give_equal_bytes(ran, tmp_path):
    shutil.copy(ran / "batch.jsonl", tmp_path)
    assert batchinfer("run", write_job(tmp_path, **PARTS)).code == 3
    first, again = output_bytes(ran / "run"), output_bytes(tmp_path / "run")
    assert {name: again[name] for name in first} == first


def test_rows_of_other_formats_are_answered_by_their_ids(tmp_path):
    chats = [[{"role": "user", "content": text}] for text in ("Hello", "there")]
    columns = {"id": [7, None], "m": [chats[0], chats[1]], "tool_calls": ["kept", "too"]}
    write_shard(tmp_path / "prompts" / "a.parquet", columns)
    keys = {"prompt": None, "messages": "m"}
    job = write_job(tmp_path, input=keys, output={"format": "openai", "keep_columns": ["tool_calls"]})
    assert batchinfer("run", job).code == 0
    found = answered(tmp_path / "run" / "outputs" / "a.jsonl")
    assert [*found] == ["7", ""]
    assert {answer.model for answer in found.values()} == {RANDOM_MODEL.name}
    assert all(isinstance(answer, ChatCompletion) for answer in found.values())
    assert (tmp_path / "run" / "outputs" / "a.errors.jsonl").read_bytes() == b""


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_rows_of_other_formats_without_tools_call_none_and_keep_their_text(tmp_path, name):
    tools = [[WEATHER], None, []]
    asked = {"structured_outputs": {"choice": [f"So: {CALL}"]}, "max_tokens": 200}
    rows = [{"id": row, "m": chat(row)["body"]["messages"], "t": t, "s": asked} for row, t in enumerate(tools)]
    if name == "a.jsonl":
        write_batch(tmp_path / "prompts" / name, rows)
    else:
        write_shard(tmp_path / "prompts" / name, {key: [row[key] for row in rows] for key in rows[0]})
    keys = {"files": ["prompts/*"], "prompt": None, "messages": "m", "tools": "t", "sampling": "s"}
    assert batchinfer("run", write_job(tmp_path, input=keys, output={"format": "openai"})).code == 0
    found = [answer.choices[0] for answer in answered(tmp_path / "run" / "outputs" / "a.jsonl").values()]
    assert [choice.message.content for choice in found] == ["So: ", f"So: {CALL}", f"So: {CALL}"]
    assert [choice.finish_reason for choice in found] == ["tool_calls", "stop", "stop"]


def test_rows_whose_tools_are_the_text_of_an_empty_list_or_of_null_call_none(tmp_path):
    tools = [json.dumps([WEATHER]), "[]", "[ ]", "\n[\t] ", "null"]
    asked = {"structured_outputs": {"choice": [f"So: {CALL}"]}, "max_tokens": 200}
    messages, rows = chat("one")["body"]["messages"], range(len(tools))
    columns = {"id": [*rows], "m": [messages for _ in rows], "t": tools, "s": [asked for _ in rows]}
    write_shard(tmp_path / "prompts" / "a.parquet", columns)
    keys = {"prompt": None, "messages": "m", "tools": "t", "sampling": "s"}
    assert batchinfer("run", write_job(tmp_path, input=keys, output={"format": "openai"})).code == 0
    found = [answer.choices[0] for answer in answered(tmp_path / "run" / "outputs" / "a.jsonl").values()]
    assert [choice.message.content for choice in found] == ["So: "] + [f"So: {CALL}"] * 4
    assert [choice.finish_reason for choice in found] == ["tool_calls"] + ["stop"] * 4


def test_rows_that_could_not_be_computed_are_errors_of_the_server_and_others_have_expired(tmp_path):
    write_batch(tmp_path / "batch.jsonl", [chat(f"row {row}", f"Hello {row}", n=2) for row in range(4)])
    job = write_job(tmp_path, **PARTS)
    assert batchinfer("plan", job).code == 0
    assert batchinfer("finish", job, "--allow-partial").code == 3
    folder = tmp_path / "run" / "outputs"
    assert (folder / "batch.jsonl").read_bytes() == b""
    found = [Envelope.model_validate(line) for line in read_lines(folder / "batch.errors.jsonl")]
    assert [(line.custom_id, line.response, line.error.code) for line in found] == [
        (f"row {row}", None, "batch_expired") for row in range(4)
    ]
    assert batchinfer("work", job).code == 0
    fail_some(tmp_path / "run", 1)
    assert batchinfer("finish", job).code == 3
    (failed,) = read_lines(folder / "batch.errors.jsonl")
    assert failed["response"]["status_code"] == 500
    assert failed["response"]["body"]["error"] == {
        "message": "the rank died", "type": "server_error", "param": None, "code": None
    }  # fmt: skip
    assert len(answered(folder / "batch.jsonl")) == 3


def test_a_file_of_bad_lines_ends_with_its_errors_and_the_most_frequent_reason(tmp_path):
    lines = [chat(f"row {row}") | {"url": "/v1/embeddings"} for row in range(3)] + [chat("n", n=0), "[]", "{}"]
    write_batch(tmp_path / "batch.jsonl", lines)
    job, reason = write_job(tmp_path, **PARTS), 'url is "/v1/embeddings", but embeddings are not computed here'
    ended = batchinfer("run", job)
    assert ended.code == 3
    assert (tmp_path / "run" / "outputs" / "batch.jsonl").read_bytes() == b""
    found = [Envelope.model_validate(line) for line in read_lines(tmp_path / "run" / "outputs" / "batch.errors.jsonl")]
    assert [line.custom_id for line in found] == ["row 0", "row 1", "row 2", "n", None, None]
    assert {line.response.status_code for line in found} == {400}
    for said in (ended.err, batchinfer("finish", job).err):
        assert f"the most frequent reason (3 of 6): {reason}; remove the line" in said.splitlines()
    report = batchinfer("report", tmp_path / "run").out
    assert f"3 x {reason[:40]}" in report
    assert "1 x the line is a list, not an object" in report


def test_a_run_without_error_rows_names_no_reason(tmp_path):
    write_batch(tmp_path / "batch.jsonl", [chat("a", max_tokens=1)])
    ended = batchinfer("run", write_job(tmp_path, **PARTS))
    assert ended.code == 0
    assert "reason" not in ended.err


ROW = {
    **{"id": "a", "row": 0, "sample": 0, "status": "ok", "error": None, "text": "It rains.", "finish_reason": "stop"},
    **{"prompt_tokens": 1, "completion_tokens": 5, "cached_tokens": 0, "logprobs": None},
}


def answer_of(row: dict[str, Any]) -> ChatCompletion:
    """The answer that a row alone makes; token 5 is the first byte of a character, of others nothing is known."""
    job, shard = make_job("a", messages="m"), Shard(0, "a", "a.parquet", 1, "", 1)

    def token_of(token: int) -> tuple[str, bytes | None]:
        return "\ufffd", b"\xc3" if token == 5 else None

    answers = OpenAIAnswers(job, shard, len(row), token_of, pa.array([], pa.int64()), AnswerReader())
    (line,) = [data for _, data in [*answers.encode(pa.Table.from_pylist([row])), *answers.flush()]]
    return ChatCompletion.model_validate_json(json.dumps(json.loads(line)["response"]["body"]), strict=True)


def test_thinking_is_beside_the_answer():
    answer = answer_of(ROW | {"reasoning": "I see.", "reasoning_tokens": 3})
    assert answer.choices[0].message.content == "It rains."
    assert answer.choices[0].message.model_extra == {"reasoning_content": "I see."}
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3
    assert answer_of(ROW | {"reasoning": None, "reasoning_tokens": 0}).choices[0].message.model_extra == {}


def test_text_behind_a_call_is_content_and_none_is_null():
    calls = [{"name": "f", "arguments": "{}"}]
    written = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for text, content in ((f"A {written} tail", "A  tail"), (f"{written}\ntail", "\ntail"), (f"{written}\n", None)):
        (choice,) = answer_of(ROW | {"text": text, "tool_calls": calls}).choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", content)
        assert [call.function.name for call in choice.message.tool_calls] == ["f"]


def test_an_answer_that_is_cut_in_its_thinking_calls_nothing():
    row = ROW | {"text": "", "reasoning": "I call weather.", "tool_calls": [], "finish_reason": "length"}
    (choice,) = answer_of(row).choices
    assert (choice.finish_reason, choice.message.tool_calls, choice.message.content) == ("length", None, "")
    assert choice.message.model_extra == {"reasoning_content": "I call weather."}


def response_of(row: dict[str, Any]) -> Response:
    """The response that has a row's chat answer."""
    chat = answer_of(row).model_dump(exclude_unset=True)
    body = response_object("key", chat["choices"][0], chat["usage"], {"tools": []}, "model")
    return Response.model_validate_json(json.dumps(body), strict=True)


def test_thinking_is_an_item_in_front_of_the_answer():
    answer = response_of(ROW | {"reasoning": "I see.", "reasoning_tokens": 3})
    thought, said = answer.output
    assert (thought.type, thought.summary, thought.content[0].text) == ("reasoning", [], "I see.")
    assert said.content[0].text == answer.output_text == "It rains."
    assert answer.usage.output_tokens_details.reasoning_tokens == 3
    assert [item.type for item in response_of(ROW | {"reasoning": None}).output] == ["message"]


def test_a_response_that_calls_alone_keeps_its_log_probabilities():
    called = {"text": KIMI_CALLS, "tool_calls": [{"name": "weather", "arguments": "{}"}] * 2}
    assert [item.type for item in response_of(ROW | called).output] == ["function_call"] * 2
    scored = [{"token_id": token, "logprob": -1.0, "top": []} for token in (5, 6)]
    said, *_ = response_of(ROW | called | {"logprobs": scored}).output
    assert said.content[0].text == ""
    # of the second token no bytes are known
    assert [token.bytes for token in said.content[0].logprobs] == [[0xC3], []]


def test_an_answer_that_max_tokens_has_cut_says_so_whatever_it_calls():
    calls = [{"name": "weather", "arguments": "{}"}]
    (choice,) = answer_of(ROW | {"tool_calls": calls, "finish_reason": "length"}).choices
    assert choice.finish_reason == "length"
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    assert answer_of(ROW | {"tool_calls": calls}).choices[0].finish_reason == "tool_calls"


KIMI_CALLS = """<|tool_calls_section_begin|>\
<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Rome"}\
<|tool_call_end|><|tool_call_begin|>functions.weather:1<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>\
<|tool_calls_section_end|>"""
KIMI = """{%- for m in messages %}{% for call in m.tool_calls or [] -%}
<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>{{ call['function']['arguments'] }}<|tool_call_end|>
{%- endfor %}{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{{ m.content }}{% endif %}{% endfor %}"""
MISTRAL = """{%- for m in messages %}{% for call in m.tool_calls or [] -%}
{%- if call.id is not defined or call.id is not string or call.id|length != 9 -%}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{% endif -%}
{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + call.function.arguments|tojson -}}
{%- endfor %}{% endfor %}"""


def rendered_history(template: str, row: dict[str, Any]) -> str:
    """Render a chat template for a history with an answer's calls and a result for each call."""
    message = answer_of(row).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Rain"} for call in message.tool_calls]
    chat = [{"role": "user", "content": "Rain?"}, message.model_dump(), *results]
    chat_template = ChatTemplate(template, {"bos_token": "", "eos_token": ""})
    return chat_template.render(chat_template.with_arguments(chat))


def test_calls_of_kimi_go_back_into_a_chat_as_the_model_wrote_them():
    calls = [{"name": "weather", "arguments": json.dumps({"city": city})} for city in ("Rome", "Oslo")]
    text = rendered_history(KIMI, ROW | {"text": KIMI_CALLS, "tool_calls": calls})
    of_calls, of_results = text.split("## Return of ", 1)
    assert f"<|tool_calls_section_begin|>{of_calls}<|tool_calls_section_end|>" == KIMI_CALLS
    assert of_results == "functions.weather:0\nRain## Return of functions.weather:1\nRain"


def test_calls_for_which_the_model_wrote_one_id_have_ids_of_their_own():
    calls = [{"name": "weather", "arguments": json.dumps({"city": city})} for city in ("Rome", "Oslo")]
    called = "".join(f"[TOOL_CALLS]weather[CALL_ID]aB3dEfGh9[ARGS]{call['arguments']}" for call in calls)
    for text, form in ((KIMI_CALLS.replace(":1", ":0"), r"functions\.weather:\d"), (called, r"\w{9}")):
        (choice,) = answer_of(ROW | {"text": text, "tool_calls": calls}).choices
        ids = [call.id for call in choice.message.tool_calls]
        assert len(set(ids)) == 2
        assert all(re.fullmatch(form, own) for own in ids)


@pytest.mark.parametrize("words", ["", "I look it up."])
def test_calls_of_v32_go_back_into_a_chat_as_the_model_wrote_them(words):
    text = f"""{words}

<｜DSML｜function_calls>
<｜DSML｜invoke name="weather">
<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>"""
    call = {"name": "weather", "arguments": '{"city": "Rome"}'}
    written = rendered_history(
        (OWN_TEMPLATES / "deepseek_v32.jinja").read_text(), ROW | {"text": text, "tool_calls": [call]}
    )
    assert f"</think>{text}<｜end▁of▁sentence｜>" in written


@pytest.mark.parametrize(
    ("text", "own_id"),
    [
        ('[TOOL_CALLS]weather[ARGS]{"city": "Rome"}', None),
        ('[TOOL_CALLS]weather[CALL_ID]aB3dEfGh9[ARGS]{"city": "Rome"}', "aB3dEfGh9"),
        ('[TOOL_CALLS]weather[CALL_ID]short[ARGS]{"city": "Rome"}', None),
        ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}, "id": "aB3dEfGh9"}]', "aB3dEfGh9"),
        ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]', None),
    ],
)
def test_calls_of_mistral_have_ids_that_its_templates_take(text, own_id):
    call = {"name": "weather", "arguments": '{"city": "Rome"}'}
    found = {rendered_history(MISTRAL, ROW | {"text": text, "sample": n, "tool_calls": [call]}) for n in range(3)}
    ids = {re.fullmatch(r'\[TOOL_CALLS]weather\[CALL_ID](\w{9})\[ARGS]{"city": "Rome"}', text)[1] for text in found}
    assert ids == {own_id} if own_id else len(ids) == 3


def test_log_probabilities_are_never_below_the_least_that_openai_tells_and_bytes_may_be_unknown():
    top = [{"token_id": 6, "logprob": -1e30}]
    answer = answer_of(ROW | {"logprobs": [{"token_id": 5, "logprob": -math.inf, "top": top}]})
    (token,) = answer.choices[0].logprobs.content
    assert (token.logprob, token.bytes, token.top_logprobs[0].logprob) == (-9999.0, [0xC3], -9999.0)
    assert token.top_logprobs[0].bytes is None


def test_rows_of_many_log_probabilities_are_taken_one_at_a_time():
    item = {"token_id": 5, "logprob": -1.0, "top": [{"token_id": 5, "logprob": -1.0}] * 20}
    row = pa.Table.from_pylist([ROW | {"logprobs": [item] * 300}])

    def peak_bytes(num_rows: int) -> int:
        answers = OpenAIAnswers(
            make_job("a", messages="m"),
            Shard(0, "a", "a.parquet", 1, "", 1),
            len(ROW),
            lambda _: ("x", b"x"),
            pa.array([], pa.int64()),
            AnswerReader(),
        )
        rows = pa.concat_tables([row] * num_rows)
        rows = rows.set_column(1, "row", pa.array(range(num_rows)))
        tracemalloc.start()
        try:
            assert sum(1 for _ in answers.encode(rows)) == num_rows - 1
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak_bytes(30) < 2 * peak_bytes(10)


def test_the_documented_batch_is_answered(tmp_path):
    (tmp_path / "batch.jsonl").write_text(DOCUMENTED)
    job = write_job(tmp_path, **PARTS)
    assert batchinfer("run", job).code == 0
    found = answered(tmp_path / "run" / "outputs" / "batch.jsonl")
    assert [*found] == ["request-1", "request-2"]
    assert {answer.model for answer in found.values()} == {MODEL}
