"""Whole jobs whose rows offer tools: the calls in each form of outputs."""

from __future__ import annotations

import json
import shutil

import pytest

from support.jobs import batchinfer, outputs, write_job, write_shard
from support.openai_batches import read_lines, write_batch
from support.paths import RANDOM_MODEL

TOOLS = """[{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
"zip": {"type": "string"}, "v": {"type": "string"}, "n": {"type": "integer"}, "path": {"type": "string"},
"e": {"enum": ["1", "2"]}, "o": {"type": ["string", "null"]}}}}}]"""


def glm(**texts):
    pairs = [f"<arg_key>{name}</arg_key>\n<arg_value>{text}</arg_value>\n" for name, text in texts.items()]
    return f"<tool_call>f\n{''.join(pairs)}</tool_call>"


def v32(name, text, is_text="true"):
    parameter = f'<｜DSML｜parameter name="{name}" string="{is_text}">{text}</｜DSML｜parameter>'
    invoke = f'<｜DSML｜invoke name="f">\n{parameter}\n</｜DSML｜invoke>'
    return f"<｜DSML｜function_calls>\n{invoke}\n</｜DSML｜function_calls>"


def kimi(own_id, arguments='{"path": "/"}', section="tool_calls_section"):
    call = f"<|tool_call_begin|>{own_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
    return f"<|{section}_begin|>{call}<|{section}_end|>"


QUOTED = "In Mistral's form [ARGS] comes before the arguments."
THOUGHT = "<think>maybe <tool_call>f</tool_call>, no</think>Hello"
ANSWERS = {  # an answer, and the arguments of its call of f; [] where it calls nothing, None where nothing fits
    "declared": (glm(zip="10001", v="1.10", n="3"), '{"zip": "10001", "v": "1.10", "n": 3}'),
    "blanks": (glm(v=" 5 "), '{"v": " 5 "}'),
    "quotes": (glm(v='"q"'), r'{"v": "\"q\""}'),
    "true": (glm(v="true"), '{"v": "true"}'),
    "null": (glm(v="null", o="null"), '{"v": "null", "o": null}'),
    "object": (glm(v='{"a":1}'), r'{"v": "{\"a\":1}"}'),
    "enum": (glm(e="1"), '{"e": "1"}'),
    "undeclared": (glm(x="1.10"), '{"x": 1.10}'),
    "of another type": (glm(n="three"), None),
    "v32": (v32("n", "1.10", "false"), '{"n": 1.10}'),
    "hermes": ('<tool_call>{"name": "f", "arguments": {"n": 1e5}}</tool_call>', '{"n": 1e5}'),
    "mistral": ('[TOOL_CALLS][{"name": "f", "arguments": {"v": 1.10}}]', '{"v": 1.10}'),
    "kimi's variant": (kimi("functions_f_1"), '{"path": "/"}'),
    "named inside": (kimi("call_abc123", '{"name": "f", "path": "/"}'), '{"path": "/"}'),
    "singular": (kimi("functions.f:0", section="tool_call_section"), '{"path": "/"}'),
    "nobody": ("<tool_call>nobody</tool_call>", None),
    "type alone": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{"a":1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        None,
    ),
    "wrapped": (v32("arguments", '{"path": "/x"}'), '{"path": "/x"}'),
    "wrapped as input": (v32("input", '{"path": "/x"}'), '{"path": "/x"}'),
    "quoted": (QUOTED, []),
    "thought": (THOUGHT, []),
}


def calls_of(arguments):
    return [{"name": "f", "arguments": arguments}] if isinstance(arguments, str) else arguments


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A folder with the job of ANSWERS, its outputs in OpenAI's form; and the same job with lines of rows."""
    folder = tmp_path_factory.mktemp("calls")
    messages = [{"role": "user", "content": "Go"}]
    rows = [
        {"id": name, "messages": messages, "sampling": {"structured_outputs": {"choice": [answer]}}}
        for name, (answer, _) in ANSWERS.items()
    ]
    write_batch(folder / "in.jsonl", rows)
    keys = {"files": ["in.jsonl"], "prompt": None, "messages": "messages", "sampling": "sampling", "tools": TOOLS}
    parts = {"input": keys, "sampling": {"max_tokens": 300}}
    ended = batchinfer("run", write_job(folder, **parts, output={"format": "openai"}))
    assert ended.code == 0, ended.err
    return folder, write_job(folder, name="lines.toml", **parts, output={"format": "jsonl"})


