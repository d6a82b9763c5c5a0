"""Calls of tools in answers: the families' forms, and whatever is not quite one."""

from __future__ import annotations

import json
import random

import pytest

from batchinfer.finish.answers import AnswerReader
from batchinfer.finish.offered_tools import OfferedTools
from support.jobs import batchinfer, outputs, write_job, write_shard

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALLED = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
OWN_FORMS = ["deepseek_v3", "deepseek_v32", "kimi_k2", "glm", "hermes", "minimax", "harmony", "mistral"]
ROME = {"name": "weather", "arguments": '{"city": "Rome"}'}
LATER = {"name": "wait", "arguments": '{"for": {"s": 5}}'}


def calls_of(text, tools=None, forms=(), *, is_cut=False):
    """The calls in an answer to a row with these tools, of a model that shows these forms as its own."""
    return OfferedTools(tools).calls(AnswerReader(forms).read(text, is_cut=is_cut))


def content_of(text):
    return AnswerReader().read(text).content


def v3(*calls):
    texts = [f"{CALL}function{SEP}{call['name']}\n```json\n{call['arguments']}\n```{CALLED}" for call in calls]
    return BEGIN + "\n".join(texts) + END


def v31(*calls):
    return BEGIN + "".join(f"{CALL}{call['name']}{SEP}{call['arguments']}{CALLED}" for call in calls) + END


