"""Grammars that a plan refuses or warns of, with which sentence, and grammars that it has to take."""

from __future__ import annotations

import json

import pytest

from batchinfer.config.structured_outputs import grammar_of, problem_of, warnings_of
from support.exact_schemas import admits

LENIENT = {"type": "array", "items": {"const": 1}, "uniqueItems": True, "x-guidance": {"lenient": True}}
CHAIN = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
ENDLESS_LIST = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
DEAD_END = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/endless"}, "b": {"const": 1}},
    "additionalProperties": False,
    "$defs": {"endless": {"anyOf": [{"$ref": "#/$defs/endless"}]}},
}
EITHER = {"oneOf": [{"type": "string", "minLength": 1}, {"type": "string", "maxLength": 5}]}
BIG = 9007199254740993  # no double
NO_TEXT = "no text satisfies it"
DEEP = '{"items": ' * 5000 + "{}" + "}" * 5000
FIXED_LETTERS = {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}
# kind, what is asked for, what the refusal says
REFUSED = [
    # switches of llguidance in data
    ("json", LENIENT, "#/x-guidance changes what a schema means"),
    ("json", {"x-guidance": {}}, "#/x-guidance"),
    ("json", {"properties": {"a": {"items": {"x-guidance": {}}}}}, "#/properties/a/items/x-guidance"),
    ("json", {"$ref": "#/odd/a", "odd": {"a": {"x-guidance": {}}}}, "#/odd/a/x-guidance"),
    ("grammar", f"start: %json {json.dumps(LENIENT)}", "#/x-guidance"),
    ("grammar", 'start: %json {"const": 9007199254740993}', "the number 9007199254740993 at #/const"),
    ("grammar", '%llguidance {"allow_invalid_utf8": true}\nstart: /(?-u:.)/', "%llguidance sets 'allow_invalid_utf8'"),
    ("grammar", '%llguidance {"lenient": true}\nstart: "a"', "%llguidance sets 'lenient'"),
    # what no text satisfies
    ("json", {"$ref": "#"}, NO_TEXT),
    ("json", {"allOf": [{"$ref": "#"}]}, NO_TEXT),
    ("json", {"$ref": "#/$defs/a", "$defs": CHAIN}, NO_TEXT),
    ("json", ENDLESS_LIST, NO_TEXT),
    ("json", {"type": "array", "items": {"$ref": "#"}, "minItems": 1}, NO_TEXT),
    ("json", DEAD_END | {"required": ["a"]}, NO_TEXT),
    ("regex", r"[^\s\S]", NO_TEXT),
    ("regex", r"abc[^\s\S]", NO_TEXT),
    ("regex", "[a&&b]", NO_TEXT),
    ("grammar", "start: start", NO_TEXT),
    ("grammar", 'start: "a" start', NO_TEXT),
    ("grammar", 'start: a\na: "x" b+ | b "y"\nb: a', NO_TEXT),
    ("grammar", 'start: "a" B\nB: /[^\\s\\S]/', NO_TEXT),
    ("grammar", 'root ::= "a" root', NO_TEXT),
    # references that llguidance follows to parts that nobody has looked at
    ("json", {"$ref": "z.json", "$defs": {"p": {"$id": "z.json", "const": BIG}}}, "the reference 'z.json' at # is not"),
    ("json", {"$id": "http://x/y.json", "$ref": "http://x/z.json#/odd", "odd": {}}, "'http://x/z.json#/odd' at #"),
    ("json", {"properties": {"a": {"$id": "z.json", "$ref": "#/odd"}}, "odd": {}}, "without an $id below the root"),
    ("json", {"$ref": "#/nowhere"}, "the reference '#/nowhere' at # leads to nothing in the schema"),
    ("json", {"$id": "http://x/y.json", "$ref": "y.json"}, NO_TEXT),
    ("json", ENDLESS_LIST | {"$id": "http://x/y.json", "properties": {"next": {"$ref": "y.json"}}}, NO_TEXT),
    ("json", ENDLESS_LIST | {"$anchor": "top", "properties": {"next": {"$ref": "#top"}}}, NO_TEXT),
    # limits that are no numbers of anything
    ("json", {"type": "string", "maxLength": 1 << 64}, "18446744073709551616 at #/maxLength is no whole number"),
    ("json", {"type": "array", "items": {"const": BIG}, "minItems": -1}, "-1 at #/minItems is no whole number"),
    ("grammar", 'start: %json {"type": "array", "minItems": true}', "true at #/minItems is no whole number"),
    ("grammar", 'start: %json {"type": "array", "minItems": -1}', "-1 at #/minItems is no whole number"),
    # an option of llguidance that is refused here is no advice
    ("json", EITHER, "oneOf constraints are not supported; write anyOf"),
    ("grammar", f"start: %json {json.dumps(EITHER)}", "oneOf constraints are not supported; write anyOf"),
    # schemas that are none
    ("json", {"type": "strng"}, "Invalid type: strng"),
    ("json", {"type": "object", "required": ["b"], "additionalProperties": False}, "Unsatisfiable"),
    ("json", {"enum": []}, "Unsatisfiable"),
    ("json", {"minimum": 5, "maximum": 3, "type": "integer"}, "minimum (5) is greater than maximum (3)"),
    ("json", {"$ref": "https://example.com/x.json"}, "https://example.com/x.json"),
    ("json", {"type": "string", "format": "date", "maxLength": 4}, "Unsatisfiable"),
    ("json", DEEP, "it is nested too deeply"),
    ("json", '{"const": NaN}', "NaN is no JSON number"),
]
# kind, what is asked for, texts that are among the answers, texts that are not
TAKEN = [
    ("json", {"properties": {"x-guidance": {"type": "null"}}, "type": "object"}, ['{"x-guidance":null}'], ["{1}"]),
    ("json", {"const": {"x-guidance": 1}}, ['{"x-guidance":1}'], ["{}"]),
    ("json", DEAD_END, ["{}", '{"b": 1}'], ['{"a'] ),
    ("json", FIXED_LETTERS, ['"abc"'], ['"abcd"', '""']),
    (
        "json",
        {
            "type": "object",
            "properties": {"k": {"type": "integer", "multipleOf": 5}},
            "patternProperties": {"^k$": {"type": "integer"}},
            "required": ["k"],
            "additionalProperties": False,
        },
        ['{"k": 10}'],
        ['{"k": 7}', "{}"],
    ),
    ("json", {"anyOf": [{"type": "null"}, ENDLESS_LIST]}, ["null"], ['{"next']),
    *(
        ("json", {"$id": address, "$ref": f"{reference}#/odd/a", "odd": {"a": {"const": BIG}}}, [f"{BIG}"], ["0"])
        for address, reference in [
            ("http://x/y.json", "y.json"),
            ("http://x/y.json#", "http://x/y.json"),
            ("urn:example:x", "urn:example:x"),
            (None, "json-schema:///"),
            ("http://x/y.json", ""),
        ]
    ),
    ("json", {"$ref": "#a", "$defs": {"b/~ %": {"$anchor": "a", "const": BIG}}}, [f"{BIG}"], [f"{BIG - 1}"]),
    ("json", {"type": "null", "$defs": {"a": {"$ref": "#/nowhere"}}}, ["null"], ["1"]),
    ("choice", ["yes", "yes, but"], ["yes", "yes, but"], ["yes,"]),
    ("choice", ["Guilty", "Guilty of Romance"], ["Guilty", "Guilty of Romance"], ["Guilty of"]),
    ("regex", "x*", ["", "xx"], ["y"]),
    ("grammar", '%llguidance {"no_forcing": true}\nstart: "<think>"', ["<think>"], ["<"]),
    ("grammar", 'start: "x" | "a" start // start: start', ["aax"], ["aa"]),
    ("grammar", 'start: [start] "a"\n  | "(" start? ")"', ["aa", "()"], ["("]),
    ("grammar", 'start: x{0,2} "z"\nx: "a" x | "b"', ["z", "aabz"], ["az"]),
    ("grammar", 'start: "/" %json {"const": 93859586.77423489} // 9', ["/93859586.77423489"], ["/93859586.77423488"]),
    ("grammar", 'root ::= "a" root | "b"', ["ab"], ["a"]),
]  # fmt: skip
# schema, its error sentence
WARNED = [
    ({"type": "string", "nullable": True}, ["nullable at # has no effect"]),
    ({"properties": {"a": {"nullable": True}}}, ["nullable at #/properties/a has no effect"]),
    (
        {"type": "object", "propertes": {"a": {}}, "requird": ["a"]},
        ["'propertes' at # is no keyword of JSON Schema", "'requird' at # is no keyword of JSON Schema"],
    ),
    ({"items": {"anyOf": [{"min_length": 3}]}}, ["'min_length' at #/items/anyOf/0"]),
    ({"type": "string", "nullable": False}, []),
    ({"$schema": "https://json-schema.org/draft/2020-12/schema", "$comment": "a", "title": "A"}, []),
    ({"description": "", "examples": [{"propertes": 1}], "default": {"nullable": True}, "x-order": 1}, []),
    ({"deprecated": True, "readOnly": True, "type": "string", "format": "date", "writeOnly": False}, []),
    ({"properties": {"propertes": {"type": "null"}}, "const": {"nullable": True}}, []),
    ({"$id": "http://x/y.json", "$ref": "y.json#/odd/a", "odd": {"a": {"type": "null"}}}, []),
    ({"$ref": "#/components/schemas/a", "components": {"schemas": {"a": {"type": "null"}}}}, []),
]


