"""Numbers in schemas: answers have exactly these numbers, or the schema is refused and the number named."""

from __future__ import annotations

import json
import random
import re
from fractions import Fraction

import pytest

from batchinfer.config.exact_json import dumps, exact_float, parse
from batchinfer.config.structured_outputs import grammar_of, problem_of
from batchinfer.config.structured_outputs.exact_grammar import integer_range
from support.exact_schemas import RandomSchema, admits, exact, exact_validator, random_text, spellings

BIG = 9007199254740993  # no double
BIG_LIST = {"type": "array", "items": {"enum": [BIG, BIG + 2]}, "minItems": 1}
NESTED = {
    "type": "object",
    "properties": {"id": {"$ref": "#/$defs/id"}, "note": {"type": "string"}, "ids": BIG_LIST},
    "required": ["id"],
    "$defs": {"id": {"type": "integer", "minimum": 0, "maximum": 18446744073709551615}},
}
# schema, texts that are among the answers, texts that are not
KEPT = [
    (f'{{"const": {BIG}}}', [str(BIG)], ["9007199254740992", "9007199254740994"]),
    (f'{{"enum": [{BIG}, {BIG + 2}]}}', [str(BIG), str(BIG + 2)], ["9007199254740992", "9007199254740996"]),
    ('{"enum": [12345678901234567890]}', ["12345678901234567890"], ["12345678901234567000"]),
    (f'{{"type": "integer", "minimum": {BIG}, "maximum": {BIG}}}', [str(BIG)], ["9007199254740992"]),
    ('{"type": "integer", "minimum": 1e20, "maximum": 1e20}', ["1" + 20 * "0"], ["9223372036854775807"]),
    ('{"const": 93859586.77423489}', ["93859586.77423489"], ["93859586.77423488"]),
    ('{"const": 913011053237898.2}', ["913011053237898.2"], ["913011053237898.3"]),
    ('{"const": 0.12345678901234567890123}', ["0.12345678901234567890123"], ["0.12345678901234568"]),
    ('{"const": 1e400}', ["1e400"], ["1"]),
    ('{"const": 1e90}', ["1" + 90 * "0"], ["1e90"]),
    ('{"type": "number", "exclusiveMinimum": 0, "maximum": 1}', ["1", "0.5", "0.0001"], ["0", "-0", "0.0", "1.1"]),
    ('{"type": "integer", "exclusiveMinimum": 0, "maximum": 1}', ["1"], ["0"]),
    ('{"type": "number", "multipleOf": 0.1, "maximum": 0.5}', ["0.5", "0"], ["0.57", "0.6"]),
    ('{"type": "number", "minimum": -1e-60, "maximum": 1e-60}', ["0", "0." + 59 * "0" + "1"], ["0.1"]),
    ('{"const": 1.10}', ["1.1"], ["1"]),
    ('{"type": "integer", "const": 1.0}', ["1"], ["2"]),
    ('{"type": "integer", "exclusiveMinimum": 1.000000000000000000000, "maximum": 9.0}', ["2", "9"], ["1", "10"]),
    ('{"enum": [1e5, -0, 2.50]}', ["100000", "-0", "2.5"], ["1"]),
    (f'{{"type": "integer", "exclusiveMinimum": {BIG - 1}, "maximum": {BIG + 1}}}', [str(BIG)], [str(BIG - 1)]),
    ('{"type": "integer", "maximum": 9223372036854775807}', [str(2**63 - 1)], [str(2**63)]),
    ('{"type": "integer", "minimum": -9223372036854775808}', [str(-(2**63)), "5"], [str(-(2**63) - 1)]),
    ('{"type": "number", "minimum": 0.1, "maximum": 19.935579046706298}', ["19.935579046706298"], ["19.9355790467063"]),
    # numbers beyond doubles in parts that say nothing of the values here
    ('{"default": 1e400}', ["1"], ["a"]),
    ('{"const": 1, "examples": [{"a": -1e400}]}', ["1"], ["2"]),
    ('{"type": "integer", "exclusiveMinimum": 97.1, "$defs": {"unused": {"const": 1e400}}}', ["98"], ["97"]),
    (
        '{"type": "object", "properties": {"a": {"$ref": "#/$defs/s"}, "b": {"$ref": "#/$defs/n"}},'
        '"$defs": {"n": {"const": 1e400}, "s": {"type": "string"}}}',
        ['{"a": "x", "b": 1e400}'],
        ['{"a": "x", "b": 1}', '{"a": 1}'],
    ),
    # a step whose multiples may need zeros, in ranges that take them
    ('{"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 24}', ["0.25", "0.50", "24"], ["0.3", "24.25"]),
    ('{"type": "number", "exclusiveMinimum": 1, "maximum": 2}', ["1.5", "2", "1.01"], ["1", "1.0", "2.1"]),
    ('{"type": "number", "exclusiveMinimum": 1.2, "maximum": 1.25}', ["1.21", "1.25"], ["1.2", "1.20", "1.26"]),
    (
        f'{{"enum": [{{"id": {BIG}, "x": [1.5, null]}}]}}',
        [f'{{"id": {BIG}, "x": [1.5,null]}}'],
        [f'{{"id": {BIG - 1}, "x": [1.5,null]}}', f'{{"id": {BIG}}}'],
    ),
    (
        json.dumps(NESTED),
        ['{"id": 18446744073709551615}', f'{{"id": 0, "note": "a", "ids": [{BIG}, {BIG + 2}], "z": [{{}}]}}'],
        ['{"id": 18446744073709551616}', '{"id": 0, "id": 1}', f'{{"id": 0, "ids": [{BIG - 1}]}}', '{"ids": []}'],
    ),
]  # fmt: skip
STEP = {"type": "integer", "multipleOf": 100000, "minimum": 0, "maximum": 9999999999}
# schema, and what the refusal says
REFUSED = [
    ('{"type": "number", "multipleOf": 0.07}', "0.07 at #/multipleOf"),
    (f'{{"type": "integer", "multipleOf": {BIG}}}', f"{BIG} at #/multipleOf"),
    ('{"type": "integer", "multipleOf": 4294967295}', "4294967295 at #/multipleOf"),
    (f'{{"type": "number", "maximum": {BIG}}}', f"{BIG} at #/maximum"),
    (
        f'{{"patternProperties": {{"^a": {{"properties": {{"b": {{"enum": [0, {BIG}]}}}}}}}}}}',
        f"{BIG} at #/patternProperties/^a/properties/b/enum/1",
    ),
    (f'{{"oneOf": [{{"const": {BIG}}}, {{"type": "null"}}]}}', f"{BIG} at #/oneOf/0/const"),
    (f'{{"type": "object", "minProperties": 1, "const": {{"a": {BIG}}}}}', f"{BIG} at #/const/a"),
    # the common multiple is beyond 32 bits; doubles say that 0.3 is no multiple of 0.1
    ('{"allOf": [{"type": "integer", "multipleOf": 100000}, {"multipleOf": 70000}]}', "70000 at #/allOf/1/multipleOf"),
    ('{"anyOf": [{"type": "null"}, {"const": 0.3, "multipleOf": 0.1}]}', "0.1 at #/anyOf/1/multipleOf"),
    # also where several schemas say something of a property or an item
    (
        json.dumps(
            {"allOf": [{"type": "object", "properties": {"k": STEP}}, {"properties": {"k": {"multipleOf": 70000}}}]}
        ),
        "70000 at #/allOf/1/properties/k/multipleOf",
    ),
    (
        json.dumps({"type": "object", "properties": {"k": STEP}, "patternProperties": {"k": {"multipleOf": 70000}}}),
        "100000 at #/properties/k/multipleOf",
    ),
    (
        json.dumps({"allOf": [{"type": "array", "items": STEP}, {"items": {"multipleOf": 70000}}]}),
        "70000 at #/allOf/1/items/multipleOf",
    ),
    (
        '{"allOf": [{"properties": {"k": {"const": 0.3}}}, {"properties": {"k": {"multipleOf": 0.1}}}]}',
        "0.1 at #/allOf/1/properties/k/multipleOf",
    ),
    # a multiple whose digits are the first ones of a bound is left out
    ('{"type": "number", "multipleOf": 0.1, "maximum": 0.57}', "0.1 at #/multipleOf"),
    ('{"type": "number", "multipleOf": 0.01, "maximum": 4.999}', "0.01 at #/multipleOf"),
    # 0 is admitted
    ('{"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}', "0 at #/exclusiveMinimum"),
    ('{"exclusiveMinimum": 0.0, "exclusiveMaximum": 0.5}', "0.0 at #/exclusiveMinimum"),
    ('{"type": "number", "exclusiveMaximum": 0, "minimum": -0.5}', "0 at #/exclusiveMaximum"),
    ('{"allOf": [{"exclusiveMinimum": 0}, {"anyOf": [{"maximum": 0.5}, {}]}]}', "0 at #/allOf/0/exclusiveMinimum"),
    (
        '{"properties": {"k": {"exclusiveMinimum": 0}}, "patternProperties": {"k": {"maximum": 0.5}}}',
        "0 at #/properties/k/exclusiveMinimum",
    ),
    # and so is any whole number between which and the next one the range ends
    ('{"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}', "1 at #/exclusiveMinimum"),
    ('{"type": "number", "minimum": -9.5, "exclusiveMaximum": -9.0}', "-9.0 at #/exclusiveMaximum"),
    (
        '{"allOf": [{"exclusiveMinimum": 9, "minimum": 2}, {"exclusiveMaximum": 9.5}]}',
        "9 at #/allOf/0/exclusiveMinimum",
    ),
    # the multiple 0.5 comes as 0.50, but the range takes no zeros behind it
    ('{"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 7.5}', "0.25 at #/multipleOf"),
    ('{"type": "number", "multipleOf": 0.25, "exclusiveMinimum": 0}', "0.25 at #/multipleOf"),
    ('{"type": "number", "multipleOf": 0.15, "exclusiveMinimum": 1, "maximum": 10}', "0.15 at #/multipleOf"),
    ('{"type": "number", "multipleOf": 0.125, "exclusiveMinimum": 1.7, "maximum": 2}', "0.125 at #/multipleOf"),
    ('{"type": "number", "multipleOf": 0.125, "minimum": -1}', "0.125 at #/multipleOf"),
    ('{"type": "number", "multipleOf": 0.25, "exclusiveMaximum": -2, "minimum": -10}', "0.25 at #/multipleOf"),
    # beyond doubles
    ('{"enum": [1e400, 4], "multipleOf": 2}', "2 at #/multipleOf"),
    ('{"type": "number", "multipleOf": 1e-320, "minimum": 0, "maximum": 1}', "1e-320 at #/multipleOf"),
    # patterns that would be nested too deeply
    ('{"type": "number", "exclusiveMinimum": 1e-100}', "1e-100 at #/exclusiveMinimum has more digits than"),
    (
        '{"type": "integer", "maximum": ' + 99 * "7" + "}",
        f"{40 * '7'}… (99 characters) at #/maximum has more digits than",
    ),
    ('{"const": 1e99999}', "1e99999 is out of range"),
    ('{"const": ' + 5000 * "7" + "}", f"{40 * '7'}… (5000 characters) is out of range"),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), KEPT)
