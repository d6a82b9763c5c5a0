"""JSON whose numbers keep every digit, although Python's floats would round them."""

import json
from decimal import Decimal
from typing import Any, Self

import msgspec

MOST_DIGITS = 4000  # of an integer; Python converts no more than 4,300 at a time
_MOST_EXPONENT = 10_000


class WrittenDecimal(Decimal):
    """A decimal number that keeps the text that it was read from."""

    text: str

    def __new__(cls, text: str) -> Self:
        found = super().__new__(cls, text)
        found.text = text
        return found

    def __str__(self) -> str:
        return self.text


class WrittenFloat(float):
    """A float that differs from its number as written, and keeps the written text."""

    text: str

    def __new__(cls, text: str) -> Self:
        found = super().__new__(cls, text)
        found.text = text
        return found

    def __repr__(self) -> str:
        return self.text


def exact_float(text: str) -> float:
    """Convert the text of a number, of JSON or TOML, to a float; to a WrittenFloat if a float is another number."""
    text = text.replace("_", "").removeprefix("+")
    value = float(text)
    if not text[-1:].isdigit():
        return value  # TOML has inf and nan, too
    try:
        is_kept = Decimal(repr(value)) == Decimal(text)
    except ArithmeticError:
        is_kept = False
    return value if is_kept else WrittenFloat(text)


def decimal_of(text: str) -> Decimal:
    """Return the number that a JSON text spells, to the last digit.

    Raises:
        ValueError: the number is out of range.
    """
    try:
        number: Decimal = WrittenDecimal(text)
    except ArithmeticError:
        number = Decimal("inf")
    if not number.is_finite() or (number and abs(number.adjusted()) > _MOST_EXPONENT):
        raise ValueError(f"the number {shown(text)} is out of range")
    return number


def parse(text: str) -> Any:
    """Return the value of a JSON text: integers as int, other numbers as Decimal.

    Raises:
        ValueError: the text is not JSON, or a number is out of range.
        RecursionError: the text is nested too deeply.
    """
    return json.loads(text, parse_float=decimal_of, parse_int=_integer, parse_constant=_refuse_constant)


def to_json(value: Any) -> str:
    """Return a value as compact JSON text (in msgspec's form) with every digit of a WrittenFloat."""
    return _ENCODER.encode(value).decode()


def dumps(value: Any) -> str:
    """Return a value as JSON text, in the form of json.dumps, with every digit of its numbers.

    Raises:
        ValueError: a part of the value has no form in JSON.
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f"{dumps(str(key))}: {dumps(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(dumps, value)) + "]"
    if isinstance(value, WrittenFloat):
        return value.text
    if isinstance(value, Decimal) and value.is_finite():
        return str(value)
    if value is None or isinstance(value, str | bool | int | float):
        return json.dumps(value, ensure_ascii=False)
    raise ValueError(f"{value!r} is nothing that JSON has")


def shown(number: object) -> str:
    """Return a number for a sentence: its text, cut if it is long."""
    text = str(number)
    return text if len(text) <= 60 else f"{text[:40]}… ({len(text)} characters)"


def _written(value: object) -> msgspec.Raw:
    if isinstance(value, WrittenFloat):
        return msgspec.Raw(value.text.encode())
    raise NotImplementedError(f"{type(value).__name__} is nothing that JSON has")


_ENCODER = msgspec.json.Encoder(enc_hook=_written)


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"the number {shown(text)} is out of range")
    return int(text)


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")