def text_of(kind: str, asked: object) -> str:
    return asked if isinstance(asked, str) else json.dumps(asked, ensure_ascii=False)


@pytest.mark.parametrize(("kind", "asked", "said"), REFUSED, ids=[str(asked)[:60] for _, asked, _ in REFUSED])
def test_what_answers_could_not_be_is_refused_with_a_reason(kind, asked, said):
    problem = problem_of(kind, text_of(kind, asked))
    assert problem is not None
    assert said in problem
    assert "<state>" not in problem


@pytest.mark.parametrize(("kind", "asked", "right", "wrong"), TAKEN, ids=[str(asked)[:60] for _, asked, _, _ in TAKEN])
def test_a_grammar_that_has_texts_is_taken_and_admits_them(kind, asked, right, wrong):
    text = text_of(kind, asked)
    assert problem_of(kind, text) is None
    grammar = grammar_of(kind, text)
    assert [one for one in right if not admits(grammar, one)] == []
    assert [one for one in wrong if admits(grammar, one)] == []


def test_an_optional_property_that_could_not_end_is_not_begun():
    text = json.dumps(DEAD_END)
    assert problem_of("json", text) is None
    assert not admits(grammar_of("json", text), '{"a":')


@pytest.mark.parametrize(("schema", "said"), WARNED)
def test_keys_without_an_effect_are_told_and_annotations_are_not(schema, said):
    text = json.dumps(schema)
    assert problem_of("json", text) is None
    warnings = warnings_of("json", text)
    assert len(warnings) == len(said)
    assert all(one in warning for one, warning in zip(said, warnings, strict=True))


def test_a_misspelt_key_is_told_with_the_right_one():
    (warning,) = warnings_of("json", '{"requird": []}')
    assert warning.endswith("did you mean required?")
    (warning,) = warnings_of("grammar", 'start: %json {"minItem": 2}')
    assert warning.endswith("did you mean minItems?")


def test_names_of_tokens_are_told_since_only_a_run_can_look_them_up():
    assert problem_of("grammar", 'start: <think> "a"') is None
    (warning,) = warnings_of("grammar", 'start: <think> "a"')
    assert "names tokens of the tokenizer" in warning
    assert warnings_of("grammar", 'start: "<think>" /<a>/ // <b>') == ()
