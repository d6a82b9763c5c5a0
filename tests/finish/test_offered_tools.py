"""Matching of the model's calls with the row's tools: names, types, texts and numbers."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest

from batchinfer.finish.answers import AnswerReader
from batchinfer.finish.offered_tools import OfferedTools
from support.tool_writers import WRITERS, Arguments, glm, random_tool

FORMS = [(form, writer) for form, writers in WRITERS.items() for writer in writers]
BOTH = pytest.mark.parametrize(("form", "writer"), FORMS, ids=[writer.__name__ for _, writer in FORMS])


def tool(name="f", /, **properties):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


F = tool(zip={"type": "string"}, v={"type": "string"}, n={"type": "integer"}, path={"type": "string"})


def calls_of(text, tools, forms=()):
    return OfferedTools(tools).calls(AnswerReader(forms).read(text))


def arguments_of(text, tools):
    """The arguments of the only call, as text."""
    found = calls_of(text, tools)
    assert found is not None
    ((_, arguments),) = [(call["name"], call["arguments"]) for call in found]
    return arguments


def exact(text):
    """JSON with each number as the text that it is."""
    return json.loads(text, parse_int=lambda digits: ("number", digits), parse_float=lambda digits: ("number", digits))


def values_of(arguments: Arguments):
    return {name: text if is_string else exact(text) for name, (text, is_string) in arguments.items()}


@BOTH
def test_arguments_are_read_back_as_they_were_written(form, writer):
    for seed in range(300):
        offered, arguments = random_tool(seed)
        text = writer("f", arguments, random.Random(seed))
        for own in ([], [form]):
            (call,) = calls_of(f"I look it up.{text}", [tool("g"), offered], own) or [{}]
            assert call.get("name") == "f", (seed, text)
            assert exact(call["arguments"]) == values_of(arguments), (seed, text)


TEXT = {"type": "string"}
DECLARED_ELSEWHERE = [
    {"patternProperties": {"^z": TEXT}},
    {"patternProperties": {"^z": TEXT}, "additionalProperties": {"type": "integer"}},
    {"patternProperties": {"(": {"type": "integer"}, "ip$": TEXT}},
    {"properties": {"zip": {"$ref": "#/anyOf/0"}}, "anyOf": [TEXT]},
    {"properties": {"zip": {"$ref": "#/$defs/u/anyOf/0"}}, "$defs": {"u": {"anyOf": [TEXT, {"type": "null"}]}}},
    {"properties": {"k": {}}, "if": {}, "then": {"properties": {"zip": TEXT}}},
    {"properties": {"k": {}}, "if": {}, "else": {"properties": {"zip": TEXT}}},
    {"dependentSchemas": {"k": {"properties": {"zip": TEXT}}}},
]


@pytest.mark.parametrize("parameters", DECLARED_ELSEWHERE)
def test_a_type_of_glm_may_be_declared_in_any_part_of_the_parameters(parameters):
    offered = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"} | parameters}}
    text = "<tool_call>f\n<arg_key>zip</arg_key>\n<arg_value>10001</arg_value>\n</tool_call>"
    assert arguments_of(text, [offered]) == '{"zip": "10001"}'


@BOTH
def test_a_call_of_a_tool_that_is_not_offered_is_not_read(form, writer):
    for name in ("nobody", "F", "ff", "f.g", "function"):
        text = writer(name, {"path": ("/", True)}, random.Random(0))
        assert calls_of(text, [F], [form]) is None
        if name != "function":
            assert calls_of(text, [F, tool(name)], [form]) == [{"name": name, "arguments": '{"path": "/"}'}]
            assert calls_of(text, None, [form]) == calls_of(text, [F, tool(name)], [form])
        assert calls_of(text + text, [F], [form]) is None


@BOTH
@pytest.mark.parametrize("wrapper", ["arguments", "input"])
def test_arguments_in_an_object_that_the_tool_does_not_declare_are_unwrapped(form, writer, wrapper):
    inside = '{"path": "/x", "n": 1.10}'
    for value in ((inside, False), (inside, True)):
        text = writer("f", {wrapper: value}, random.Random(1))
        assert arguments_of(text, [F]) == inside
        declared = exact(arguments_of(text, [tool(**{wrapper: {"type": "object" if value[1] is False else "string"}})]))
        assert declared == values_of({wrapper: value})
        with_another = writer("f", {wrapper: value, "n": ("1", False)}, random.Random(1))
        assert exact(arguments_of(with_another, [F])).keys() == {wrapper, "n"}
    text = writer("f", {wrapper: ("ls -l", True)}, random.Random(1))
    assert exact(arguments_of(text, [F])) == {wrapper: "ls -l"}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "10001", '"10001"'),
        ({"type": "string"}, " 5 ", '" 5 "'),
        ({"type": "string"}, '"q"', r'"\"q\""'),
        ({"type": "string"}, "null", '"null"'),
        ({"type": "STRING"}, "1", '"1"'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, " null ", '" null "'),
        ({"type": ["string", "null"]}, "1.10", '"1.10"'),
        ({"type": ["string", "integer", "object"]}, "5", '"5"'),
        ({"anyOf": [{"type": "object"}, {"type": "string"}]}, '{"a":1}', r'"{\"a\":1}"'),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"enum": ["1", "2"]}, "3", '"3"'),
        ({"enum": ["1", "2", None]}, "null", "null"),
        ({"enum": ["auto", 1]}, "1", "1"),
        ({"enum": ["1", 1]}, "1", '"1"'),
        ({"const": "1"}, "1", '"1"'),
        ({"anyOf": [{"const": "auto"}, {"type": "number"}]}, "1.10", "1.10"),
        ({"$ref": "#/$defs/Zip"}, "10001", '"10001"'),
        ({"$ref": "#/$defs/a~1b%25"}, "10001", '"10001"'),
        ({"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]}, "10001", '"10001"'),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]}, "10001", "10001"),
        ({"type": "integer"}, "\n3\n", "3"),
        ({"type": "integer"}, "12345678901234567890123", "12345678901234567890123"),
        ({"type": "integer"}, "1e5", "1e5"),
        ({"type": "number"}, "1.10", "1.10"),
        ({"type": "object"}, '{ "a" : 1.10 }', '{ "a" : 1.10 }'),
        ({"type": "array"}, "[1.0]", "[1.0]"),
        ({"type": "boolean"}, "true", "true"),
        ({"type": "null"}, "null", "null"),
        ({}, "1.10", "1.10"),
        ({}, "abc", '"abc"'),
        (True, "1.10", "1.10"),
        ({"type": "varchar"}, "1.10", "1.10"),
        ({"anyOf": [{"type": "string"}, {}]}, "1.10", "1.10"),
        ({"$ref": "#/$defs/Loop"}, "1.10", "1.10"),
        ({"$ref": "#/$defs/nowhere"}, "1.10", "1.10"),
        ({"$ref": "https://example.com/x.json"}, "abc", '"abc"'),
        # of no type that is declared
        ({"type": "integer"}, "abc", None),
        ({"type": "integer"}, "1.10", None),
        ({"type": "integer"}, '"3"', None),
        ({"type": "integer"}, "007", None),
        ({"type": "number"}, "NaN", None),
        ({"type": "boolean"}, "True", None),
        ({"type": "boolean"}, "1", None),
        ({"type": "object"}, "[1]", None),
        ({"type": ["integer", "null"]}, "none", None),
        ({"enum": [1, 2]}, "x", None),
    ],
)
def test_the_declared_type_decides_about_a_value_without_one(schema, text, value):
    definitions = {"Zip": {"type": "string"}, "a/b%": {"type": "string"}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]}}
    parameters = {"type": "object", "properties": {"p": schema}, "$defs": definitions}
    offered = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    expected = None if value is None else [{"name": "f", "arguments": f'{{"p": {value}}}'}]
    assert calls_of(glm("f", {"p": (text, False)}, random.Random(0)), offered) == expected


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/All", "$defs": {"All": {"properties": {"p": {"type": "string"}}}}},
        {"allOf": [{"properties": {"q": {}}}, {"properties": {"p": {"type": "string"}}}]},
        {"anyOf": [{"properties": {"p": {"type": "string"}}}, {"properties": {"p": {"const": "x"}}}]},
        {"type": "object", "properties": {"q": {}}, "additionalProperties": {"type": "string"}},
    ],
)
def test_parameters_may_be_declared_elsewhere_in_the_schema(parameters):
    text = glm("f", {"p": ("10001", True)}, random.Random(0))
    assert arguments_of(text, [{"name": "f", "parameters": parameters}]) == '{"p": "10001"}'


def test_a_schema_that_refers_to_itself_many_times_or_is_very_deep_costs_no_time():
    names = [f"d{place}" for place in range(60)]
    definitions = {name: {"anyOf": [{"$ref": f"#/$defs/{after}"}] * 2} for name, after in pairwise(names)} | {
        names[-1]: {"enum": ["1", "2"]}
    }
    deep = {"type": "string"}
    for _ in range(3000):
        deep = {"allOf": [deep]}
    parameters = {"properties": {"p": {"$ref": "#/$defs/d0"}, "q": deep}, "$defs": definitions}
    text = glm("f", {"p": ("1", True), "q": ("x", True)}, random.Random(0))
    assert arguments_of(text, [{"name": "f", "parameters": parameters}]) == '{"p": "1", "q": "x"}'


def kimi(own_id, arguments='{"path": "/"}'):
    call = f"<|tool_call_begin|>{own_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
    return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"


@pytest.mark.parametrize(
    ("own_id", "names", "name"),
    [
        ("functions.f:0", ["f", "g"], "f"),
        ("f:3", ["f", "g"], "f"),
        ("functions_get_weather_1", ["get_weather", "get"], "get_weather"),
        ("functionsexec5", ["exec", "run"], "exec"),
        ("functions.exec5", ["exec", "run"], "exec"),
        ("functions-exec-5", ["exec", "run"], "exec"),
        ("functionsexec5", ["exec", "exec5"], None),
        ("functions.exec5:0", ["exec", "exec5"], "exec5"),
        ("functions.exec5:0", ["exec"], None),
        ("functions_f_1", ["f", "f_1"], None),
        ("functions_f_1", ["functions_f_1", "f"], "functions_f_1"),
        ("functions.f:0", ["g"], None),
        ("call_abc123", ["f"], None),
        ("3", ["f"], None),
    ],
)
def test_an_id_of_kimi_is_repaired_where_one_offered_name_fits(own_id, names, name):
    expected = None if name is None else [{"name": name, "arguments": '{"path": "/"}'}]
    assert calls_of(kimi(own_id), [tool(one) for one in names]) == expected
    assert (
        calls_of(kimi(own_id).replace("tool_calls_section", "tool_call_section"), [tool(name or "other")]) == expected
    )


def test_a_name_inside_the_arguments_counts_where_kimi_wrote_the_id_of_another_program():
    inside = '{"name": "f", "path": "/", "n": 1.10}'
    named = [{"name": "f", "arguments": '{"path": "/", "n": 1.10}'}]
    assert calls_of(kimi("call_abc123", inside), [F, tool("g")]) == named
    wrapped = '{"name": "f", "arguments": {"path": "/", "n": 1.10}}'
    assert calls_of(kimi("call_abc123", wrapped), [F]) == named
    assert calls_of(kimi("call_abc123", inside), [tool("g")]) is None
    assert calls_of(kimi("call_abc123", inside), [tool(name={"type": "string"})]) is None
    assert calls_of(kimi("call_abc123", '{"name": 5}'), [F]) is None


def test_bare_json_inside_an_invoke_of_v32_is_its_arguments():
    def invoke(inside):
        return (
            f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">{inside}</｜DSML｜invoke>\n</｜DSML｜function_calls>'
        )

    assert arguments_of(invoke('\n{"path": "/x", "n": 1e5}\n'), [F]) == '{"path": "/x", "n": 1e5}'
    assert arguments_of(invoke('{"arguments": {"path": "/x"}}'), [F]) == '{"path": "/x"}'
    for inside in ('{"path": ', '[{"path": "/x"}]', '{"path": "/x"} and', "path"):
        assert calls_of(invoke(inside), [F]) is None


def test_the_type_of_a_tool_of_v3_is_no_name_unless_a_tool_has_it():
    text = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{"a":1}<｜tool▁call▁end｜>'
    assert calls_of(text, [F]) is calls_of(text, None) is None
    assert calls_of(text, [tool("function")]) == [{"name": "function", "arguments": '{"a":1}'}]


@pytest.mark.parametrize("tools", [[F["function"]], [{"type": "web_search"}, F], [F, F]])
def test_tools_may_be_written_in_other_ways(tools):
    text = glm("f", {"zip": ("10001", True)}, random.Random(0))
    assert arguments_of(text, tools) == '{"zip": "10001"}'


QUOTED = [
    "In Mistral's form [ARGS] comes before the arguments.",
    "`<tool_call>` is a tag",
    "Calls begin with <tool_call> and end with </tool_call>.",
    "The mark is <tool_call>",
    "Kimi writes <|tool_calls_section_begin|> first, then <|tool_call_begin|>.",
    "V3.2 has <｜DSML｜function_calls> and <｜DSML｜invoke name=…>",
    "GLM has <arg_key> and <arg_value>",
    "[TOOL_CALLS] is a token",
    "<｜tool▁call▁begin｜> begins a call",
]


@pytest.mark.parametrize("text", QUOTED)
def test_a_mark_of_another_family_says_nothing(text):
    assert calls_of(text, [F]) == []
    for own, mark in (
        ("deepseek_v3", "tool▁call"),
        ("deepseek_v32", "DSML"),
        ("kimi_k2", "tool_call_"),
        ("glm", "tool_call>"),
        ("mistral", "["),
    ):
        if mark not in text and not (own == "glm" and "arg_" in text):
            assert calls_of(text, [F], [own]) == []


def test_only_the_models_own_form_is_read():
    text = glm("f", {"zip": ("10001", True)}, random.Random(0))
    assert [calls_of(text, [F], [own]) for own in ("deepseek_v3", "kimi_k2", "mistral")] == [[], [], []]
    assert calls_of(text, [F], ["glm"]) == calls_of(text, [F]) != []
    assert calls_of(text, [F], ["hermes"]) is None  # between its marks, but in another form


THOUGHT = [
    ("<think>maybe <tool_call>f</tool_call>, no</think>Hello", []),
    ("maybe <tool_call>f</tool_call>, no</think>Hello", []),
    ("\n<think>maybe <tool_call>f</tool_call>", []),
    ("[THINK]maybe [TOOL_CALLS]f[ARGS]{}[/THINK]Hello", []),
    ("<think><tool_call>g</tool_call> or f</think><tool_call>f</tool_call>", ["f"]),
    ("`<tool_call>` it is</think><tool_call>f</tool_call>", ["f"]),
    ('<tool_call>{"name": "f", "arguments": {"v": "a</think>b"}}</tool_call>', ["f"]),
    ('So</think><tool_call>{"name": "f", "arguments": {"v": "a</think>b"}}</tool_call>', ["f"]),
    ("<tool_call>f\n<arg_key>v</arg_key>\n<arg_value></think></arg_value>\n</tool_call>", ["f"]),
]


@pytest.mark.parametrize(("text", "names"), THOUGHT)
def test_a_call_that_is_weighed_in_thinking_is_none(text, names):
    found = calls_of(text, [F])
    assert found is not None
    assert [call["name"] for call in found] == names
    assert AnswerReader().read(text).content == (text if not names else text[: text.rindex("<tool_call>")])
