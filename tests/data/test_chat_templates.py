"""Chats of models whose folder has no template, compared with the text that the model's own program writes."""

import hashlib
import json

import pytest

from batchinfer.data.chat import ChatError, ChatTemplate
from batchinfer.data.tokenizer import OWN_TEMPLATES, load_tokenizer
from support.paths import SAMPLE_MODEL
from support.v4_conversations import DIGESTS, NUM_CONVERSATIONS, conversation

BEGIN, END, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
TOOL = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "ü": [1, None]}}}
SCHEMAS = '<functions>\n{"name": "tide", "parameters": {"type": "object", "ü": [1, null]}}\n</functions>\n'


def call(**arguments):
    """A call of the tool, its arguments as JSON text, as they come from outside."""
    return {"type": "function", "function": {"name": "tide", "arguments": json.dumps(arguments)}}


def invoked(*parameters):
    written = "\n".join(
        f'<｜DSML｜parameter name="{name}" string="{is_text}">{value}</｜DSML｜parameter>'
        for name, is_text, value in parameters
    )
    return f'<｜DSML｜invoke name="tide">\n{written}\n</｜DSML｜invoke>'


def called(*invokes):
    lines = ["<｜DSML｜function_calls>", *invokes, "</｜DSML｜function_calls>"]
    return "\n\n" + "\n".join(lines)


def results(*texts):
    lines = ["<function_results>", *(f"<result>{text}</result>" for text in texts), "</function_results>"]
    return "\n\n" + "\n".join(lines) + "\n\n"


# how the templates of several families write the arguments of a call
DEEPSEEK_V3 = """{%- for call in m.tool_calls or [] -%}
{{ '<｜tool▁sep｜>' + call.function.name + '\n```json\n' + call.function.arguments + '\n```' }}{% endfor -%}"""
KIMI_K2 = """{%- for call in m.get('tool_calls') or [] -%}
{{ call.id }}{% if call.function.arguments is string %}{{ call.function.arguments }}
{%- else %}{{ call.function.arguments | tojson }}{% endif %}{% endfor -%}"""
GLM_47 = """{%- set content = visible_text(m.content) %}{{ content.strip() }}{% for tc in m.tool_calls or [] -%}
{%- if tc.function %}{% set tc = tc.function %}{% endif -%}
{{- '<tool_call>' + tc.name }}{% set _args = tc.arguments %}{% for k, v in _args.items() -%}
<arg_key>{{ k }}</arg_key><arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{%- endfor %}</tool_call>{% endfor -%}"""
NO_NULL = "{{ m.content + '' }}" + GLM_47
MISTRAL = """{%- for call in m.tool_calls or [] -%}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif -%}
{{ '[ARGS]' + call.function.arguments | tojson }}{% endfor -%}"""


def of_family(calls):
    """A template with this text for each message."""
    text = "{%- macro visible_text(content) %}{{ content if content is string else content }}{% endmacro -%}"
    return ChatTemplate(f"{text}{{%- for m in messages %}}{calls}{{%- endfor %}}", {})


@pytest.mark.parametrize(
    ("calls", "of_text", "of_object"),
    [
        # DeepSeek's appends a text to a text, Kimi's takes both, GLM's asks for the items of an object, and Mistral's
        # writes JSON of whatever it is given
        (DEEPSEEK_V3, '```json\n{"at":[1.5],"port":"Brest"}\n```', '```json\n{"at": [1.5], "port": "Brest"}\n```'),
        (KIMI_K2, 'call00001{"at":[1.5],"port":"Brest"}', 'call00001{"at": [1.5], "port": "Brest"}'),
        (GLM_47, "<arg_key>at</arg_key><arg_value>[1.5]</arg_value><arg_key>port</arg_key><arg_value>Brest<", None),
        (NO_NULL, "<arg_key>at</arg_key><arg_value>[1.5]<", None),
        (MISTRAL, '[ARGS]{"at": [1.5], "port": "Brest"}', None),
    ],
)
def test_arguments_of_calls_are_given_as_the_template_takes_them(calls, of_text, of_object):
    template = of_family(calls)
    arguments = {"at": [1.5], "port": "Brest"}

    def written(arguments):
        asked = {"id": "call00001", "type": "function", "function": {"name": "tide", "arguments": arguments}}
        chat = [{"role": "assistant", "content": "" if calls is NO_NULL else None, "tool_calls": [asked]}]
        return template.render(template.with_arguments(chat))

    assert of_text in written(json.dumps(arguments, separators=(",", ":")))
    assert (of_object or of_text) in written(arguments)