def test_calls_are_what_the_model_wrote_and_the_job_offered(ran):
    folder, _ = ran
    (rows,) = outputs(folder / "run").values()
    assert {row["id"]: row["text"] for row in rows} == {name: answer for name, (answer, _) in ANSWERS.items()}
    found = {row["id"]: row["tool_calls"] for row in rows}
    assert found == {name: calls_of(arguments) for name, (_, arguments) in ANSWERS.items()}


def test_an_answer_in_openais_form_loses_no_text(ran):
    folder, _ = ran
    for line in read_lines(folder / "run" / "outputs" / "in.jsonl"):
        answer, arguments = ANSWERS[line["custom_id"]]
        (choice,) = line["response"]["body"]["choices"]
        message = choice["message"]
        if calls_of(arguments):
            assert (choice["finish_reason"], message["content"]) == ("tool_calls", None)
            assert [call["function"] for call in message["tool_calls"]] == calls_of(arguments)
        else:
            assert (choice["finish_reason"], message["content"]) == ("stop", answer)
            assert "tool_calls" not in message
        if "kimi" in line["custom_id"]:
            assert message["tool_calls"][0]["id"] == "functions.f:0"


@pytest.mark.all  # make test: what the model wrote, above
def test_lines_of_rows_have_the_same_calls(ran):
    folder, lines = ran
    assert batchinfer("run", lines).code == 0
    found = {row["id"]: row["tool_calls"] for row in read_lines(folder / "run" / "outputs" / "in.jsonl")}
    assert found == {name: calls_of(arguments) for name, (_, arguments) in ANSWERS.items()}


def test_each_row_has_its_own_tools_and_only_the_models_own_form_counts(tmp_path):
    """On a folder whose template writes DeepSeek's calls, with tools in a column, several samples and shards."""
    model = shutil.copytree(RANDOM_MODEL, tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    calls = "{% for call in message.tool_calls or [] %}<｜tool▁calls▁begin｜>{{ call.function.name }}{% endfor %}"
    settings["chat_template"] += f"{{% for message in messages %}}{calls}{{% endfor %}}"
    (model / "tokenizer_config.json").write_text(json.dumps(settings))

    def offered(*names):
        return json.dumps([{"name": name, "parameters": {}} for name in names])

    call = (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"n": 1.10}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    )
    rows = [(offered("f"), call), (offered("g"), call), (None, call), (offered("f", "g"), call)]
    rows += [(offered("f"), text) for text in (QUOTED, "`<tool_call>` is a tag", glm(n="3"), "None.")]
    for shard, part in enumerate((rows[:3], rows[3:])):
        columns = {
            "m": [[{"role": "user", "content": "Go"}]] * len(part),
            "t": [tools for tools, _ in part],
            "s": [json.dumps({"n": 2, "structured_outputs": {"choice": [text]}}) for _, text in part],
        }
        write_shard(tmp_path / "prompts" / f"{shard}.parquet", columns, row_group_size=2)
    keys = {"id": "none", "prompt": None, "messages": "m", "tools": "t", "sampling": "s"}
    job = write_job(tmp_path, input=keys, sampling={"max_tokens": 300}, model={"path": str(model)})
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    assert json.loads((tmp_path / "run" / "run.json").read_text())["tool_forms"] == ["deepseek_v3"]
    found = [row["tool_calls"] for rows in outputs(tmp_path / "run").values() for row in rows]
    called = calls_of('{"n": 1.10}')
    assert found[::2] == found[1::2] == [called, None, called, called, [], [], [], []]
