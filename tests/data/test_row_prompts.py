"""Prompts of rows: JSON text, content parts, ShareGPT, the job's template, and the model's template."""

from __future__ import annotations

import json
from datetime import date

import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from batchinfer.config import JobConfig
from batchinfer.data.chat import MAX_CHARS, NO_DATE
from batchinfer.data.row_encoder import RowEncoder
from batchinfer.data.row_prompts import RowPrompts
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.records import ModelError
from support.hostile import SAMPLE_MODEL, model_folder
from support.jobs import batchinfer, outputs, write_job, write_shard

# as DeepSeek-V3.1's: tools in the system text, thinking chosen by a variable, calls of tools in the history
V31 = """{%- if not thinking is defined %}{% set thinking = false %}{% endif -%}
{%- set ns = namespace(system='') -%}
{%- for m in messages if m.role == 'system' %}{% set ns.system = ns.system + m.content %}{% endfor -%}
{{- bos_token }}{{ ns.system }}
{%- if tools is defined and tools is not none %}

## Tools
{%- for tool in tools %}

### {{ tool.function.name }}
Description: {{ tool.function.description }}
Parameters: {{ tool.function.parameters | tojson }}
{%- endfor %}{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% endif -%}
{%- if m.role == 'assistant' -%}
{{- '<｜Assistant｜></think>' + (m.content or '') -}}
{%- for call in m.tool_calls or [] -%}
<｜tool▁call▁begin｜>{{ call.function.name }}<｜tool▁sep｜>{{ call.function.arguments }}<｜tool▁call▁end｜>
{%- endfor %}{{ eos_token }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{% endif -%}"""
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <now> in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
HELLO = {"role": "user", "content": "Hello"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        "sample": SAMPLE_MODEL,
        "v31": model_folder(tmp_path_factory.mktemp("prompts") / "model", template=V31),
    }


def row_encoder(folder=SAMPLE_MODEL, **keys) -> RowEncoder:
    table = {"input": {"files": ["x"], **keys}, "output": {"dir": "x"}, "model": {"path": str(folder)}}
    job = JobConfig.model_validate({**table, "sampling": {"max_tokens": 1}})
    prompts = RowPrompts(job.input.model_dump(exclude={"files"}))
    return RowEncoder(load_tokenizer(folder), prompts, 2048, job.input.control_tokens)


def encoded(column, folder=SAMPLE_MODEL, **keys) -> list[list[int] | str]:
    """For each row its ids or its error; `column` as the rows' values, or {column: values}."""
    array = pa.array(column) if isinstance(column, list) else pa.Table.from_pydict(column).to_struct_array()
    array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    rows = row_encoder(folder, **keys).encode(array).to_pylist()
    return [row["error"] or row["token_ids"] for row in rows]


def expected(chat, folder=SAMPLE_MODEL, **arguments) -> list[int]:
    """By transformers."""
    arguments = {"add_generation_prompt": True, **arguments}
    return AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, return_dict=False, **arguments)


# ---- messages


def test_messages_as_json_text_are_those_of_a_list():
    chat = [{"role": "system", "content": "Be brief."}, HELLO]
    assert encoded([json.dumps(chat)], messages="m") == encoded([chat], messages="m") == [expected(chat)]


def test_null_fields_of_structs_are_not_there_and_nulls_of_json_text_are(tmp_path):
    template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    folder = model_folder(tmp_path / "model", template=template)

    def chat(**arguments):
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        return [HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]

    chats = [chat(city="Rome"), chat(zone={"name": "CET", "dst": [1, None]}), chat(city="Rome", zone={"name": "CET"})]
    found = encoded([json.dumps(chat) for chat in chats], folder, messages="m")
    assert encoded(chats, folder, messages="m") == found
    assert encoded([json.dumps(chat(city="Rome", zone=None))], folder, messages="m")[0] not in found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "m is not valid JSON"),
        ("[" * 100_000, "m is not valid JSON"),
        ("null", "m is null"),
        ('{"role": "user"}', "m is not a list of messages"),
        ("[]", "m is an empty list"),
        ("[null]", "m has a null in place of message 0"),
        ('["hi"]', "m[0] is not an object with role and content"),
        ('[{"content": "x"}]', "m has no role in message 0"),
        ('[{"role": 1, "content": "x"}]', "m[0] has a role that is not text"),
        ('[{"role": "user"}]', "m has no content in message 0"),
        ('[{"role": "user", "content": 5}]', "m[0] has content that is neither text nor a list of parts"),
        ('[{"role": "user", "content": ["x"]}]', "m[0] has a content part without a type"),
        ('[{"role": "user", "content": [{"type": "text"}]}]', "m[0] has a content part of type text without a text"),
    ],
)
def test_json_text_that_holds_no_chat_is_a_sentence_at_its_row(text, told):
    first, second = encoded([text, json.dumps([HELLO])], messages="m")
    assert first.startswith(told)
    assert second == expected([HELLO])