@pytest.mark.parametrize("arguments", ["[1]", "{", "[" * 100_000, 5])
def test_arguments_that_are_no_object_are_left_to_the_template(arguments):
    template = of_family(GLM_47)
    chat = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]
    assert template.with_arguments(chat) == chat
    with pytest.raises(ChatError, match="the chat template fails on the messages"):
        template.render(chat)


def test_a_call_may_have_no_arguments_and_messages_of_any_form_pass():
    template = of_family(GLM_47)
    chat = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]
    assert template.render(template.with_arguments(chat)) == "<tool_call>f</tool_call>"
    for calls in (5, "x", [5], [{}], [{"function": 5}], [{"function": {}}], {"function": {}}):
        strange = [{"role": "assistant", "tool_calls": calls}]
        assert template.with_arguments(strange) == strange


OF_API = ["call_8Zk1VbQ0", "call_5Yd7XcP9", "call_8Zk1VbQ0"]


def tool_chat(ids):
    """Two calls and their results, and in a later turn a third."""
    names = ["tide", "wait", "tide"]
    calls = [{"id": own, "function": {"name": name, "arguments": "{}"}} for own, name in zip(ids, names, strict=True)]
    results = [{"role": "tool", "tool_call_id": own, "content": "low"} for own in ids]
    first, last = ({"role": "assistant", "content": "", "tool_calls": part} for part in (calls[:2], calls[2:]))
    return [{"role": "user", "content": "When?"}, first, *results[:2], last, results[2]]


def ids_of(chat):
    calls = [call["id"] for message in chat for call in message.get("tool_calls", ())]
    return calls, [message["tool_call_id"] for message in chat if message["role"] == "tool"]


@pytest.mark.parametrize(
    ("calls", "kept", "made"),
    [
        (KIMI_K2, ["functions.tide:0", "wait:1", "functions.tide:7"],
         ["functions.tide:0", "functions.wait:1", "functions.tide:2"]),
        (MISTRAL, ["abcDEF123", "000000000", "call00001"], ["call00000", "call00001", "call00002"]),
        (DEEPSEEK_V3, ["", "any", "any"], OF_API),
        (GLM_47, ["", "any", "any"], OF_API),
    ],
)  # fmt: skip
def test_ids_of_calls_are_those_that_the_template_takes(calls, kept, made):
    template = of_family(calls)
    good = tool_chat(kept)
    assert template.with_ids(good) == good
    found = template.with_ids(tool_chat(OF_API))
    assert ids_of(found) == (made, made)
    assert template.render(template.with_arguments(found))


def test_calls_without_ids_get_some_and_odd_ones_are_left_to_the_template():
    template = of_family(KIMI_K2)
    named, odd = {"function": {"name": "tide", "arguments": "{}"}}, {"function": "tide"}
    chat = [{"role": "assistant", "content": None, "tool_calls": calls} for calls in ([named], [odd], 5)]
    found = template.with_ids(chat)
    assert found == [{**chat[0], "tool_calls": [{**named, "id": "functions.tide:0"}]}, *chat[1:]]


@pytest.mark.parametrize(
    ("ids", "of_results"),
    [
        (["functions.tide:0", "functions.wait:1", "functions.tide:0"], ["tide:0", "wait:1", "tide:2"]),
        (["x", "x", "x"], ["tide:0", "wait:1", "tide:2"]),
        ([None, None, None], ["tide:0", "wait:1", "tide:2"]),
        (["wait", "wait", "tide"], ["tide:0", "wait:1", "tide:2"]),
    ],
)
def test_each_result_has_the_id_of_its_own_call_where_calls_had_one_id_or_none(ids, of_results):
    found = of_family(KIMI_K2).with_ids(tool_chat(ids))
    assert ids_of(found) == ([f"functions.{own}" for own in of_results],) * 2


def test_a_call_with_several_results_is_named_by_all_of_them():
    _, called, result, *_ = tool_chat(["x", "x", "x"])
    found = of_family(KIMI_K2).with_ids([called, result, result, result])
    assert ids_of(found)[1] == ["functions.tide:0", "functions.wait:1", "functions.wait:1"]


@pytest.fixture(scope="module")
def v32():
    return ChatTemplate((OWN_TEMPLATES / "deepseek_v32.jinja").read_text(), {})


