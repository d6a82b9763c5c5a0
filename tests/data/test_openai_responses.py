"""Lines for /v1/responses: the chat and the sampling that they ask for, and the sentences for bad ones."""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import pytest

from batchinfer.data.effort import EFFORTS, effort_variables
from batchinfer.data.formats.lines import BadRow
from batchinfer.data.formats.openai_batch import openai_records
from batchinfer.records import sampling_from_json
from support.checked_rows import checked, make_job
from support.openai_batches import FLAT_WEATHER, RESPONSES, WEATHER, chat, response, write_batch
from support.paths import RANDOM_MODEL

FORMAT = {"type": "json_schema", "name": "n", "strict": True, "schema": {"type": "object"}}
LOGPROBS = ["message.output_text.logprobs"]
CALLED = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi", "annotations": []}]}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
HELLO = {"role": "user", "content": "Hello"}


def read(body: dict[str, Any]) -> dict[str, Any] | str:
    """Return the request and the sampling of a line with this body, or the error sentence."""
    content = io.BufferedReader(io.BytesIO(json.dumps(body).encode()))
    ((_, _, values),) = openai_records(content)
    if isinstance(values, BadRow):
        return values.sentence.removeprefix("line 1: ")
    assert isinstance(values, dict)
    return {name: json.loads(str(values[name])) for name in ("request", "sampling")}


def messages_of(given: Any, **body: Any) -> Any:
    found = read(response("a", given, **body))
    assert isinstance(found, dict), found
    return found["request"]["messages"]


INPUTS = [
    ("Hello", [HELLO]),
    ([HELLO], [HELLO]),
    ([{"role": "user", "content": [{"type": "input_text", "text": part} for part in ("Hel", "lo")]}], [HELLO]),
    ([{"type": "message", **HELLO, "id": "msg_1", "status": "completed"}], [HELLO]),
    ([{"role": "developer", "content": "Brief."}, HELLO], [{"role": "system", "content": "Brief."}, HELLO]),
    ([HELLO, SAID, HELLO], [HELLO, {"role": "assistant", "content": "Hi"}, HELLO]),
    ([SAID, SAID], [{"role": "assistant", "content": "Hi"}] * 2),
    # the items of one answer are one message
    (
        [HELLO, THOUGHT, SAID, CALLED, CALLED | {"call_id": "call_2"}],
        [
            HELLO,
            {
                "role": "assistant",
                "content": "Hi",
                "reasoning_content": "Hm.",
                "tool_calls": [CALL, CALL | {"id": "call_2"}],
            },
        ],
    ),
    (
        [HELLO, CALLED, {"type": "function_call_output", "call_id": "call_1", "output": "Rain"}],
        [
            HELLO,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "Rain"},
        ],
    ),
    ([HELLO, THOUGHT, HELLO], [HELLO, {"role": "assistant", "content": "", "reasoning_content": "Hm."}, HELLO]),
    (
        [CALLED, SAID],
        [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "assistant", "content": "Hi"}],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("given", "messages"), INPUTS)
def test_items_become_messages(given, messages):
    assert messages_of(given) == messages


def test_instructions_are_a_system_message_in_front():
    system = {"role": "system", "content": "Brief."}
    assert messages_of("Hello", instructions="Brief.") == [system, HELLO]
    assert messages_of([system, HELLO], instructions="Kind.") == [{"role": "system", "content": "Kind."}, system, HELLO]
    assert messages_of("Hello", instructions="") == [HELLO]