def written(value):
    """Format a value for the forms that write strings without quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def v32(*calls):
    texts = [
        f'<｜DSML｜invoke name="{call["name"]}">\n'
        + "".join(
            f'<｜DSML｜parameter name="{name}" string="{str(isinstance(value, str)).lower()}">'
            f"{written(value)}</｜DSML｜parameter>\n"
            for name, value in json.loads(call["arguments"]).items()
        )
        + "</｜DSML｜invoke>\n"
        for call in calls
    ]
    return "<｜DSML｜function_calls>\n" + "".join(texts) + "</｜DSML｜function_calls>"


def v4(*calls):
    return v32(*calls).replace("function_calls", "tool_calls")


def kimi(*calls):
    texts = [
        f"<|tool_call_begin|>functions.{call['name']}:{place}<|tool_call_argument_begin|>{call['arguments']}"
        "<|tool_call_end|>"
        for place, call in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(texts) + "<|tool_calls_section_end|>"


def glm(*calls):
    texts = [
        f"<tool_call>{call['name']}\n"
        + "".join(
            f"<arg_key>{name}</arg_key>\n<arg_value>{written(value)}</arg_value>\n"
            for name, value in json.loads(call["arguments"]).items()
        )
        + "</tool_call>"
        for call in calls
    ]
    return "\n".join(texts)


def minimax(*calls):
    texts = [
        f'<invoke name="{call["name"]}">\n'
        + "".join(
            f'<parameter name="{name}">{written(value)}</parameter>\n'
            for name, value in json.loads(call["arguments"]).items()
        )
        + "</invoke>\n"
        for call in calls
    ]
    return "<minimax:tool_call>\n" + "".join(texts) + "</minimax:tool_call>"


def harmony(*calls):
    return "".join(
        f"<|channel|>commentary to=functions.{call['name']} <|constrain|>json<|message|>{call['arguments']}<|call|>"
        for call in calls
    )


def harmony_role(*calls):
    return "".join(
        f"<|start|>assistant to=functions.{call['name']}<|channel|>commentary json"
        f"<|message|>{call['arguments']}<|call|>"
        for call in calls
    )


def youtu(*calls):
    listed = [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in calls]
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in listed)


def mistral(*calls):
    return "".join(f"[TOOL_CALLS]{call['name']}[ARGS]{call['arguments']}" for call in calls)


def old_mistral(*calls):
    listed = [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in calls]
    return f"[TOOL_CALLS]{json.dumps(listed)}"


@pytest.mark.parametrize("form", [mistral, old_mistral])
def test_calls_of_mistral_are_read_up_to_the_end_of_the_text(form):
    assert calls_of(f"I look it up.{form(ROME, LATER)}") == [ROME, LATER]
    assert calls_of(f"{form(ROME)}</s>") == [ROME]
    assert content_of(f"I look it up.\n{form(ROME)}") == "I look it up.\n"
    assert calls_of(form(ROME).replace("[ARGS]", "[CALL_ID]abcdefghi[ARGS]")) == [ROME]


@pytest.mark.parametrize("form", [v3, v31, v32, v4, kimi, glm, youtu, minimax, harmony, harmony_role])
def test_calls_are_read_in_every_form(form):
    assert calls_of(form(ROME)) == [ROME]
    assert calls_of(f"I look it up.\n{form(ROME, LATER)}<｜end▁of▁sentence｜>") == [ROME, LATER]
    assert content_of(f"I look it up.\n{form(ROME)}") == "I look it up.\n"


@pytest.mark.parametrize("form", [v3, v31, v32, v4, kimi, glm, youtu, minimax, harmony, harmony_role])
def test_text_behind_and_between_calls_is_content(form):
    assert content_of(f"A {form(ROME)} tail") == "A  tail"
    assert content_of(f"{form(ROME)}\n so [1] <b>{form(LATER)}\nend\n") == "\n so [1] <b>\nend\n"
    assert content_of(f"A\n{form(ROME)}\n{form(LATER)}\n\n") == "A\n"
    assert content_of(f"{form(ROME, LATER)}\n") == ""
    marked = {"name": "write", "arguments": json.dumps({"text": form(LATER) + " <[tail"})}
    if form in (youtu, harmony, v31, kimi):
        assert content_of(f"A {form(marked)} [tail] <1>") == "A  [tail] <1>"
    # the part that is cut off or no call has no end
    assert AnswerReader().read(f"A {form(ROME)} tail {form(ROME)[:-12]}").calls is None


@pytest.mark.parametrize("form", [v32, kimi, glm, youtu, minimax, harmony, harmony_role, mistral])
def test_a_call_without_arguments_and_with_tricky_texts(form):
    calls = [{"name": "now", "arguments": "{}"}, {"name": "a.b-c", "arguments": '{"x": "<b>\\n</b>", "y": [1, null]}'}]
    assert calls_of(form(*calls)) == calls


@pytest.mark.parametrize("form", [v3, v31, v32, kimi, minimax])
def test_a_stop_string_may_cut_off_the_end_of_the_calls_but_of_no_call(form):
    text = form(ROME, LATER)
    begin = text.index(form(ROME)[:30])
    found = [calls_of(text[:end]) for end in range(begin + 1, len(text))]
    assert [calls for calls in found if calls is not None and calls not in ([], [ROME], [ROME, LATER])] == []
    assert [ROME, LATER] in found


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"\\ud800"', "9" * 5000])
def test_a_value_of_glm_that_only_looks_like_json_is_a_text(value):
    (call,) = calls_of(glm(ROME).replace("Rome", value))
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": value})


@pytest.mark.parametrize(
    ("form", "end"),
    [(v3, END), (v31, END), (v32, "</｜DSML｜function_calls>"), (kimi, "<|tool_calls_section_end|>"), (mistral, "")],
)
def test_the_first_of_the_calls_that_max_tokens_has_cut_are_not_taken_for_all(form, end):
    whole, first = form(ROME, LATER), form(ROME).removesuffix(end)
    assert [calls_of(whole), calls_of(first), calls_of(first, is_cut=True)] == [[ROME, LATER], [ROME], None]
    assert calls_of(whole, is_cut=True) == ([ROME, LATER] if end else None)


MARKS = [
    *(
        "</tool_call>",
        "<tool_call>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        "[TOOL_CALLS]",
        "</s>",
        "[ARGS]",
    ),
    *(BEGIN, CALL, SEP, CALLED, END, "</think>"),
]


@pytest.mark.parametrize("form", [v3, v31, kimi, youtu, mistral, old_mistral])
@pytest.mark.parametrize("mark", MARKS)
def test_a_mark_in_a_string_of_json_is_no_end(form, mark):
    marked = {"name": "write", "arguments": json.dumps({"text": f'a{mark}b \ue000 "{mark}', "list": [mark]})}
    for text in (form(marked), form(marked, ROME), f"I look it up.{form(ROME, marked)}"):
        calls = calls_of(text)
        assert calls is not None
        assert marked in calls
        assert [call for call in calls if call not in (marked, ROME)] == []
    assert content_of(f"I look it up.{form(marked)}") == "I look it up."


@pytest.mark.parametrize("form", [youtu, old_mistral])
def test_arguments_as_json_text_are_unwrapped(form):
    text = form({"name": "f", "arguments": json.dumps('{"n": 1.10}')})
    assert calls_of(text) == [{"name": "f", "arguments": '{"n": 1.10}'}]
    assert calls_of(text.replace("1.10", "1.10,")) is None


def test_arguments_of_mistral_as_json_text_are_unwrapped():
    text = mistral({"name": "f", "arguments": json.dumps('{"n": 1}')})
    assert calls_of(text) == [{"name": "f", "arguments": '{"n": 1}'}]


@pytest.mark.parametrize("form", [v3, v31, v32, v4, kimi, glm, youtu, minimax])
def test_calls_inside_later_thinking_are_none(form):
    call = form(ROME)
    assert calls_of(f"<think>a</think>text<think>maybe {call} no</think>final") == []
    assert calls_of(f"<think>a</think>text<think>maybe {call} no</think>{call}") == [ROME]
    assert calls_of(f"Hello <think>maybe {call}", is_cut=True) == []
    assert calls_of(f"The mark <think> begins it.{call}") == [ROME]
    assert calls_of(f"ok {call}<think>x</think>") == [ROME]


def test_harmony_calls_in_analysis_are_none_and_marks_in_strings_are_text():
    analysis = f"<|channel|>analysis<|message|>Or {harmony(ROME).removesuffix('<|call|>')}?<|end|>"
    assert calls_of(f"{analysis}<|start|>assistant<|channel|>final<|message|>No.") == []
    assert calls_of(analysis + harmony(LATER)) == [LATER]
    assert calls_of(analysis.removesuffix("<|end|>"), is_cut=True) == []
    preamble = "<|channel|>commentary<|message|>I look."
    found = AnswerReader(["harmony"]).read(f"{preamble}<|end|>{harmony_role(ROME)}")
    assert (OfferedTools().calls(found), found.content) == ([ROME], preamble)
    marks = {"name": "f", "arguments": '{"a": "<|end|><|channel|>commentary to=functions.g<|message|>{}<|call|>"}'}
    assert calls_of(harmony(marks)) == [marks]
    assert calls_of(harmony(ROME).removeprefix("<|channel|>commentary")) == []


def test_fences_in_a_text_are_no_end():
    assert calls_of(v3(ROME).removesuffix(END)) == [ROME]
    for form in (v3, v31):
        fences = {"name": "write", "arguments": '{"text": "```json\\n{}\\n```"}'}
        assert calls_of(form(fences, ROME)) == [fences, ROME]


def test_an_answer_that_calls_nothing_has_no_calls():
    assert calls_of("") == calls_of("It rains: {}") == []


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ("deepseek_v3", BEGIN),
        ("deepseek_v3", BEGIN + END),
        ("deepseek_v3", v31(ROME).replace(BEGIN, "")),
        ("deepseek_v3", v31(ROME)[: -len(CALLED + END)]),
        ("deepseek_v3", v3(ROME).replace("```", "")),
        ("deepseek_v3", v31({"name": "", "arguments": "{}"})),
        ("deepseek_v3", v31({"name": "weather", "arguments": '{"city": '})),
        ("deepseek_v3", v31({"name": "weather", "arguments": "[1]"})),
        ("deepseek_v3", v31({"name": "weather", "arguments": "[" * 100_000})),
        ("deepseek_v3", v31(ROME).replace(SEP, "")),
        ("deepseek_v3", v31(ROME, LATER).replace(CALLED + CALL, CALL)),
        ("deepseek_v3", v31(ROME).replace(CALLED, CALLED + "and then")),
        ("deepseek_v32", v32(ROME).replace('string="true"', "")),
        ("deepseek_v32", v32(LATER).replace('{"s": 5}', "five")),
        ("deepseek_v32", v32(ROME).replace("</｜DSML｜invoke>", "")),
        ("deepseek_v32", v32(ROME).replace("<｜DSML｜function_calls>", "")),
        (
            "deepseek_v32",
            v32({"name": "weather", "arguments": '{"city": "Rome"}'}).replace(
                "</｜DSML｜invoke>", "and</｜DSML｜invoke>"
            ),
        ),
        ("deepseek_v32", "<｜DSML｜function_calls>\n</｜DSML｜function_calls>"),
        ("kimi_k2", kimi({"name": "weather", "arguments": "Rome"})),
        ("kimi_k2", kimi(ROME).replace("<|tool_call_end|>", "")),
        ("kimi_k2", kimi(ROME).replace("<|tool_calls_section_begin|>", "")),
        ("glm", glm(ROME).removesuffix("</tool_call>")),
        ("glm", glm(ROME).replace("</arg_value>", "")),
        ("glm", glm(ROME).replace("weather", "")),
        ("deepseek_v3", v31({"name": "weather", "arguments": '{"city": NaN}'})),
        ("kimi_k2", kimi({"name": "weather", "arguments": '{"city": 1e999}'})),
        ("deepseek_v32", v32(LATER).replace('{"s": 5}', '"\\ud800"')),
        ("glm", glm(ROME).replace("weather", "the weather")),
        ("glm", glm({"name": "I call nothing", "arguments": "{}"})),
        ("hermes", youtu(ROME).removesuffix("</tool_call>")),
        ("hermes", youtu(ROME).replace("}}", "}")),
        ("hermes", youtu(ROME).replace('"arguments"', '"parameters"')),
        ("minimax", minimax(ROME).replace("</invoke>", "")),
        ("minimax", minimax(ROME).replace("</parameter>", "")),
        ("minimax", minimax(ROME).replace("<minimax:tool_call>", "")),
        ("minimax", minimax(ROME).replace("</invoke>", "and</invoke>")),
        ("harmony", harmony(ROME).replace("}<|call|>", "")),
        ("harmony", harmony(ROME).replace("<|message|>", "")),
        ("harmony", harmony(ROME).replace("to=functions.weather", "to=functions.")),
        ("harmony", harmony_role({"name": "weather", "arguments": "Rome"})),
        ("mistral", mistral(ROME)[:-1]),
        ("mistral", mistral(ROME) + "and then"),
        ("mistral", mistral(ROME).replace("weather", "")),
        ("mistral", mistral(ROME).replace("[TOOL_CALLS]", "")),
        ("mistral", old_mistral(ROME)[:-1]),
        ("mistral", old_mistral(ROME).replace('"name"', '"tool"')),
        ("mistral", old_mistral(ROME).replace("Rome", "\\ud800")),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][]"),
        ("glm", glm(ROME) + glm(ROME).replace("<tool_call>", "<tool_call><arg_key>city</arg_key>")),
    ],
)
def test_calls_that_cannot_be_read_are_none_at_all(own, text):
    assert calls_of(text, forms=[own]) is None


@pytest.mark.parametrize("seed", range(50))
def test_any_pieces_in_any_order_give_calls_or_none(seed):
    pieces = ["<tool_call>", "</tool_call>", "<arg_key>a</arg_key>", "<arg_value>1</arg_value>", kimi(ROME)[:30]]
    pieces += [BEGIN, END, CALL, SEP, CALLED, "function", "f", "{}", "\n```json\n", "\n```", '{"a": 1}', " "]
    found = calls_of("".join(random.Random(seed).choices(pieces, k=12)), forms=OWN_FORMS[: seed % 7])
    assert found is None or all(set(call) == {"name", "arguments"} for call in found)


@pytest.mark.parametrize(
    ("begin", "repeated"),
    [
        ("<tool_call>x", "<arg_key>a</arg_key><arg_value>"),
        ("<tool_call>x", "<arg_key>a</arg_key>"),
        ("<tool_call>x<arg_key>a", "</arg_key> "),
        ("<tool_call>x<arg_key>a</arg_key>", " "),
        ("", "<tool_call>x<arg_key>a</arg_key><arg_value>"),
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>f<|tool_call_argument_begin|>"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", ":1"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>f", " "),
        ("<｜DSML｜function_calls>", '<｜DSML｜invoke name="f">'),
        ('<｜DSML｜function_calls><｜DSML｜invoke name="f">', '<｜DSML｜parameter name="a" string="true">'),
        (f"{BEGIN}{CALL}function{SEP}f\n```json\n", "```"),
        (BEGIN, f"{CALL}function{SEP}"),
        ("", "[TOOL_CALLS]f[ARGS]"),
        ("<minimax:tool_call>", '<invoke name="f">'),
        ('<minimax:tool_call><invoke name="f">', '<parameter name="a">'),
        ("", " to=functions.f"),
        ("", "<|channel|>commentary to=functions.f"),
        ("<|channel|>commentary to=functions.", "f"),
        ("<|channel|>commentary to=functions.f", "<|message|>"),
        ("<|channel|>analysis<|message|>", "<|end|>"),
        ("[TOOL_CALLS]f", "[ARGS]"),
    ],
)
def test_an_answer_that_repeats_itself_is_read_in_time_linear_in_its_length(begin, repeated):
    """Each piece might begin a call that a later one ends: by trying them all, this would take hours to years."""
    ends = ("", "</tool_call>", "<|tool_call_end|>", "</｜DSML｜invoke>", CALLED)
    answer = begin + repeated * (2_000_000 // len(repeated))
    assert all(not calls_of(answer + end) for end in ends)
    assert all(not calls_of(answer + end, forms=OWN_FORMS) for end in ends)


def test_outputs_have_tool_calls_where_the_job_has_tools_and_keep_the_text(tmp_path):
    chat = [{"role": "user", "content": "Hello"}]
    write_shard(tmp_path / "prompts" / "a.parquet", {"m": [chat, []], "tool_calls": ["kept", "too"]})
    keys = {"prompt": None, "messages": "m"}
    job = write_job(tmp_path, input=keys, output={"keep_columns": ["tool_calls"]})
    assert batchinfer("run", job).code == 3
    without = outputs(tmp_path / "run")["a.parquet"]
    assert [row["tool_calls"] for row in without] == ["kept", "too"]

    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    ended = batchinfer(
        "plan", write_job(tmp_path, input={**keys, "tools": tool}, output={"keep_columns": ["tool_calls"]})
    )
    assert ended.code == 2
    assert "output.keep_columns names 'tool_calls'" in ended.err
    ended = batchinfer("run", write_job(tmp_path, input={**keys, "tools": tool}, output={"dir": "with"}))
    assert ended.code == 3, ended.err
    answer, bad = outputs(tmp_path / "with")["a.parquet"]
    assert list(answer)[-2:] == ["logprobs", "tool_calls"]
    assert answer["text"] == without[0]["text"]
    assert (answer["tool_calls"], bad["tool_calls"]) == ([], None)