def test_text_parts_are_joined_and_other_parts_are_refused_by_name():
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    chats = [[{"role": "user", "content": parts}], [{"role": "user", "content": parts}] * 2]
    chats[1][1] = {"role": "user", "content": [*parts, image]}
    told = "messages[1] holds an image_url, which this model cannot read"
    assert encoded(chats, messages="messages") == [expected([HELLO]), told]
    assert encoded([json.dumps(chat) for chat in chats], messages="messages") == [expected([HELLO]), told]


def test_the_system_text_is_for_chats_that_have_none():
    own = [{"role": "system", "content": "Mine."}, HELLO]
    found = encoded([[HELLO], own], messages="m", system="Be brief.")
    assert found == [expected([{"role": "system", "content": "Be brief."}, HELLO]), expected(own)]


def test_sharegpt_conversations_are_messages():
    turns = [("system", "Be brief."), ("human", "Hi"), ("gpt", "Yes?"), ("human", "Hello")]
    rows = [[{"from": who, "value": text} for who, text in turns], [{"from": "tool", "value": "x"}]]
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    chat = [{"role": roles[who], "content": text} for who, text in turns]
    told = "conversations[0] is from 'tool', not from system, human, gpt"
    assert encoded(rows, format="sharegpt") == [expected(chat), told]
    assert encoded([json.dumps(row) for row in rows], format="sharegpt", messages="conversations")[0] == expected(chat)


# ---- what the model's template is given


@pytest.mark.parametrize("name", ["sample", "v31"])
@pytest.mark.parametrize("thinking", [True, False])
def test_tools_and_variables_reach_the_template_as_in_transformers(folders, name, thinking):
    chat = [{"role": "system", "content": "Be brief."}, HELLO]
    chat += [] if name == "sample" else [CALL, {"role": "user", "content": "And now?"}]
    ids = expected(chat, folders[name], tools=[TOOL], thinking=thinking)
    texts = [json.dumps(chat)]
    for tools, kwargs in [([TOOL], {"thinking": thinking}), (TOOL, {"thinking": thinking})]:
        assert encoded(texts, folders[name], messages="m", tools=tools, chat_template_kwargs=kwargs) == [ids]
    columns = {"messages": "m", "tools": "t", "chat_template_kwargs": "k"}
    for tools, kwargs in [(json.dumps([TOOL]), json.dumps({"thinking": thinking})), ([TOOL], {"thinking": thinking})]:
        assert encoded({"m": texts, "t": [tools], "k": [kwargs]}, folders[name], **columns) == [ids]


def test_tools_and_variables_differ_by_row(folders):
    other = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
    rows = {
        "m": [[HELLO]] * 4,
        "t": [[TOOL], [other], None, [TOOL, other]],  # as structs, each has the fields of all
        "k": [{"thinking": True}, None, {"thinking": None}, {"thinking": False}],
    }
    found = encoded(rows, folders["v31"], messages="m", tools="t", chat_template_kwargs="k")
    assert found == [
        expected([HELLO], folders["v31"], tools=[TOOL], thinking=True),
        expected([HELLO], folders["v31"], tools=[other]),
        expected([HELLO], folders["v31"]),
        expected([HELLO], folders["v31"], tools=[TOOL, other]),
    ]


def test_null_as_json_text_is_null(folders):
    columns = {"messages": "m", "tools": "t", "chat_template_kwargs": "k"}
    found = encoded({"m": [[HELLO]] * 2, "t": ["null", None], "k": [" null", None]}, folders["v31"], **columns)
    assert found == [expected([HELLO], folders["v31"])] * 2