def test_answers_have_exactly_the_numbers_of_the_schema(schema, right, wrong):
    assert problem_of("json", schema) is None
    grammar = grammar_of("json", schema)
    assert [text for text in right if not admits(grammar, text)] == []
    assert [text for text in wrong if admits(grammar, text)] == []


@pytest.mark.parametrize(("schema", "said"), REFUSED)
def test_a_number_that_cannot_be_kept_is_named_with_its_place(schema, said):
    problem = problem_of("json", schema)
    assert problem is not None
    assert f"the number {said}" in problem
    assert len(problem) < 250


def test_a_part_that_is_not_supported_is_named_without_the_grammar_around_it():
    asked = f'{{"anyOf": [{{"dependentSchemas": {{}}}}, {{"const": {BIG}}}]}}'
    assert problem_of("json", asked) == 'Unimplemented keys: ["dependentSchemas"]'


@pytest.mark.parametrize("first", range(0, 500, 50))
def test_random_schemas_admit_what_an_exact_validator_admits_or_are_refused_by_name(first):
    num_kept = num_texts = 0
    for seed in range(first, first + 50):
        asked = RandomSchema(seed)
        problem = problem_of("json", asked.text)
        if problem is not None:
            assert "the number " in problem or "Unsatisfiable" in problem, (asked.text, problem)
            continue
        num_kept += 1
        grammar, validator, rng = grammar_of("json", asked.text), exact_validator(asked.text), random.Random(seed)
        for _ in range(2):
            text = random_text(grammar, rng)
            if text is not None and not re.search(rb"[eE][+-]?[0-9]{4}", text):  # fractions of these fill the memory
                num_texts += 1
                assert validator.is_valid(exact(text)), (asked.text, text)
        for value in asked.wanted:
            assert any(admits(grammar, spelt) for spelt in spellings(value)), (asked.text, value)
    assert num_kept > 20
    assert num_texts > 30


@pytest.mark.parametrize("seed", range(20))
def test_a_range_of_integers_is_the_integers_in_it(seed):
    rng = random.Random(seed)
    low, high = sorted(rng.randint(-1300, 1300) for _ in range(2))
    for lowest, highest in ((low, high), (low, low), (None, high), (low, None), (None, None)):
        pattern = re.compile(integer_range(lowest, highest))
        numbers = range(-1500, 1500)
        found = {number for number in numbers if pattern.fullmatch(str(number))}
        assert found == {
            number
            for number in numbers
            if (lowest is None or lowest <= number) and (highest is None or number <= highest)
        }


def test_json_is_read_and_written_with_every_digit():
    text = '{"a": [9007199254740993, 0.12345678901234567890, 1e400, -1E-7, 1.10], "b": "ü", "c": null, "d": true}'
    assert dumps(parse(text)) == text
    assert dumps({"a": exact_float("0.12345678901234567890"), "b": exact_float("1.10")}) == (
        '{"a": 0.12345678901234567890, "b": 1.1}'
    )
    assert type(exact_float("1e5")) is float
    assert Fraction(dumps(exact_float("1_0.000000000000000000001"))) == Fraction("10.000000000000000000001")