@pytest.fixture
def folder_of_model(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((SAMPLE_MODEL / "tokenizer.json").read_bytes())
    return tmp_path


def test_v32_thinks_only_where_it_is_asked_to(v32):
    chat = [{"role": "user", "content": "1+1?"}]
    assert v32.render(chat) == f"{BEGIN}{USER}1+1?{ASSISTANT}</think>"
    for name in ("thinking", "enable_thinking"):
        assert v32.render(chat, {name: True}) == f"{BEGIN}{USER}1+1?{ASSISTANT}<think>"


def test_v32_leaves_out_the_reasoning_of_earlier_turns(v32):
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2", "reasoning_content": "one and one"},
        {"role": "user", "content": "and 2+2?"},
    ]
    before = f"{BEGIN}Be brief.{USER}1+1?{ASSISTANT}</think>2{END}{USER}and 2+2?{ASSISTANT}"
    assert v32.render(chat, {"thinking": True}) == before + "<think>"
    assert v32.render(chat) == before + "</think>"


def test_v32_writes_tools_calls_and_results(v32):
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "High water?"},
        {"role": "assistant", "reasoning_content": "old", "tool_calls": [call(port="Brest", days=2)]},
        {"role": "tool", "content": "07:10"},
        {"role": "assistant", "content": "At 07:10."},
        {"role": "user", "content": "And here?"},
        {
            "role": "assistant",
            "reasoning_content": "two ports",
            "content": None,
            "tool_calls": [call(), call(at=[1.5])],
        },
        {"role": "tool", "content": "08:00"},
        {"role": "tool", "content": "09:00"},
    ]
    found = v32.render(chat, {"tools": [TOOL], "thinking": True})
    head, tools, rest = found.partition("\n\n## Tools\n\n")
    assert (head, bool(tools)) == (f"{BEGIN}Be brief.", True)
    instructions, schemas, turns = rest.partition(SCHEMAS)
    assert bool(schemas)
    assert instructions.startswith("You have access to a set of tools you can use to answer the user's question.\n")
    end = "<think>...thinking about results</think>\n\nHere are the functions available in JSONSchema format:\n"
    assert instructions.endswith(end)
    assert turns == (
        f"{USER}High water?{ASSISTANT}</think>"
        + called(invoked(("port", "true", "Brest"), ("days", "false", "2")))
        + f"{END}{results('07:10')}</think>At 07:10.{END}"
        + f"{USER}And here?{ASSISTANT}<think>two ports</think>"
        + called(invoked(), invoked(("at", "false", "[1.5]")))
        + f"{END}{results('08:00', '09:00')}<think>"
    )  # fmt: skip


def test_v32_has_tools_of_a_developer_and_formats(v32):
    chat = [{"role": "developer", "content": "Go.", "tools": [TOOL], "response_format": {"type": "object"}}]
    found = v32.render(chat, {"thinking": True})
    assert found.startswith(f"{BEGIN}{USER}\n\n## Tools\n\nYou have access")
    assert found.endswith(
        f"{SCHEMAS}\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
        f'{{"type": "object"}}\n\n# The user\'s message is: Go.{ASSISTANT}<think>'
    )


def test_v32_without_a_system_message_begins_with_the_tools(v32):
    found = v32.render([{"role": "user", "content": "Go."}], {"tools": [TOOL]})
    assert found.startswith(f"{BEGIN}\n\n## Tools\n")
    assert found.endswith(f"{SCHEMAS}{USER}Go.{ASSISTANT}</think>")


@pytest.mark.parametrize(
    ("turn", "told"),
    [
        ({"role": "assistant", "content": "Yes."}, "neither reasoning_content nor tool_calls"),
        ({"role": "tool", "content": "5"}, "a tool's result without a call"),
        ({"role": "critic", "content": "5"}, "the role critic is not known"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "fails on the messages"),
    ],
)
def test_v32_refuses_what_its_program_refuses(v32, turn, told):
    with pytest.raises(ChatError, match=told):
        v32.render([{"role": "user", "content": "Go."}, turn], {"thinking": True})


def test_a_folder_of_v32_needs_no_template_and_one_of_its_own_goes_first(folder_of_model):
    (folder_of_model / "tokenizer_config.json").write_text("{}")
    assert load_tokenizer(folder_of_model).template_text() is None
    (folder_of_model / "config.json").write_text('{"model_type": "deepseek_v32"}')
    assert load_tokenizer(folder_of_model).template_text() == (OWN_TEMPLATES / "deepseek_v32.jinja").read_text()
    (folder_of_model / "chat_template.jinja").write_text("{{ messages }}")
    assert load_tokenizer(folder_of_model).template_text() == "{{ messages }}"