SAME_KEYS = {"temperature": 1, "top_p": 0.5, "seed": 7, "stop": ["x"], "min_p": 0.5, "top_k": -1}
SAMPLING = [
    ({}, {}),
    (SAME_KEYS, SAME_KEYS),
    ({"max_output_tokens": 5}, {"max_tokens": 5}),
    ({"text": {"format": {"type": "text"}}}, {"response_format": {"type": "text"}}),
    ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    (
        {"text": {"format": FORMAT, "verbosity": "medium"}},
        {"response_format": {"type": "json_schema", "json_schema": FORMAT}},
    ),
    ({"text": {"format": None}}, {}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"structured_outputs": {"choice": ["a", "b"]}}),
    ({"include": LOGPROBS}, {"logprobs": True}),
    ({"include": LOGPROBS, "top_logprobs": 4}, {"logprobs": True, "top_logprobs": 4}),
    ({"include": []}, {"logprobs": False}),
    ({"top_logprobs": 0}, {}),
    ({"metadata": {"a": "b"}, "store": False, "user": "me", "stream": False, "background": False}, {}),
    ({"parallel_tool_calls": True, "truncation": "disabled", "reasoning": {"effort": None, "summary": "auto"}}, {}),
    ({"tools": [FLAT_WEATHER | {"strict": None}]}, {"tools": [WEATHER]}),
    ({"tools": [FLAT_WEATHER], "tool_choice": "none"}, {}),
    ({"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"a": 1}}),
]  # fmt: skip


def test_a_response_asks_for_what_the_same_chat_asks_for_but_for_one_answer(tmp_path):
    lines = [
        line
        for place, (body, same) in enumerate(SAMPLING)
        for line in (response(f"r{place}", **body), chat(f"c{place}", **same, n=1))
    ]
    path = write_batch(tmp_path / "batch.jsonl", lines)
    job = make_job(path, format="openai", of_job={"n": 3, "logprobs": 2, "structured_outputs": {"regex": "a+"}})
    rows = checked(path, job)[1]
    for place, (body, _) in enumerate(SAMPLING):
        mine, same = (
            {k: row[k] for k in ("token_ids", "n", "max_tokens", "sampling", "error")} for row in rows[2 * place :][:2]
        )
        assert mine["error"] is None, body
        assert mine == same, body
        assert mine["n"] == 1


def test_a_request_keeps_what_its_response_repeats():
    body = {"tools": [FLAT_WEATHER | {"strict": True}], "tool_choice": "none", "metadata": {"a": "b"}}
    found = read(response("a", instructions="Brief.", **body))
    assert isinstance(found, dict)
    assert found["request"]["response"] == body | {"instructions": "Brief."}
    assert "tools" not in found["request"]


PART = [{"type": "input_image", "image_url": "https://example.com/a.png"}]
REFUSED = [
    (response("x", None), "body.input is missing"),
    (response("x", ""), "body.input is empty"),
    (response("x", []), "body.input is an empty list"),
    (response("x", 5), "body.input is a number, not text or a list of items"),
    (response("x", ["Hello"]), "body.input[0] is text, not an item with a type, or with role and content"),
    (response("x", [{"content": "x"}]), "body.input[0] is of the type null, which is not supported; write it as a mes"),
    (response("x", [HELLO, {"type": "item_reference", "id": "1"}]), 'body.input[1] is of the type "item_reference",'),
    (response("x", [{"type": "web_search_call"}]), 'body.input[0] is of the type "web_search_call", which is not'),
    (response("x", [{"role": "tool", "content": "x"}]), 'body.input[0] has the role "tool", not one of user, assis'),
    (response("x", [{"role": "user"}]), "body.input[0].content is null, not text or a list of parts"),
    (response("x", [{"role": "user", "content": PART}]), 'body.input[0].content[0] is of the type "input_image", but '),
    (response("x", [{"role": "user", "content": [{"type": "input_text"}]}]), "body.input[0].content[0].text is null"),
    (response("x", [CALLED | {"arguments": {}}]), "body.input[0].arguments is an object, not text"),
    (response("x", [CALLED | {"call_id": None}]), "body.input[0].call_id is missing"),
    (response("x", [{"type": "function_call_output", "call_id": "c"}]), "body.input[0].output is null, not text or"),
    (response("x", [{"type": "reasoning", "encrypted_content": "x"}]), "body.input[0] holds reasoning without a con"),
    (response("x", instructions=["x"]), "body.instructions is a list, not text"),
    (response("x", max_output_tokens=0), "body.max_output_tokens is 0, not an integer from 1 to "),
    (response("x", max_output_tokens="5"), 'body.max_output_tokens is "5", not an integer from 1 to '),
    (response("x", reasoning={"effort": "huge"}), 'body.reasoning.effort is "huge", not one of none, minimal, low, '),
    (response("x", reasoning={"effort": "low", "mode": "pro"}), "body.reasoning.mode is not supported; leave it out"),
    (response("x", reasoning={"summary": "detailed"}), 'body.reasoning.summary is "detailed", but only "auto" is supp'),
    (response("x", reasoning="low"), "body.reasoning is text, not an object"),
    (
        response("x", reasoning={"effort": "low"}, chat_template_kwargs={"thinking": True}),
        "body.reasoning.effort and body.chat_template_kwargs.thinking are both set; leave one out",
    ),
    (response("x", text={"verbosity": "low"}), 'body.text.verbosity is "low", but only "medium" is supported'),
    (response("x", text={"format": {"type": "grammar"}}), 'body.text.format is not of the type "text" or "json_objec'),
    (response("x", text={"format": {"type": "json_schema", "name": "x"}}), 'body.text.format is not of the type "te'),
    (response("x", text={"format": FORMAT | {"schema": {"type": "strange"}}}), "body.text.format: json cannot be us"),
    (
        response("x", text={"format": FORMAT}, structured_outputs={"regex": "a"}),
        "body.text.format and body.structured_outputs are both set; leave one out",
    ),
    (response("x", include=["reasoning.encrypted_content"]), 'body.include[] is "reasoning.encrypted_content", but'),
    (response("x", top_logprobs=5), 'body.top_logprobs is set, but body.include has no "message.output_text.logprobs"'),
    (response("x", include=LOGPROBS, top_logprobs=-1), "body.top_logprobs is -1, not an integer from 0 to 100"),
    (response("x", metadata={"a": 5}), 'body.metadata is {"a":5}, not an object of texts'),
    (response("x", tools=[WEATHER]), "body.tools[0].name is missing"),
    (response("x", tools=[FLAT_WEATHER, {"type": "web_search"}]), 'body.tools[1] is of the type "web_search", which'),
    (response("x", tools=[FLAT_WEATHER | {"parameters": "x"}]), "body.tools[0].parameters is text, not an object"),
    (response("x", tools=[FLAT_WEATHER], tool_choice="required"), 'body.tool_choice is "required", but only "auto"'),
    (response("x", stream=True), "body.stream is true, but only false is supported"),
    (response("x", background=True), "body.background is true, but only false is supported"),
    (response("x", truncation="auto"), 'body.truncation is "auto", but only "disabled" is supported'),
    *(
        (response("x", **{name: "x"}), f"body.{name} is not supported for {RESPONSES}; {advice}")
        for name, advice in {
            "n": "write a line for each answer",
            "max_tokens": "set body.max_output_tokens instead",
            "max_completion_tokens": "set body.max_output_tokens instead",
            "messages": "leave it out, or set url to /v1/chat/completions",
            "logprobs": 'set body.include = ["message.output_text.logprobs"] and body.top_logprobs instead',
            "response_format": "set body.text.format instead",
            "reasoning_effort": "set body.reasoning.effort instead",
            "enable_thinking": "set body.chat_template_kwargs.enable_thinking instead",
            "guided_json": "set body.structured_outputs.json instead",
            "previous_response_id": "write the earlier turns into body.input",
            "conversation": "write the earlier turns into body.input",
            "prompt": "write its text as body.instructions and body.input",
            "max_tool_calls": "leave it out",
        }.items()
    ),
]  # fmt: skip


@pytest.mark.parametrize(("line", "sentence"), REFUSED)
def test_what_cannot_be_done_is_refused_by_name(line, sentence):
    found = read(line)
    assert isinstance(found, str), found
    assert found.startswith(sentence)


JUNK: list[Any] = [
    *(None, True, 0, -1, 2**70, 1.5, "", "x", [], [[]], [None], ["x"], [5], {}, {"type": 5}, {"type": "message"}),
    *([{"type": kind} for kind in ("message", "function_call", "reasoning", "function")], [{"role": "user"}], [HELLO]),
    *({"effort": []}, {"format": 5}, {"format": {"type": []}}, {"a": "b"}, [SAID, CALLED, THOUGHT], "auto", "none"),
]
KEYS = [
    "input",
    "instructions",
    "max_output_tokens",
    "temperature",
    "reasoning",
    "text",
    "include",
    "top_logprobs",
    "tools",
]
KEYS += ["tool_choice", "metadata", "chat_template_kwargs", "stop", "stream", "structured_outputs", "model", "top_k"]


def test_no_body_is_more_than_an_error_row(tmp_path):
    random = Random(0)
    bodies = [{key: random.choice(JUNK) for key in random.sample(KEYS, random.randint(1, 4))} for _ in range(600)]
    lines = [response(f"row {row}") | {"body": {"model": "m", "input": "x"} | body} for row, body in enumerate(bodies)]
    path = write_batch(tmp_path / "batch.jsonl", [*lines, response("last", model="m")])
    rows = checked(path, make_job(path, format="openai"))[1]
    assert rows[-1]["error"] is None
    errors = [row["error"] for row in rows if row["error"] is not None]
    assert 300 < len(errors) < 600
    assert all("body" in error for error in errors)


def test_reasoning_of_earlier_answers_is_in_prompts_whichever_name_lines_and_template_give_it(tmp_path):
    answer = {"role": "assistant", "content": "Hi"}
    lines = [response("a", [HELLO, THOUGHT, SAID, HELLO])]
    names = ("reasoning", "reasoning_content", "thinking")
    lines += [chat(name, messages=[HELLO, answer | {name: "Hm."}, HELLO]) for name in names]
    path = write_batch(tmp_path / "batch.jsonl", lines)
    wanted = rows_with("Hm.", path)
    for name in ("thinking", "reasoning_content"):
        rows = rows_with("{% for m in messages %}{{ m." + name + " }}{% endfor %}", path)
        assert [row["token_ids"] for row in rows] == [row["token_ids"] for row in wanted]


# ---- reasoning.effort

LEVELS = "{{ messages[0].content }}{% if reasoning_effort is defined %} effort {{ reasoning_effort }}{% endif %}"
SWITCH = "{{ messages[0].content }}{% if not NAME is defined %}{% set NAME = 'unset' %}{% endif %} thinks {{ NAME }}"
TEMPLATES = [
    # what the template is, and what it writes for each effort; None: as without one
    (LEVELS, {"none": " effort none", "minimal": " effort minimal", "high": " effort high", None: ""}),
    *(
        (
            SWITCH.replace("NAME", name),
            {"none": " thinks False", "low": " thinks True", "max": " thinks True", None: " thinks unset"},
        )
        for name in ("thinking", "enable_thinking")
    ),
]  # fmt: skip


def rows_with(template: str, path: Path, **of_input: Any) -> list[dict[str, Any]]:
    """The checked rows of a batch file with a model of this chat template."""
    model = Path(tempfile.mkdtemp(dir=path.parent)) / "model"
    shutil.copytree(RANDOM_MODEL, model)
    (model / "chat_template.jinja").write_text(template)
    job = make_job(path, format="openai", **of_input)
    return checked(path, job.model_copy(update={"model": job.model.model_copy(update={"path": str(model)})}))[1]


@pytest.mark.parametrize(("template", "written"), TEMPLATES)
def test_an_effort_sets_the_templates_own_variables(tmp_path, template, written):
    path = write_batch(
        tmp_path / "batch.jsonl", [response(str(effort), reasoning={"effort": effort}) for effort in written]
    )
    rows = rows_with(template, path)
    assert [row["error"] for row in rows] == [None] * len(rows)
    texts = [chat(f"line {place}", f"Hello{text}") for place, text in enumerate(written.values())]
    wanted = rows_with("{{ messages[0].content }}", write_batch(tmp_path / "wanted.jsonl", texts))
    assert [row["token_ids"] for row in rows] == [row["token_ids"] for row in wanted]


def test_an_effort_is_refused_if_the_template_has_no_variable_for_it(tmp_path):
    efforts = [*EFFORTS, None]
    path = write_batch(tmp_path / "batch.jsonl", [response(str(one), reasoning={"effort": one}) for one in efforts])
    rows = rows_with("{{ messages[0].content }}", path)
    names = "reasoning_effort, enable_thinking, thinking"
    sentence = f"but the model's chat template reads none of {names}; leave it out"
    assert [row["error"] for row in rows] == [f"body.reasoning.effort is {one!r}, {sentence}" for one in EFFORTS] + [
        None
    ]


def test_an_effort_of_a_line_counts_for_more_than_the_jobs_variables(tmp_path):
    template = "{{ messages[0].content }} thinks {{ thinking }}"
    path = write_batch(tmp_path / "batch.jsonl", [response("a", reasoning={"effort": "none"}), response("b")])
    first, second = rows_with(template, path, chat_template_kwargs={"thinking": True})
    without = rows_with(template, path, chat_template_kwargs={"thinking": False})
    assert first["token_ids"] == without[1]["token_ids"] != second["token_ids"]


@pytest.mark.parametrize("effort", EFFORTS)
def test_a_template_with_a_switch_and_levels_gets_both(effort):
    thinks = effort != "none"
    names = {"enable_thinking", "thinking", "reasoning_effort", "messages"}
    assert effort_variables(effort, names) == {"enable_thinking": thinks, "thinking": thinks} | (
        {"reasoning_effort": effort} if thinks else {}
    )
    assert effort_variables(effort, {"reasoning_effort"}) == {"reasoning_effort": effort}
    assert effort_variables(effort, {"thinking"}) == {"thinking": thinks}
    assert effort_variables(effort, {"messages"}) == {}


def test_sampling_of_a_line_is_whole(tmp_path):
    path = write_batch(tmp_path / "batch.jsonl", [response("a", seed=5, max_output_tokens=7)])
    (row,) = checked(path, make_job(path, format="openai"))[1]
    found = sampling_from_json(row["sampling"])
    assert (found.seed, found.max_tokens, found.n, row["max_tokens"]) == (5, 7, 1, 7)