@pytest.mark.parametrize(
    ("tools", "kwargs", "told"),
    [
        ("{", "{}", "t is not valid JSON"),
        ("[1]", "{}", "t is not a list of tools, each an object"),
        ("[]", "[]", "k is not an object of variables for the chat template"),
        ("[]", '{"messages": []}', "k sets messages, which the job has other keys for; leave it out"),
    ],
)
def test_wrong_tools_and_variables_are_sentences_at_their_rows(tools, kwargs, told):
    rows = {"m": [[HELLO]] * 2, "t": [tools, "[]"], "k": [kwargs, "{}"]}
    first, second = encoded(rows, messages="m", tools="t", chat_template_kwargs="k")
    assert first.startswith(told)
    assert second == expected([HELLO])


DATED = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
UNDATED = "{% if messages[0].role == 'user' %}" + DATED + "{% else %}none{% endif %}"


@pytest.fixture
def dated(tmp_path):
    return model_folder(tmp_path / "model", template=DATED)


@pytest.mark.parametrize("control", ["parse", "text"])
def test_a_date_is_the_one_that_the_job_or_the_row_names(dated, control):
    ids = encoded(["31 Jan 2026Hello"], prompt="p")[0][1:]  # without the token that begins a text
    keys = {"messages": "m", "control_tokens": control}
    named = {"strftime_now": "2026-01-31"}
    assert encoded([[HELLO]], dated, **keys, chat_template_kwargs=named) == [ids]
    assert encoded([[HELLO]], dated, **keys) == [NO_DATE]
    rows = {"m": [[HELLO]] * 4, "k": [json.dumps(named), "{}", '{"strftime_now": "today"}', '{"strftime_now": 5}']}
    told = 'k sets strftime_now to {}, which is no date such as "2026-01-31"'
    wanted = [ids, NO_DATE, told.format("'today'"), told.format(5)]
    assert encoded(rows, dated, **keys, chat_template_kwargs="k") == wanted


def test_a_plan_without_a_date_that_every_chat_needs_is_refused(dated, tmp_path):
    write_shard(tmp_path / "prompts" / "a.parquet", {"m": [[HELLO], [{"role": "system", "content": "x"}]]})

    def plan(name, kwargs=None):
        keys = {"prompt": None, "messages": "m", "chat_template_kwargs": kwargs}
        return batchinfer("plan", write_job(tmp_path, input=keys, model={"path": str(dated)}, output={"dir": name}))

    ended = plan("none")
    assert (ended.code, NO_DATE in ended.err) == (2, True)
    assert not (tmp_path / "none").exists()
    ended = plan("wrong", {"strftime_now": "31/01/2026"})
    told = "input.chat_template_kwargs sets strftime_now to '31/01/2026', which is no date"
    assert (ended.code, told in ended.err) == (2, True)
    assert plan("good", {"strftime_now": "2026-01-31"}).code == 0

    # one that only some chats need
    (dated / "chat_template.jinja").write_text(UNDATED)
    ended = plan("some")
    assert ended.code == 0
    assert f"1 bad row in {tmp_path}/prompts/a.parquet; the first: row 0: {NO_DATE}" in ended.err