@pytest.fixture(scope="module")
def v4():
    return ChatTemplate((OWN_TEMPLATES / "deepseek_v4.jinja").read_text(), {})


def test_v4_thinks_unless_it_is_told_not_to_and_has_a_text_for_high_efforts(v4):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    words = f"Be brief.{USER}1+1?{ASSISTANT}"
    assert v4.render(chat) == f"{BEGIN}{words}<think>"
    assert v4.render(chat, {"reasoning_effort": "low"}) == f"{BEGIN}{words}<think>"
    for name in ("thinking", "enable_thinking"):
        assert v4.render(chat, {name: False, "reasoning_effort": "max"}) == f"{BEGIN}{words}</think>"
    for effort, text in (("high", "Absolute maximum with"), ("xhigh", "Absolute maximum with"), ("max", "Beyond max")):
        prompt = v4.render(chat, {"reasoning_effort": effort})
        assert prompt.startswith(f"{BEGIN}Reasoning Effort: {text}")
        assert prompt.endswith(f".\n\n{words}<think>")


def test_v4_joins_what_users_and_tools_say_and_keeps_reasoning_only_where_there_are_tools(v4):
    chat = [
        {"role": "user", "content": "Tides?"},
        {"role": "user", "content": "Soon."},
        {"role": "assistant", "content": "", "reasoning_content": "two", "tool_calls": [call(at="now"), call(at=1.5)]},
        {"role": "tool", "content": "high"},
        {"role": "tool", "content": "low"},
        {"role": "user", "content": "Thanks."},
        {"role": "latest_reminder", "content": "Friday"},
    ]
    written = "\n".join(invoked(one) for one in (("at", "true", "now"), ("at", "false", "1.5")))
    calls = f"\n\n<｜DSML｜tool_calls>\n{written}\n</｜DSML｜tool_calls>{END}"
    users = f"{USER}<tool_result>high</tool_result>\n\n<tool_result>low</tool_result>\n\nThanks."
    end = f"{users}<｜latest_reminder｜>Friday{ASSISTANT}<think>"
    begin = f"{USER}Tides?\n\nSoon.{ASSISTANT}"
    assert v4.render(chat) == f"{BEGIN}{begin}</think>{calls}{end}"
    with_tools = v4.render(chat, {"tools": [TOOL]})
    assert with_tools.startswith(f"{BEGIN}\n\n## Tools\n\nYou have access to a set of tools to help answer")
    schema = '{"name": "tide", "parameters": {"type": "object", "ü": [1, null]}}'
    told = "You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
    assert with_tools.endswith(f"Schemas\n\n{schema}\n\n{told}{begin}<think>two</think>{calls}{end}")


def test_v4_writes_the_format_of_answers_behind_the_system_message_and_refuses_unknown_roles(v4):
    system = {"role": "system", "content": "S", "response_format": {"type": "object"}}
    told = "You MUST strictly adhere to the following schema to reply:"
    expected = f'{BEGIN}S\n\n## Response Format:\n\n{told}\n{{"type": "object"}}{USER}a{ASSISTANT}<think>'
    assert v4.render([system, {"role": "user", "content": "a"}]) == expected
    with pytest.raises(ChatError, match="the role critic is not known"):
        v4.render([{"role": "critic", "content": "a"}])


def test_a_folder_of_v4_needs_no_template(folder_of_model):
    (folder_of_model / "config.json").write_text('{"model_type": "deepseek_v4"}')
    assert load_tokenizer(folder_of_model).template_text() == (OWN_TEMPLATES / "deepseek_v4.jinja").read_text()


def test_v4_renders_300_conversations_as_deepseek_recipe_does(v4):
    different = []
    for number, digest in enumerate(json.loads(DIGESTS.read_text())):
        chat = conversation(number)
        messages, tools = chat.pop("messages"), chat.pop("tools")
        prompt = v4.render(messages, chat | ({"tools": tools} if tools else {}))
        if hashlib.sha256(prompt.encode()).hexdigest()[:16] != digest:
            different.append(number)
    assert number == NUM_CONVERSATIONS - 1
    assert different == []
