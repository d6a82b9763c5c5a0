"""Random schemas with numbers of all sizes, a judge that reckons exactly, and texts that a grammar admits.

Schemas are texts, so that their numbers are as they are written; a Written is a number's text.
"""

from __future__ import annotations

import json
import random
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import jsonschema
import numpy as np
from jsonschema import validators

from batchinfer.config.structured_outputs.byte_matcher import END, byte_matcher

COUNTS = ("minItems", "maxItems")  # keywords whose numbers are integers of Python


class Written(str):
    """The text of a number."""


def text_of(value: Any) -> str:
    """A value as JSON."""
    if isinstance(value, Written):
        return str(value)
    if isinstance(value, dict):
        members = (f"{json.dumps(key, ensure_ascii=False)}:{text_of(one)}" for key, one in value.items())
        return "{" + ",".join(members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(text_of, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def plain_text(number: Fraction) -> Written:
    """A decimal number without an exponent."""
    with localcontext() as context:
        context.prec = 400
        return Written(format(Decimal(number.numerator) / Decimal(number.denominator), "f"))


# ---- random schemas


class RandomSchema:
    """text: of the schema; wanted: values that it must admit."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._definitions: dict[str, Any] = {}
        schema, self.wanted = self._schema(self._rng.randrange(4))
        self.text = text_of(schema | ({"$defs": self._definitions} if self._definitions else {}))

    def _number(self) -> Written:
        rng, sign = self._rng, self._rng.choice(["", "-"])
        return Written(
            rng.choice(
                [
                    f"{sign}{rng.randint(0, 1000)}",
                    f"{sign}{2**53 + rng.randint(-3, 3)}",
                    f"{sign}{rng.randint(2**53, 2**63 - 1)}",
                    f"{sign}{2 ** rng.choice([63, 64]) + rng.randint(-2, 2)}",
                    f"{sign}{rng.randint(10**20, 10**40)}",
                    repr(rng.uniform(-180, 180)),
                    f"{rng.uniform(-1, 1) * 10 ** rng.randint(-5, 9):.{rng.randint(1, 17)}g}",
                    rng.choice(["1.10", "1e5", "-0", "1.0", "1E+2", "0.5e-7", "2.50", "1e22", "1e23", "100e-2", "0.0"]),
                    f"{sign}{rng.randint(0, 9)}.{rng.randint(10**18, 10**24)}",
                ]
            )
        )

    def _constant(self, depth: int = 0) -> Any:
        kind = self._rng.randrange(8 if depth < 2 else 5)
        if kind < 4:
            return self._number()
        if kind == 4:
            return self._rng.choice(["a", None, True, "9007199254740993"])
        if kind == 5:
            return {"k": self._constant(depth + 1), "b": self._constant(depth + 1)}
        return [self._constant(depth + 1) for _ in range(self._rng.randrange(3))]

    def _leaf(self) -> tuple[dict[str, Any], list[Any]]:
        rng, kind = self._rng, self._rng.randrange(7)
        type_name = rng.choice(["integer", "number"])
        if kind == 0:
            value = self._constant()
            return {"const": value}, [value]
        if kind == 1:
            values = [self._constant() for _ in range(rng.randint(1, 4))]
            return {"enum": values}, values
        if kind == 2:
            return self._bounded(type_name)
        if kind == 3:
            step = Written(rng.choice(["0.01", "0.1", "5", "3", "1000000", "0.07", "0.25", "4294967295", "4290000000",
                                       "9007199254740993", "1e-5", "0.3", "1.1", "2.5e3", "0.000001"]))  # fmt: skip
            multiple = Fraction(step) * rng.randint(-50, 50)
            is_right = type_name == "number" or multiple.denominator == 1
            return {"type": type_name, "multipleOf": step}, [plain_text(multiple)] if is_right else []
        if kind == 4:
            value = self._number()
            return {"type": "integer" if Fraction(value).denominator == 1 else "number", "const": value}, [value]
        if kind == 5:
            return self._above_zero()
        return {"type": type_name}, []

    def _above_zero(self) -> tuple[dict[str, Any], list[Any]]:
        """Numbers between 0, itself excluded, and a number that is often within (-1, 1)."""
        bound = Written(self._rng.choice(["0.5", "0.999", "1e-5", "1", "1.5", "100"]))
        sign, zero, other = self._rng.choice(
            [("", "exclusiveMinimum", "maximum"), ("-", "exclusiveMaximum", "minimum")]
        )
        wanted = Written(sign + bound)
        return {"type": "number", zero: Written("0"), other: wanted}, [wanted]

    def _merged(self) -> tuple[dict[str, Any], list[Any]]:
        """Two schemas for the same value: a property by name or by pattern, an item, or the whole."""
        rng = self._rng
        (one, wanted), (other, _) = self._leaf(), self._leaf()
        judge = exact_validator(text_of(other))
        wanted = [value for value in wanted if judge.is_valid(exact(text_of(value)))]
        kind = rng.randrange(4)
        if kind == 0:
            return {"allOf": [one, other]}, wanted
        if kind == 1:
            array = {"type": "array", "items": one, "minItems": 1, "maxItems": 2}
            return {"allOf": [array, {"items": other}]}, [[value] for value in wanted]
        object_ = {"type": "object", "properties": {"k": one}, "required": ["k"], "additionalProperties": False}
        by_pattern = {"patternProperties": {"^k": other}}
        both = object_ | by_pattern if kind == 2 else {"allOf": [object_, {"properties": {"k": other}}]}
        return both, [{"k": value} for value in wanted]

    def _bounded(self, type_name: str) -> tuple[dict[str, Any], list[Any]]:
        low, high = sorted((self._number(), self._number()), key=Fraction)
        lower = self._rng.choice(["minimum", "exclusiveMinimum", None])
        upper = self._rng.choice(["maximum", "exclusiveMaximum", None])
        schema = {"type": type_name} | ({lower: low} if lower else {}) | ({upper: high} if upper else {})
        is_point = Fraction(low) == Fraction(high)
        wanted = [
            bound
            for bound, own, other in ((low, lower, upper), (high, upper, lower))
            if own in ("minimum", "maximum") and not (is_point and str(other).startswith("exclusive"))
        ]
        return schema, [one for one in wanted if type_name == "number" or Fraction(one).denominator == 1]

    def _schema(self, depth: int) -> tuple[dict[str, Any], list[Any]]:
        rng, kind = self._rng, self._rng.randrange(9) if depth else 7
        if kind in (0, 1):
            return self._object(depth)
        if kind == 7:
            return self._leaf()
        if kind == 8:
            return self._merged()
        schema, wanted = self._schema(depth - 1)
        if kind == 2:
            least = rng.randint(0, 2)
            array = {"type": "array", "items": schema, "minItems": least, "maxItems": least + rng.randint(0, 2)}
            return array, [[rng.choice(wanted) for _ in range(least)]] if wanted else []
        if kind == 3:
            other, of_other = self._schema(depth - 1)
            return {"anyOf": [schema, other]}, [*wanted, *of_other]
        if kind == 4:
            name = f"d{len(self._definitions)}"
            self._definitions[name] = schema
            return {"$ref": f"#/$defs/{name}"}, wanted
        if kind == 5:  # numbers of annotations ask for nothing
            return {"allOf": [schema], "title": "9007199254740993", "default": Written("9007199254740993")}, wanted
        object_ = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
        return object_ | {"patternProperties": {"^z": {"type": "null"}}}, [{"a": one} for one in wanted]

    def _object(self, depth: int) -> tuple[dict[str, Any], list[Any]]:
        rng = self._rng
        parts = {name: self._schema(depth - 1) for name in rng.sample(["id", "x", "é", 'k"q', "n"], rng.randint(1, 3))}
        required = [name for name in parts if rng.random() < 0.6]
        schema: dict[str, Any] = {"type": "object", "properties": {name: part for name, (part, _) in parts.items()}}
        schema["required"] = required
        if rng.random() < 0.7:
            schema["additionalProperties"] = rng.choice([False, False, False, {"type": "null"}])
        if any(not parts[name][1] for name in required):
            return schema, []
        return schema, [{name: rng.choice(wanted) for name, (_, wanted) in parts.items() if wanted}]


# ---- the judge


def exact(text: str | bytes) -> Any:
    """A JSON text whose numbers are fractions."""
    return json.loads(text, parse_float=Fraction, parse_int=Fraction)


def exact_validator(schema: str) -> jsonschema.protocols.Validator:
    """A validator that reckons with fractions."""

    def counts_as_int(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: int(one) if key in COUNTS and isinstance(one, Fraction) else counts_as_int(one)
                for key, one in value.items()
            }
        return list(map(counts_as_int, value)) if isinstance(value, list) else value

    return _EXACT(counts_as_int(exact(schema)))


_EXACT = validators.extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine_many(
        {
            "number": lambda _, value: isinstance(value, Fraction),
            "integer": lambda _, value: isinstance(value, Fraction) and value.denominator == 1,
        }
    ),
)


# ---- texts of a grammar


def admits(grammar: str, text: str) -> bool:
    """Whether a text is one that the grammar describes."""
    matcher, tokens = byte_matcher(grammar), list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def random_text(grammar: str, rng: random.Random, most_bytes: int = 150) -> bytes | None:
    """A text that the grammar admits; None: it is longer, or too much for the library."""
    matcher, text = byte_matcher(grammar), bytearray()
    while len(text) < most_bytes:
        allowed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        tokens = np.flatnonzero(np.unpackbits(allowed, bitorder="little")).tolist()  # bytes, and END where it may end
        if "too many expressions" in matcher.get_error():
            return None
        assert not matcher.is_error(), (bytes(text), matcher.get_error())
        if END in tokens and (len(tokens) == 1 or rng.random() < 0.3):
            return bytes(text)
        tokens = [token for token in tokens if token != END]
        # few blanks and exponents, and an early end
        usual = [token for token in tokens if token not in b" \n\r\teE" or rng.random() < 0.1] or tokens
        closing = [token for token in usual if token in b'",]}']
        token = rng.choice(closing if closing and rng.random() < 0.4 else usual)
        matcher.consume_token(token)
        text.append(token)
    return None


def spellings(value: Any) -> list[str]:
    """Texts of a value: its numbers as written, without exponents, and with zeros at their ends."""
    if isinstance(value, Written):
        number = Fraction(value)
        if number.denominator == 1:
            return list(dict.fromkeys([str(value), str(number.numerator)]))
        return [str(value), *(plain_text(number).rstrip("0") + "0" * zeros for zeros in range(8))]
    if isinstance(value, dict):
        keys = [f"{json.dumps(key, ensure_ascii=False)}:" for key in value]
        parts = [[key + text for text in spellings(one)] for key, one in zip(keys, value.values(), strict=True)]
        return ["{" + ",".join(some) + "}" for some in _together(parts)]
    if isinstance(value, list):
        return ["[" + ",".join(some) + "]" for some in _together(list(map(spellings, value)))]
    return [json.dumps(value, ensure_ascii=False)]


def _together(parts: list[list[str]], most: int = 2000) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for texts in parts:
        found = [[*some, text] for some in found for text in texts][:most]
    return found