# as Llama 3.2's
FIXED = """{%- if not date_string is defined %}{% if strftime_now is defined -%}
{% set date_string = strftime_now('%d %b %Y') %}{% else %}{% set date_string = '26 Jul 2024' %}{% endif %}{% endif -%}
{{ date_string }}{% for m in messages %}{{ m.content }}{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "keys", "is_warned"),
    [
        (FIXED, {"messages": "m"}, True),
        (FIXED, {"user": "u", "chat_template_kwargs": {"enable_thinking": True}}, True),
        (FIXED, {"messages": "m", "chat_template_kwargs": {"strftime_now": "2024-07-26"}}, False),
        (FIXED, {"messages": "m", "chat_template_kwargs": {"date_string": "today"}}, False),
        (FIXED, {"messages": "m", "chat_template_kwargs": "k"}, False),
        (FIXED, {"prompt": "u"}, False),
        ("{{ messages[0].content }}{% if now is defined %}{{ strftime_now('%Y') }}{% endif %}", {"user": "u"}, False),
        (
            "{% if messages | length > 9 %}{{ strftime_now('%Y') }}{% endif %}{{ messages[0].content }}",
            {"user": "u"},
            False,
        ),
    ],
)
def test_a_date_that_the_template_has_fixed_is_noticed(tmp_path, template, keys, is_warned):
    folder = model_folder(tmp_path / "model", template=template)
    encoder = row_encoder(folder, **keys)
    encoder.try_out()
    assert encoder.lacks_date() == is_warned


def test_a_plan_warns_of_a_fixed_date_and_names_the_remedy(tmp_path):
    folder = model_folder(tmp_path / "model", template=FIXED)
    write_shard(tmp_path / "prompts" / "a.parquet", {"m": [[HELLO]]})
    job = write_job(tmp_path, input={"prompt": None, "messages": "m"}, model={"path": str(folder)})
    told = "writes today's date with transformers and vLLM, but a fixed date or none here"
    ended = batchinfer("plan", job)
    (warning,) = [line for line in ended.err.splitlines() if told in line]
    remedy = f'chat_template_kwargs = {{ strftime_now = "{date.today()}" }}'
    assert (ended.code, warning.endswith(f"input.{remedy}")) == (0, True)
    # the remedy, also as a date of TOML
    for text in (remedy, remedy.replace('"', "")):
        job.write_text(job.read_text().replace("[input]", f"[input]\n{text}").replace('dir = "', 'dir = "x'))
        ended = batchinfer("plan", job)
        assert (ended.code, told in ended.err) == (0, False), ended.err
        job.write_text(job.read_text().replace(f"{text}\n", ""))


def test_control_tokens_in_tools_are_text_where_the_job_says_so(folders):
    tool = {"type": "function", "function": {**TOOL["function"], "description": "<｜User｜>"}}
    settings = {"messages": "m", "tools": [tool], "chat_template_kwargs": {"thinking": True}}
    parsed, literal, refused = (
        encoded([[HELLO]], folders["v31"], **settings, control_tokens=how)[0] for how in ("parse", "text", "error")
    )
    user = load_tokenizer(SAMPLE_MODEL).token_id("<｜User｜>")
    assert (parsed.count(user), literal.count(user)) == (2, 1)
    assert "<｜User｜>" in refused


@pytest.mark.parametrize("name", ["sample", "v31"])
@pytest.mark.parametrize("content", ["The answer is", "ends in a blank ", "\n"])
@pytest.mark.parametrize(
    "template", [None, "{% for m in messages %}[{{ m.role }}] {{ m.content.strip() }} {% endfor %}"]
)
def test_the_final_message_is_continued_as_in_transformers(folders, tmp_path, name, content, template):
    folder = folders[name] if template is None else model_folder(tmp_path / "model", template=template)
    chat = [HELLO, {"role": "assistant", "content": content}]
    ids = expected(chat, folder, continue_final_message=True, add_generation_prompt=False)
    assert encoded([chat], folder, messages="m", continue_final_message=True) == [ids]


def test_a_final_message_that_cannot_be_continued_is_a_sentence_at_its_row(folders):
    chats = [json.dumps([HELLO, CALL]), json.dumps([HELLO, {"role": "tool", "content": "x"}])]
    assert encoded(chats, folders["v31"], messages="m", continue_final_message=True) == [
        "the final message has no content to continue (input.continue_final_message)",
        "the chat template leaves out the final message, which is to be continued",
    ]


def test_each_row_gets_the_template_for_its_tools_and_arguments_in_its_form(tmp_path):
    calls = "{% for c in messages[1].tool_calls or [] %}{{ c.function.arguments WRITTEN }}{% endfor %}"
    folder = model_folder(tmp_path / "model", template=calls.replace("WRITTEN", "['city'] + ' as an object'"))
    (folder / "additional_chat_templates").mkdir()
    of_tools = "{{ tools[0].type }}" + calls.replace("WRITTEN", "+ ' as text'")
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(of_tools)
    rows = {"m": [json.dumps([HELLO, CALL])] * 2, "t": [None, json.dumps([TOOL])]}
    texts = ["Rome as an object", 'function{"city": "Rome"} as text']
    wanted = [ids[1:] for ids in load_tokenizer(SAMPLE_MODEL).encode_prompts(texts)]
    assert encoded(rows, folder, messages="m", tools="t") == wanted


@pytest.mark.parametrize(
    ("name", "tools", "is_refused"), [("rag", [TOOL], True), ("tool_use", None, True), ("tool_use", "t", False)]
)
def test_templates_of_which_none_is_for_the_chats_are_named(tmp_path, name, tools, is_refused):
    folder = model_folder(tmp_path / "model")
    table = json.loads((folder / "tokenizer_config.json").read_text())
    table["chat_template"] = [{"name": name, "template": "x"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(table))
    told = f"the chat templates of the model folder are called {name}, but chats"
    if is_refused:
        with pytest.raises(ModelError, match=told):
            row_encoder(folder, messages="m", tools=tools)
    else:
        row_encoder(folder, messages="m", tools=tools).try_out()
        first, second = encoded(
            {"m": [[HELLO]] * 2, "t": [None, json.dumps([TOOL])]}, folder, messages="m", tools=tools
        )
        assert first.startswith(told)
        assert second == load_tokenizer(SAMPLE_MODEL).encode_prompts(["x"])[0][1:]
    assert encoded(["Hello"], folder, prompt="p") == load_tokenizer(SAMPLE_MODEL).encode_prompts(["Hello"])


# ---- the job's template


def test_a_template_writes_the_prompt_of_a_row():
    template = "{{ q }}{% for c in choices %}\n{{ loop.index }}. {{ c.text | upper }}{% endfor %}"
    rows = {"q": ["Which?", "None?"], "choices": [[{"text": "a"}, {"text": "b"}], []]}
    texts = ["Which?\n1. A\n2. B", "None?"]
    assert encoded(rows, template=template) == load_tokenizer(SAMPLE_MODEL).encode_prompts(texts)
    chats = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}] for text in texts]
    assert encoded(rows, template=template, system="Be brief.") == [expected(chat) for chat in chats]
    assert encoded({"q": [2.5]}, template="{{ ([q, 1] | join('+')) ~ '=' ~ (q + 1) }}") == encoded(
        ["2.5+1=3.5"], prompt="p"
    )
    filled = "{{ '%s' % q }} {{ '%(q)s' % {'q': q, 'r': none} }} {{ '%.2f' | format(q) }} {{ '{:.0f}'.format(q * 2) }}"
    assert encoded({"q": [2.5]}, template=filled + "{{ 5 % 3 }}") == encoded(["2.5 2.5 2.50 52"], prompt="p")
    named = "{{ [{'x': q}, {'x': 1}] | join('+', attribute='x') }}"
    assert encoded({"q": [2.5]}, template=named) == encoded(["2.5+1"], prompt="p")
    assert encoded({"q": ["Which?"]}, template="{{ q }}") == load_tokenizer(SAMPLE_MODEL).encode_prompts(["Which?"])


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ a }}", "input.template writes a value that is null (a is null); give it a default: {{ a or '' }}"),
        ("{{ b.y }}", "input.template writes a value that is null; give it a default: {{ column or '' }}"),
        ("{{ a | upper }}", "input.template writes a value that is null (a is null)"),
        ("{{ a | trim | title }}", "input.template writes a value that is null (a is null)"),
        ("{{ a | replace('o', 'u') }}", "input.template writes a value that is null (a is null)"),
        ("{{ 'x' | replace('x', a) }}", "input.template writes a value that is null (a is null)"),
        ("{{ '%s' | format(a) }}", "input.template writes a value that is null (a is null)"),
        ("{{ '%s %s' % (b.x, a) }}", "input.template writes a value that is null (a is null)"),
        ("{{ '{} {y}'.format(b.x, y=a) }}", "input.template writes a value that is null (a is null)"),
        ("{{ '%(y)s' % b }}", "input.template fails on the row: 'y'"),
        ("{{ 'x' ~ a ~ b.x }}", "input.template writes a value that is null (a is null)"),
        ("{{ [b.x, a] | join(', ') }}", "input.template writes a value that is null (a is null)"),
        ("{{ [b, b] | map(attribute='y') | join }}", "input.template writes a value that is null; give"),
        ("{{ [b] | join(', ', attribute='y') }}", "input.template writes a value that is null; give"),
        ("{% for x in a %}{{ x }}{% endfor %}", "'NoneType' object is not iterable (a is null)"),
        ("{{ a or '' }}", "input.template writes an empty prompt"),
        ("{{ b.c }}", "input.template fails on the row: 'dict object' has no attribute 'c'"),
        ("{{ a + 1 }}", "input.template fails on the row: unsupported operand"),
        ("{{ raise_exception(b.x) }}", "no"),
        ("{{ b.__class__.__mro__ }}", "input.template fails on the row: "),
        (
            f"{{% for i in range(99999) %}}{{{{ b.x * {MAX_CHARS // 90000} }}}}{{% endfor %}}",
            "input.template writes more",
        ),
    ],
)
def test_a_template_that_fails_on_a_row_is_a_sentence_there(template, told):
    (error,) = encoded(
        {"a": pa.array([None], pa.int64()), "b": [{"x": "no", "y": None}]}, template=template + "{# a b #}"
    )
    assert told in error


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ q", r"input\.template is not valid Jinja: .*correct it"),
        ("{{ q | no_such_filter }}", r"No filter named 'no_such_filter'"),
        ("Tell a story.", r"input\.template names no column of the rows"),
        ("{{ range(3) }}", r"input\.template names no column of the rows"),
    ],
)
def test_a_template_that_can_never_work_is_refused(template, told):
    with pytest.raises(ModelError, match=told):
        row_encoder(template=template)


# ---- whole jobs


def test_a_job_of_a_template_runs_and_a_misspelt_column_is_refused_by_name(tmp_path):
    columns = {"id": [1, 2], "q": ["Why?", None], "who": pa.array(["Ann", "Bob"]).dictionary_encode()}
    write_shard(tmp_path / "prompts" / "a.parquet", columns)
    keys = {"prompt": None, "template": "{{ who }} asks: {{ q }}", "system": "Be brief. " * 9000}
    ended = batchinfer("plan", write_job(tmp_path, input={**keys, "template": "{{ who }} {{ qu }}"}))
    assert ended.code == 2
    assert "input.template names 'qu', which no input shard has; the first shard has id, q, who" in ended.err
    ended = batchinfer("run", write_job(tmp_path, input={**keys, "system": "Be brief."}))
    assert ended.code == 3, ended.err
    first, second = outputs(tmp_path / "run")["a.parquet"]
    assert first["status"] == "ok"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Ann asks: Why?"}]
    assert first["prompt_tokens"] == len(expected(chat))
    assert second["error"] == "input.template writes a value that is null (q is null); give it a default: {{ q or '' }}"


def test_columns_of_the_wrong_type_make_their_rows_bad(tmp_path):
    write_shard(tmp_path / "prompts" / "a.parquet", {"m": [[HELLO]], "t": [1]})
    ended = batchinfer("plan", write_job(tmp_path, input={"prompt": None, "messages": "m", "tools": "t"}))
    assert "column 't' is int64, but must be a list of structs, or JSON text" in ended.err
    ended = batchinfer("plan", write_job(tmp_path, input={"prompt": None, "messages": "m", "tools": "x"}))
    assert "input.tools names 'x', which no input shard has" in ended.err


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (
            {"system": "x"},
            "input.system is for chats, but prompt alone makes none; use user, messages, or",
        ),
        ({"prompt": None, "template": "{{ q }}", "tools": "t"}, "input.tools is for chats, but template alone makes"),
        ({"continue_final_message": True}, "input.continue_final_message is for chats of input.messages"),
        ({"format": "sharegpt"}, "exactly one must be set, but the job sets prompt and messages"),
        ({"prompt": None, "messages": "m", "chat_template_kwargs": {"tools": []}}, "sets tools, which the job has"),
        ({"prompt": None, "messages": "m", "tools": 5}, "input.tools"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(tmp_path, keys, told):
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": ["x"], "m": [[HELLO]]})
    ended = batchinfer("plan", write_job(tmp_path, input=keys))
    assert ended.code == 2
    assert told in ended.err
