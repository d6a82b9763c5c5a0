"""OpenAI's batch files as input: what a line asks for, and the sentence for each line that cannot be done."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.config import JobConfig
from batchinfer.data.formats.openai_batch import SCHEMA
from batchinfer.records import sampling_from_json
from support.checked_rows import LIMITS, checked, errors, make_job
from support.jobs import batchinfer, output_bytes, outputs, write_job, write_shard
from support.openai_batches import (
    CHAT,
    DOCUMENTED,
    FLAT_WEATHER,
    MODEL,
    WEATHER,
    chat,
    completion,
    line,
    response,
    write_batch,
)
from support.paths import RANDOM_MODEL

OPENAI = {"format": "openai"}
PARTS = {"input": {"files": ["batch.jsonl"], "prompt": None, **OPENAI}}


def job_for(path, **keys: Any) -> JobConfig:
    return make_job(path, **OPENAI, **keys)


def check(tmp_path, lines: list[Any], **keys: Any) -> list[dict]:
    path = write_batch(tmp_path / "batch.jsonl", lines)
    return checked(path, job_for(path, **keys))[1]


def token_ids(tmp_path, prompts: dict[str, list], **keys: Any) -> list[list[int]]:
    """Return the token ids of the same chat in a job over Parquet."""
    write_shard(tmp_path / "same.parquet", prompts)
    rows = checked(tmp_path / "same.parquet", make_job(tmp_path / "same.parquet", **keys))[1]
    assert [row["error"] for row in rows] == [None] * len(rows)
    return [row["token_ids"] for row in rows]


# ---- what lines ask for


def test_the_documented_batch_runs_as_it_is_for_whatever_model_it_names(tmp_path):
    (tmp_path / "batch.jsonl").write_text(DOCUMENTED)
    ended = batchinfer("run", write_job(tmp_path, **PARTS))
    assert ended.code == 0, ended.err
    rows = outputs(tmp_path / "run")["batch.parquet"]
    assert [row["id"] for row in rows] == ["request-1", "request-2"]
    assert all(row["completion_tokens"] == 1000 or row["finish_reason"] == "stop" for row in rows)


def test_a_thousand_chats_give_the_same_outputs_from_lines_and_from_parquet(tmp_path):
    chats = [
        [{"role": "system", "content": f"You are no. {row % 3}."}] * (row % 2)
        + [{"role": "user", "content": f"Line {row}, é 你好\nand more"}]
        for row in range(1000)
    ]
    how = [{"temperature": row / 500, "seed": row, "stop": ["x", "y"] if row % 5 else ["z"]} for row in range(1000)]
    tools = [[WEATHER] if row % 4 == 0 else None for row in range(1000)]
    ids = [f"row {row}" for row in range(1000)]
    lines = [
        line(*found) for found in zip(ids, [CHAT] * 1000, ({"messages": m, **h, "tools": t}
        for m, h, t in zip(chats, how, tools, strict=True)), strict=True)
    ]  # fmt: skip
    write_batch(tmp_path / "batch.jsonl", lines)
    texts = [None if item is None else json.dumps(item) for item in tools]
    write_shard(tmp_path / "batch.parquet", {"id": ids, "chat": chats, "how": how, "tools": texts})
    found = {}
    for name, keys in {
        "lines": PARTS["input"],
        "table": {"files": ["batch.parquet"], "prompt": None, "messages": "chat", "sampling": "how", "tools": "tools"},
    }.items():
        ended = batchinfer(
            "run", write_job(tmp_path, input=keys, output={"dir": name, "format": "jsonl"}, sampling={"max_tokens": 2})
        )
        assert ended.code == 0, ended.err
        found[name] = output_bytes(tmp_path / name)
    assert found["lines"] == found["table"]
    assert set(found["lines"]) == {"outputs/batch.parquet", "outputs/batch.jsonl"}


def test_prompts_are_texts_token_ids_or_chats(tmp_path):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    both = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    rows = check(
        tmp_path,
        [
            completion("text"),
            completion("one", ["Hello"]),
            completion("ids", [5, 6, 7]),
            completion("list of ids", [[5, 6, 7]]),
            chat("chat"),
            chat("parts", parts),
            chat("developer", messages=both),
        ],
    )
    assert [row["error"] for row in rows] == [None] * 7
    (text,) = token_ids(tmp_path, {"prompt": ["Hello"]})
    chats = [[{"role": "user", "content": "Hello"}], [{"role": "system", "content": "Be brief."}, both[1]]]
    one, two = token_ids(tmp_path, {"m": chats}, messages="m")
    assert [row["token_ids"] for row in rows] == [text, text, [5, 6, 7], [5, 6, 7], one, one, two]


@pytest.mark.parametrize(
    ("lines", "writes_tools", "is_warned"),
    [
        ([chat("a", tools=[WEATHER])], False, True),
        ([response("a", tools=[FLAT_WEATHER])], False, True),
        ([chat("a", tools=[WEATHER])], True, False),
        ([chat("a"), response("b"), completion("c"), chat("d", tools=[])], False, False),
        ([chat("a", tools=[WEATHER], tool_choice="none"), chat("b", tools=[WEATHER], n=0)], False, False),
    ],
)
def test_a_plan_warns_of_tools_that_lines_have_and_the_template_does_not_write(
    tmp_path, lines, writes_tools, is_warned
):
    model = shutil.copytree(RANDOM_MODEL, tmp_path / "model")
    if writes_tools:
        (model / "chat_template.jinja").write_text("{{ tools | tojson }}{{ messages[0].content }}")
    write_batch(tmp_path / "batch.jsonl", lines)
    ended = batchinfer("plan", write_job(tmp_path, **PARTS, model={"path": str(model)}))
    assert ended.code == 0, ended.err
    assert ("does not write tools, so the model does not see the lines' tools" in ended.err) == is_warned


@pytest.mark.parametrize(
    ("lines", "is_warned"),
    [
        ([completion("a"), chat("b", chat_template_kwargs={"strftime_now": "2026-01-31"})], False),
        ([completion("a"), chat("b", chat_template_kwargs={"strftime_now": "yesterday"})], False),
        ([completion("a"), chat("b", chat_template_kwargs={"thinking": True})], True),
        ([completion("a"), response("b")], True),
    ],
)
def test_a_plan_warns_of_chats_without_the_date_that_the_template_writes(tmp_path, lines, is_warned):
    model = shutil.copytree(RANDOM_MODEL, tmp_path / "model")
    template = "{{ messages[0].content }}{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}"
    (model / "chat_template.jinja").write_text(template)
    write_batch(tmp_path / "batch.jsonl", lines)
    ended = batchinfer("plan", write_job(tmp_path, **PARTS, model={"path": str(model)}))
    assert ended.code == 0, ended.err
    assert ended.err.count("writes today's date with transformers and vLLM, but a fixed") == is_warned


@pytest.mark.parametrize("tools", [[None, json.dumps([WEATHER])], [None, "[]"], [[], [WEATHER]], ["null", "[ ]"]])
def test_a_plan_warns_of_a_column_of_tools_only_if_a_row_has_some(tmp_path, tools):
    chats = [[{"role": "user", "content": "Hello"}]] * 2
    write_shard(tmp_path / "prompts" / "a.parquet", {"id": [1, 2], "m": chats, "t": tools})
    inputs = {"prompt": None, "messages": "m", "tools": "t"}
    ended = batchinfer("plan", write_job(tmp_path, input=inputs, model={"path": str(RANDOM_MODEL)}))
    assert ended.code == 0, ended.err
    is_warned = "so the model does not see input.tools" in ended.err
    assert is_warned == (tools[1] not in ("[]", "[ ]"))


def test_tools_and_keywords_of_a_line_go_to_the_chat_template_unless_tools_may_not_be_called(tmp_path):
    rows = check(
        tmp_path,
        [
            chat("without"),
            chat("tools", tools=[WEATHER]),
            chat("may", tools=[WEATHER], tool_choice="auto", parallel_tool_calls=True),
            chat("may not", tools=[WEATHER], tool_choice="none"),
            chat("keywords", chat_template_kwargs={"enable_thinking": False}),
        ],
    )
    assert [row["error"] for row in rows] == [None] * 5
    without, tools, may, may_not, _ = [row["token_ids"] for row in rows]
    chats = {"m": [[{"role": "user", "content": "Hello"}]]}
    assert [tools, may, may_not] == [*token_ids(tmp_path, chats, messages="m", tools=[WEATHER])] * 2 + [without]


def test_calls_in_the_history_have_the_arguments_that_the_template_takes(tmp_path):
    model = shutil.copytree(RANDOM_MODEL, tmp_path / "model")
    items = "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }};{% endfor %}"
    text = f"{{{{ m.content or '' }}}}{{% for call in m.tool_calls or [] %}}{items}{{% endfor %}}"
    (model / "chat_template.jinja").write_text(f"{{% for m in messages %}}{text}{{% endfor %}}")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "[Rome]"}'}}
    chats = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain"},
    ]
    path = write_batch(tmp_path / "batch.jsonl", [chat("a", messages=chats), completion("b", "Hellocity=[Rome];Rain")])
    job = job_for(path)
    for control in ("parse", "text", "error"):
        changes = {"model": {"path": str(model)}, "input": {**job.model_dump()["input"], "control_tokens": control}}
        rows = checked(path, JobConfig.model_validate({**job.model_dump(), **changes}))[1]
        assert [row["error"] for row in rows] == [None, None]
        whole, begin = rows[1]["token_ids"], len(rows[1]["token_ids"]) - len(rows[0]["token_ids"])
        assert rows[0]["token_ids"] == whole[begin:]


def test_the_jobs_system_text_and_keywords_are_for_lines_without_their_own(tmp_path):
    job = {"system": "Be brief."}
    own = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "Hello"}]
    rows = check(tmp_path, [chat("a"), chat("b", messages=own), completion("c")], **job)
    plain = check(tmp_path, [chat("a"), chat("b", messages=own), completion("c")])
    is_same = [row["token_ids"] == other["token_ids"] for row, other in zip(rows, plain, strict=True)]
    assert is_same == [False, True, True]


SAMPLING = [
    ({}, {}),
    ({"temperature": 1, "top_p": 0.5, "n": 3, "seed": 7}, {"temperature": 1.0, "top_p": 0.5, "n": 3, "seed": 7}),
    ({"stop": "end"}, {"stop": ("end",)}),
    ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
    ({"stop": None, "temperature": None, "seed": None}, {}),
    ({"max_tokens": 5}, {"max_tokens": 5}),
    ({"max_completion_tokens": 5}, {"max_tokens": 5}),
    ({"max_completion_tokens": 5, "max_tokens": 5}, {"max_tokens": 5}),
    ({"presence_penalty": 1.5, "frequency_penalty": -1}, {"presence_penalty": 1.5, "frequency_penalty": -1.0}),
    ({"logit_bias": {"5": -100, "6": 1.5}}, {"logit_bias": ((5, -100.0), (6, 1.5))}),
    ({"logprobs": True}, {"logprobs": 0}),
    ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
    ({"logprobs": False}, {}),
    ({"response_format": {"type": "text"}}, {}),
    ({"response_format": {"type": "json_object"}}, {"structured": ("json_object", "true")}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
        {"structured": ("json", '{"type": "object"}')},
    ),
    ({"guided_regex": "a+"}, {"structured": ("regex", "a+")}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"structured": ("choice", '["a", "b"]')}),
    ({"top_k": -1, "min_p": 0.5, "repetition_penalty": 2, "ignore_eos": True}, {
        "top_k": 0, "min_p": 0.5, "repetition_penalty": 2.0, "ignore_eos": True}),
    ({"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "stream": False}, {}),
    ({"prompt_cache_options": {"ttl": "30m"}, "prediction": {"type": "content", "content": "x"}, "n": 1}, {}),
    ({"verbosity": "medium", "logit_bias": {}, "stop": [], "top_logprobs": 0, "logprobs": False}, {}),
    ({"best_of": 1, "suffix": "", "echo": False, "length_penalty": 1.0, "early_stopping": False}, {}),
]  # fmt: skip


def test_sampling_of_a_line_overrides_the_jobs(tmp_path):
    rows = check(tmp_path, [chat(str(place), **body) for place, (body, _) in enumerate(SAMPLING)])
    job = job_for("a").sampling.to_sampling()
    for row, (body, wanted) in zip(rows, SAMPLING, strict=True):
        assert row["error"] is None, body
        found = job if row["sampling"] is None else sampling_from_json(row["sampling"])
        assert found == type(job)(**{name: getattr(job, name) for name in job.__slots__} | wanted), body
        assert (row["n"], row["max_tokens"]) == (wanted.get("n", 1), wanted.get("max_tokens", 16))


def test_a_line_may_ask_for_none_of_what_the_job_asks_for(tmp_path):
    lines = [
        chat("neither", logprobs=False, response_format={"type": "text"}),
        chat("free", response_format={"type": "text"}),
        chat("unscored", logprobs=False),
        chat("as the job", logprobs=None, response_format=None),
    ]
    rows = check(tmp_path, lines, of_job={"logprobs": 2, "structured_outputs": {"regex": "a+"}})
    assert [row["error"] for row in rows] == [None] * 4
    found = [sampling_from_json(row["sampling"]) for row in rows[:3]]
    assert [(how.logprobs, how.structured) for how in found] == [(None, None), (2, None), (None, ("regex", "a+"))]
    assert rows[3]["sampling"] is None


def test_a_completions_logprobs_are_a_number(tmp_path):
    rows = check(tmp_path, [completion("a", logprobs=3), completion("b", logprobs=0)])
    assert [sampling_from_json(row["sampling"]).logprobs for row in rows] == [3, 0]


def test_files_are_read_compressed_too_and_kept_columns_are_those_of_the_schema(tmp_path):
    plain = write_batch(tmp_path / "batch.jsonl", [chat("a", temperature=1.0), completion("b"), "{"])
    (tmp_path / "batch.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    keep = [*SCHEMA.names]
    job = write_job(
        tmp_path,
        input={**PARTS["input"], "files": ["batch.jsonl.gz"]},
        output={"keep_columns": keep},
        sampling={"max_tokens": 1},
    )
    assert batchinfer("run", job).code == 3
    first, second, bad = outputs(tmp_path / "run")["batch.parquet"]
    assert (first["custom_id"], first["url"], first["model"]) == ("a", CHAT, MODEL)
    assert json.loads(first["sampling"]) == {"temperature": 1.0}
    assert json.loads(second["request"]) == {"prompt": "Hello"}
    assert [bad[name] for name in keep] == [None] * len(keep)


# ---- lines that cannot be done


DEEP: Any = 1
for _ in range(300):
    DEEP = [DEEP]
IMAGE = [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]
FUNCTION = {"type": "function", "function": {"name": "weather"}}
BAD = [
    # the line: how its error row begins
    ('{"custom_id": "x", "method": "POST", "url"', "line 2 is not valid JSON: Input data was truncated"),
    ("[]", "line 2 is a list, not an object"),
    (b'{"custom_id": "\xff"}', "line 2 is not valid UTF-8"),
    ('{"custom_id": "x\0"}', "line 2 is not valid JSON: "),
    ('{"custom_id": "x", "body": {"seed": 1e999}}', "line 2 is not valid JSON: Number out of range"),
    ("{}", "line 2: custom_id is missing"),
    (chat(None), "line 2: custom_id is missing"),
    (chat(7), "line 2: custom_id is a number, not text"),
    (chat(""), "line 2: custom_id is empty"),
    (chat("   "), 'line 2: custom_id "   " is blank'),
    (chat("first"), 'line 2: custom_id "first" is that of an earlier line, too: line 1'),
    (chat("x") | {"method": "GET"}, 'line 2: method is "GET", not "POST"'),
    (chat("x") | {"method": ["POST"]}, "line 2: method is a list, not text"),
    (chat("x") | {"url": "/v1/embeddings"}, 'line 2: url is "/v1/embeddings", but embeddings are not computed here;'),
    (chat("x") | {"url": "/v1/moderations"}, 'line 2: url is "/v1/moderations", but moderations are not computed here'),
    (chat("x") | {"url": "/v1/images/edits"}, 'line 2: url is "/v1/images/edits", but images are not computed here'),
    (chat("x") | {"url": "/v1/audio/speech"}, 'line 2: url is "/v1/audio/speech", but speech and transcripts are not '),
    (chat("x") | {"url": "/v1/chat"}, f'line 2: url is "/v1/chat", not {CHAT}, /v1/completions or /v1/responses'),
    (chat("x") | {"url": ""}, "line 2: url is empty"),
    (chat("x") | {"url": None, "body": {"model": MODEL}}, "line 2: url is missing, and body has none of messages, inp"),
    (chat("x") | {"url": None, "body": "text"}, "line 2: body is text, not an object"),
    (chat("x") | {"url": {}}, "line 2: url is an object, not text"),
    (chat("x") | {"body": None}, "line 2: body is null, not an object"),
    (chat("x") | {"body": "text"}, "line 2: body is text, not an object"),
    (chat("x", model=None) | {"body": {}}, "line 2: body.model is missing"),
    (chat("x", model=5), "line 2: body.model is a number, not text"),
    (chat("x", model="gpt-4o"), f'line 2: body.model is "gpt-4o", but on earlier lines "{MODEL}"; a file is for one'),
    (chat("x", stream=True), "line 2: body.stream is true, but only false is supported"),
    (chat("x", modalities=["text", "audio"]), 'line 2: body.modalities is ["text","audio"], but only ["text"] is'),
    (chat("x", parallel_tool_calls=False), "line 2: body.parallel_tool_calls is false, but only true is supported"),
    (chat("x", audio={"voice": "alloy"}), f"line 2: body.audio is not supported for {CHAT}; leave it out"),
    (chat("x", reasoning_effort="low"), f"line 2: body.reasoning_effort is not supported for {CHAT}; leave it out"),
    (chat("x", prompt="Hello"), f"line 2: body.prompt is not supported for {CHAT}; leave it out, or set url to /v1/"),
    *(
        (chat("x", **{name: "x"}), f"line 2: body.{name} is not supported for {CHAT}; {advice}")
        for name, advice in {
            "enable_thinking": "set body.chat_template_kwargs.enable_thinking instead",
            "thinking": "set the chat template's own variable in body.chat_template_kwargs, such as enable_thinking",
            "reasoning": "set the chat template's own variable in body.chat_template_kwargs, such as enable_thin",
            "reasoning_effort": "leave it out, or set body.chat_template_kwargs.reasoning_effort",
            "extra_body": "write its keys into body itself",
            "regex": "set body.structured_outputs.regex instead",
            "input": "leave it out, or set url to /v1/responses",
            "max_output_tokens": "set body.max_tokens instead",
            "functions": "set body.tools instead",
        }.items()
    ),
    (completion("x", messages=[]), "line 2: body.messages is not supported for /v1/completions; leave it out"),
    (completion("x", enable_thinking=True), "line 2: body.enable_thinking is not supported for /v1/completions; leave"),
    (completion("x", max_new_tokens=5), "line 2: body.max_new_tokens is not supported for /v1/completions; set body.m"),
    (completion("x", best_of=3), "line 2: body.best_of is 3, but only 1 is supported"),
    (completion("x", suffix="x"), 'line 2: body.suffix is "x", but only "" is supported'),
    (chat("x", verbosity="low"), 'line 2: body.verbosity is "low", but only "medium" is supported'),
    (completion("x", echo=True), "line 2: body.echo is true, but only false is supported"),
    (completion("x", tools=[FUNCTION]), "line 2: body.tools is not supported for /v1/completions; leave it out"),
    (chat("x", messages=None), "line 2: body.messages is missing"),
    (chat("x", messages="Hello"), "body.messages is not a list of messages"),
    (chat("x", messages=[]), "body.messages is an empty list"),
    (chat("x", messages=["Hello"]), "body.messages[0] is not an object with role and content"),
    (chat("x", messages=[{"content": "x"}]), "body.messages has no role in message 0"),
    (chat("x", messages=[{"role": "human", "content": "x"}]), "body.messages[0] has the role 'human', not one of"),
    (chat("x", messages=[{"role": "user"}]), "body.messages has no content in message 0"),
    (chat("x", 5), "body.messages[0] has content that is neither text nor a list of parts"),
    (chat("x", IMAGE), "body.messages[0] holds an image_url, which this model cannot read"),
    (chat("x", [{"type": "input_audio"}]), "body.messages[0] holds an input_audio, which this model cannot read"),
    (completion("x", None), "line 2: body.prompt is missing"),
    (completion("x", ""), "line 2: body.prompt is empty"),
    (completion("x", []), "line 2: body.prompt is empty"),
    (completion("x", [""]), "line 2: body.prompt is empty"),
    (completion("x", 5), "line 2: body.prompt is a number, not text or a list of token ids"),
    (completion("x", ["a", "b"]), "line 2: body.prompt is a list of 2 prompts; write a line for each"),
    (completion("x", [1, "b"]), "line 2: body.prompt holds \"b\", which is no token id"),
    (completion("x", [1, -1]), "line 2: body.prompt holds -1, which is no token id"),
    (completion("x", [1, 2**80]), f"line 2: body.prompt holds {2**80}, which is no token id"),
    (completion("x", [1, LIMITS.vocab_size]), f"a token id is {LIMITS.vocab_size}, which is not in [0, "),
    (chat("x", tools=[{"type": "retrieval"}]), 'line 2: body.tools[0] is not an object of the type "function"'),
    (chat("x", tools=[FUNCTION | {"function": {}}]), "line 2: body.tools[0].function.name is missing"),
    (chat("x", tools=[FUNCTION, 5]), 'line 2: body.tools[1] is not an object of the type "function"'),
    (chat("x", tools=[FUNCTION], tool_choice="required"), 'line 2: body.tool_choice is "required", but only "auto"'),
    (chat("x", tools=[FUNCTION], tool_choice=FUNCTION), "line 2: body.tool_choice is {"),
    (chat("x", chat_template_kwargs=[1]), "body.chat_template_kwargs"),
    (chat("x", response_format="json"), 'line 2: body.response_format is not of the type "text" or "json_object"'),
    (chat("x", response_format={"type": "json_schema"}), "line 2: body.response_format is not of the type"),
    (
        chat("x", response_format={"type": "json_schema", "json_schema": {"schema": {"type": "strange"}}}),
        "line 2: body.response_format: json cannot be used: ",
    ),
    (chat("x", guided_json={}, guided_regex="a"), "line 2: body.guided_json and body.guided_regex are both set"),
    (
        chat("x", structured_outputs={"regex": "a"}, response_format={"type": "json_object"}),
        "line 2: body.response_format and body.structured_outputs are both set",
    ),
    (chat("x", structured_outputs={"regex": "("}), "body.structured_outputs"),
    (chat("x", temperature=-1), "body.temperature is -1, but it should be greater than or equal to 0"),
    (chat("x", temperature="hot"), "body.temperature is 'hot', but it should be a valid number"),
    (chat("x", temperature=10**400), "body.temperature is 1000"),
    (chat("x", seed=2**70), f"body.seed is {2**70}, but "),
    (chat("x", n=0), "body.n is 0, but it should be greater than or equal to 1"),
    (chat("x", n=True), "body.n is True, but it should be a valid integer"),
    (chat("x", max_tokens=1.5), "body.max_tokens is 1.5, but it should be a valid integer"),
    (chat("x", max_completion_tokens="5"), 'line 2: body.max_completion_tokens is "5", not an integer from 0 to '),
    (chat("x", max_completion_tokens=5, max_tokens=6), "line 2: body.max_tokens and body.max_completion_tokens differ"),
    (chat("x", stop=5), "body.stop is 5, but "),
    (chat("x", stop=["a", 5]), "body.stop.1 is 5, but "),
    (chat("x", logit_bias={"x": 1}), "body.logit_bias is "),
    (chat("x", logit_bias={str(LIMITS.vocab_size): 1}), f"body.logit_bias names token {LIMITS.vocab_size}, but the"),
    (chat("x", logprobs=3), "line 2: body.logprobs is 3, not true or false"),
    (chat("x", top_logprobs=3), "line 2: body.top_logprobs is set, but body.logprobs is not true"),
    (chat("x", logprobs=True, top_logprobs=-1), "line 2: body.top_logprobs is -1, not an integer from 0 to 100"),
    (completion("x", logprobs=True), "line 2: body.logprobs is true, not an integer from 0 to 100"),
    (chat("x", messages=DEEP), "body.messages[0] is not an object"),
]  # fmt: skip


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_each_line_that_cannot_be_done_is_an_error_row_that_names_the_field(tmp_path, end):
    for place, (bad, _) in enumerate(BAD):
        path = write_batch(tmp_path / f"{place:03d}.jsonl", [chat("first"), bad, "", "  ", chat("last")])
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", end))
    job = write_job(tmp_path, input={**PARTS["input"], "files": ["*.jsonl"]})
    ended = batchinfer("plan", job)
    assert ended.code == 0, ended.err
    assert "Traceback" not in ended.err
    for place, (bad, told) in enumerate(BAD):
        rows = pq.read_table(tmp_path / "run" / "tokens" / f"{place:05d}.parquet").to_pylist()
        assert [rows[0]["error"], rows[2]["error"]] == [None, None], bad
        assert (rows[1]["error"] or "").startswith(told), (bad, rows[1]["error"])
        wanted = bad.get("custom_id") if isinstance(bad, dict) else None
        assert rows[1]["id"] == (wanted if isinstance(wanted, str) and wanted else None)


@pytest.mark.parametrize("place", ["messages", "tools", "metadata", "chat_template_kwargs", "schema"])
def test_no_depth_of_nesting_is_more_than_an_error_row(tmp_path, place):
    lines = []
    for depth in [*range(1, 900, 30), *range(900, 1000), 100_000]:
        deep = '{"a":' * depth + "1" + "}" * depth
        of_schema = f'"response_format": {{"type": "json_schema", "json_schema": {{"schema": {deep}}}}}'
        body = of_schema if place == "schema" else f'"{place}": [{deep}]'
        lines.append(f'{{"custom_id": "{depth}", "method": "POST", "url": "{CHAT}", "body": {{"model": "m", {body}}}}}')
    path = write_batch(tmp_path / "batch.jsonl", [chat("first", model="m"), *lines, chat("last", model="m")])
    found = errors(path, job_for(path))
    assert [found[0], found[-1]] == [None, None]
    assert "line 132 is not valid JSON: it is nested too deeply" in found[-2]


def test_every_second_line_that_was_there_before_is_an_error_and_the_first_is_not(tmp_path):
    rows = check(tmp_path, [chat(f"row {row % 700}") for row in range(1000)])
    assert [row["error"] is None for row in rows] == [True] * 700 + [False] * 300


def test_the_sentence_names_the_first_line_with_the_id_and_ids_differ_by_every_character(tmp_path):
    ids = ["a", "a ", "A", "é", "e\u0301", "a", " a", "a ", "b", "a"]
    found = check(tmp_path, [chat(custom_id) for custom_id in ids])
    first = 'custom_id "{}" is that of an earlier line, too: line {}'
    told = {5: f"line 6: {first.format('a', 1)}", 7: f"line 8: {first.format('a ', 2)}"}
    told[9] = f"line 10: {first.format('a', 1)}"
    assert [row["error"] for row in found] == [told.get(place) for place in range(len(ids))]
    assert [row["id"] for row in found] == ids


def test_lines_count_with_blank_ones_and_a_bad_line_has_its_id_too(tmp_path):
    path = write_batch(tmp_path / "batch.jsonl", ["", chat("a", n=0), " ", "{", chat("b"), chat("b"), chat("a")])
    found = errors(path, job_for(path))
    assert found[2] is None
    assert found[3] == 'line 6: custom_id "b" is that of an earlier line, too: line 5'
    assert found[4] == 'line 7: custom_id "a" is that of an earlier line, too: line 2'


def test_the_body_says_what_a_line_without_method_or_url_asks_for(tmp_path):
    def bare(custom_id: str, **body: Any) -> dict[str, Any]:
        return {"custom_id": custom_id, "body": {"model": MODEL, **body}}

    messages = [{"role": "user", "content": "Hello"}]
    lines = [
        bare("chat", messages=messages),
        bare("null", messages=messages, prompt=None) | {"url": None, "method": None},
        bare("response", input="Hello"),
        bare("completion", prompt="Hello"),
        chat("with a url") | {"method": None},
        bare("two", messages=messages, prompt="Hello"),
    ]
    rows = check(tmp_path, lines)
    assert [row["error"] for row in rows[:5]] == [None] * 5
    chats, (text,) = token_ids(tmp_path, {"m": [messages]}, messages="m"), token_ids(tmp_path, {"prompt": ["Hello"]})
    assert [row["token_ids"] for row in rows[:5]] == [*chats * 3, text, *chats]
    assert rows[5]["error"].startswith(f"line 6: body.prompt is not supported for {CHAT}; ")


def test_chats_without_a_body_are_no_batch(tmp_path):
    write_batch(tmp_path / "batch.jsonl", [{"custom_id": "a", "messages": [{"role": "user", "content": "Hello"}]}] * 2)
    ended = batchinfer("plan", write_job(tmp_path, **PARTS))
    assert ended.code == 2
    assert "no line of the input is a request of an OpenAI batch, with custom_id and body; the first: " in ended.err
    assert "batch.jsonl: line 1: body is missing; leave input.format out" in ended.err


def test_a_file_for_chats_needs_a_chat_template_for_these_lines_only(tmp_path):
    import shutil

    from support.paths import RANDOM_MODEL

    model = shutil.copytree(RANDOM_MODEL, tmp_path / "model")
    (model / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))
    write_batch(tmp_path / "batch.jsonl", [chat("a"), completion("b")])
    ended = batchinfer("run", write_job(tmp_path, **PARTS, model={"path": str(model)}, sampling={"max_tokens": 2}))
    assert ended.code == 3, ended.err
    first, second = outputs(tmp_path / "run")["batch.parquet"]
    assert first["error"] == "the model folder has no chat template, which messages need"
    assert second["status"] == "ok"


# ---- memory


READER = """
import re, sys
from pathlib import Path
from batchinfer.data.inputs import read_batches
from batchinfer.data.shards import find_shards
def peak_kb():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak_kb()
(shard,) = find_shards([sys.argv[1]], format="openai")
names = ["custom_id", "request", "sampling"]
assert sum(len(batch) for batch in read_batches(shard, names)) == shard.num_rows == int(sys.argv[2])
print(peak_kb() - before)
"""


def test_lines_are_read_in_bounded_memory(tmp_path):
    num_rows, text = 60_000, "all work and no play " * 60
    with open(tmp_path / "batch.jsonl", "w") as file:
        for row in range(num_rows):
            file.write(json.dumps(chat(f"row {row}", text)) + "\n")
    assert (tmp_path / "batch.jsonl").stat().st_size > 80_000_000
    program = [sys.executable, "-c", READER, str(tmp_path / "batch.jsonl"), str(num_rows)]
    grown_kb = int(subprocess.run(program, capture_output=True, text=True, check=True).stdout)
    assert grown_kb < 150_000


def test_the_schema_has_columns_of_text_alone():
    assert set(SCHEMA.types) == {pa.string()}
