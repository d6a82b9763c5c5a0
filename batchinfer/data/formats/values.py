"""Type inference for columns of JSON and CSV: a type that holds all values, and the conversion of each value.

The type depends on the column's use. A prompt or id of a wrong kind is an error of its row. Messages, tools and
sampling may differ from row to row and become JSON text. Other columns get the narrowest type that holds every value,
else JSON text; so does a column of prompts or ids in which no value is of the right kind:

    1, 2.5 → double      [1], null → list<int64>      {"a": 1}, {"b": "x"} → struct<a, b>      1, "x" → JSON text
"""

import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa

from batchinfer.config import JobConfig
from batchinfer.config.exact_json import to_json

INT64 = range(-(1 << 63), 1 << 63)
EXACT = range(-(1 << 53), (1 << 53) + 1)  # integers that a double holds
MOST_NAMES = 200  # fields of a struct, beyond which objects become JSON; and listed columns that the job does not name
MOST_DEPTH = 16  # nested lists and structs

# kind of values: "null", a scalar's name, "mixed", ("list", kind of items), ("struct", {name: kind})
Kind = Any
# long: an integer that a double may not hold; spelled: a double that Python writes as the CSV file does
_NUMBERS = {"int": pa.int64(), "long": pa.int64(), "float": pa.float64(), "spelled": pa.float64()}
_SCALARS = {"bool": pa.bool_(), "text": pa.string(), **_NUMBERS}
# numbers that keep every digit as they are written; doubles keep 15 digits
_INT_TEXT = re.compile(r"0|-?[1-9][0-9]{0,18}")
_FLOAT_TEXT = re.compile(r"-?(0|[1-9][0-9]{0,14})(\.([0-9]{0,16}[1-9]|0))?([eE][+-]?[0-9]{1,2})?")
RESPELLED = "respelled"  # role of a field: doubles that Python writes in another way than the CSV file
_BOOL_TEXTS = {"true": True, "True": True, "false": False, "False": False}


class WrongValueError(ValueError):
    """A value is not right for its column. The message continues a sentence that begins with the column's name."""


def in_words(value: object) -> str:
    """Return the kind of a JSON value in words: "text", "a list", "null", ..."""
    if isinstance(value, bool):
        return str(value).lower()
    words = {str: "text", list: "a list", dict: "an object", type(None): "null"}
    return words.get(type(value), "a number")


def column_roles(job: JobConfig, prompt_columns: list[str]) -> dict[str, str]:
    """Return the role of each input column that the job names: text, json, id, token_ids, choices, variable or kept.

    Args:
        prompt_columns: the columns that prompts are made of.
    """
    given = job.input
    # tools and variables may also be written in the job itself
    as_json = [given.messages, given.tools, given.chat_template_kwargs, given.sampling]
    named = [
        *((name, "kept") for name in job.output.keep_columns),
        *((name, "variable") for name in prompt_columns),
        *((name, "json") for name in as_json if isinstance(name, str)),
        *((given.choices, "choices"), (given.token_ids, "token_ids"), (given.id, "id")),
        *((name, "text") for name in (given.prompt, given.user)),
    ]
    return {name: role for name, role in named if name is not None}


# ---- first pass: kinds


class Columns:
    """Collector of a file's columns and their types.

    Args:
        roles: see `column_roles`; other columns are listed without a type.
        is_text: whether every value is text (CSV), which may be converted to a number.
    """

    def __init__(self, roles: Mapping[str, str], *, is_text: bool) -> None:
        self._roles, self._is_text = roles, is_text
        self._typed = {name for name, role in roles.items() if role in ("id", "choices", "variable", "kept")}
        # columns without any right value so far; at the end, such a column gets the type of its values
        self._unfit = {name: _RIGHT[role] for name, role in roles.items() if role in _RIGHT}
        self._kind_of: dict[str, Callable[[Any], Kind]] = dict.fromkeys(roles, _kind_of_text if is_text else kind_of)
        if is_text:
            self._kind_of |= {name: _kind_of_spelling for name, role in roles.items() if role == "variable"}
        self._kinds: dict[str, Kind] = {}

    def add_names(self, names: Iterable[str]) -> None:
        """Add columns that the file names before its rows."""
        for name in names:
            if name in self._roles or len(self._kinds) < MOST_NAMES:
                self._kinds.setdefault(name, "null")

    def add_row(self, values: Mapping[str, object]) -> None:
        """Add the kinds of one row's values."""
        kinds = self._kinds
        if self._unfit:
            self._unfit = {name: fit for name, fit in self._unfit.items() if not self._is_right(name, fit, values)}
        for name, value in values.items():
            if name in self._typed or name in self._unfit:
                known = kinds.get(name, "null")
                kinds[name] = known if known == "mixed" else _wider(known, self._kind_of[name](value))
            elif name not in kinds and (name in self._roles or len(kinds) < MOST_NAMES):
                kinds[name] = "null"

    def _is_right(self, name: str, fit: Callable[[Any], Any], values: Mapping[str, object]) -> bool:
        """Return whether a row's value suits the role of its column; an id may be missing. msgspec.Raw: integers."""
        value = values.get(name)
        if value is None or isinstance(value, msgspec.Raw):
            return value is not None or self._roles[name] == "id"
        try:
            fit(value)
        except WrongValueError:
            return False
        return True

    def schema(self) -> pa.Schema:
        """Return the columns as an Arrow schema; fields' metadata says how to convert values (see `converter_of`)."""
        return pa.schema([self._field(name, kind) for name, kind in self._kinds.items()])

    def _field(self, name: str, kind: Kind) -> pa.Field:
        kept, how = _arrow_type(kind), ""
        role = self._roles.get(name, "kept")
        if name in self._unfit and kind != "null" and kept is not None:
            role = "kept"
        if role in ("text", "json"):
            kept, how = pa.string(), role
        elif role == "token_ids":
            kept, how = pa.list_(pa.int64()), role
        elif role == "choices":
            of_ids = kind == ("list", ("list", "int"))
            kept, how = pa.list_(pa.list_(pa.int64()) if of_ids else pa.string()), "id_lists" if of_ids else "texts"
        elif role == "id" and kind not in ("null", "int", "long"):
            kept, how = pa.string(), "id"
        elif self._is_text:
            kept = pa.string() if kept is None else kept
            how = "" if kept in (pa.string(), pa.null()) else str(kept)
            if role == "variable" and kind == "float":
                how = RESPELLED
        elif kept is None:
            kept, how = pa.string(), "json" if role == "variable" else "strict_json"
        return pa.field(name, kept, metadata={"fitting": how})


def kind_of(value: Any, depth: int = 0) -> Kind:
    """Return the kind of a JSON value."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return "text"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if value in EXACT else "long" if value in INT64 else "mixed"
    if isinstance(value, float):
        return "float"
    if depth == MOST_DEPTH:
        return "mixed"
    if isinstance(value, dict):
        fields = {name: kind_of(part, depth + 1) for name, part in value.items()}
        return _struct(fields)
    if set(map(type, value)) == {int}:  # ids: millions of them
        return _list(_wider(kind_of(min(value)), kind_of(max(value))))
    kind: Kind = "null"
    for item in value:
        kind = _wider(kind, kind_of(item, depth + 1))
    return _list(kind)


def _kind_of_text(text: str | None) -> Kind:
    if text is None:
        return "null"
    if _INT_TEXT.fullmatch(text):
        return kind_of(int(text))
    if _FLOAT_TEXT.fullmatch(text):
        return "text" if len(text) > 15 and Decimal(repr(float(text))) != Decimal(text) else "float"
    return "bool" if text in _BOOL_TEXTS else "text"


def _kind_of_spelling(text: str | None) -> Kind:
    """Return the kind of a text that a template writes."""
    kind = _kind_of_text(text)
    return "spelled" if kind == "float" and text is not None and repr(float(text)) == text else kind


def _wider(first: Kind, second: Kind) -> Kind:
    """Return the kind that holds values of both kinds."""
    if second in (first, "null"):
        return first
    if first == "null":
        return second
    if isinstance(first, str) or isinstance(second, str):
        numbers = {first, second} if isinstance(first, str) and isinstance(second, str) else set()
        is_double = len(numbers) == 2 and numbers <= {"int", "float", "spelled"}
        return "long" if numbers == {"int", "long"} else "float" if is_double else "mixed"
    if first[0] != second[0]:
        return "mixed"
    if first[0] == "list":
        return _list(_wider(first[1], second[1]))
    return _struct(
        {name: _wider(first[1].get(name, "null"), second[1].get(name, "null")) for name in first[1] | second[1]}
    )


def _list(kind: Kind) -> Kind:
    return "mixed" if kind == "mixed" else ("list", kind)


def _struct(fields: dict[str, Kind]) -> Kind:
    return "mixed" if "mixed" in fields.values() or len(fields) > MOST_NAMES else ("struct", fields)


def _arrow_type(kind: Kind) -> pa.DataType | None:
    """Return the Arrow type of a kind; None if there is none, or Parquet has none (a struct without fields)."""
    if isinstance(kind, str):
        return pa.null() if kind == "null" else _SCALARS.get(kind)
    if kind[0] == "list":
        item = _arrow_type(kind[1])
        return None if item is None else pa.list_(item)
    fields = {name: _arrow_type(part) for name, part in kind[1].items()}
    return None if not fields or None in fields.values() else pa.struct(list(fields.items()))


# ---- further passes: values


def converter_of(field: pa.Field) -> Callable[[Any], Any] | None:
    """Return the function that converts a value to the field's type, None if values need no conversion.

    The function takes values that are not null, and raises WrongValueError.
    """
    how = role_of(field)
    return _CONVERTERS[how] if how else None


def role_of(field: pa.Field) -> str:
    """Return the conversion of values for a field of `Columns.schema`: a key of _CONVERTERS, "" for none."""
    return (field.metadata or {}).get(b"fitting", b"").decode()


def keeps_values(field: pa.Field) -> bool:
    """Return whether the values of a column of JSON stay as they are, whatever values other rows hold."""
    kind = field.type
    while pa.types.is_list(kind):
        kind = kind.value_type
    is_plain = pa.types.is_string(kind) or pa.types.is_boolean(kind) or pa.types.is_integer(kind)
    return not role_of(field) and (is_plain or pa.types.is_null(kind))


def json_text(value: Any) -> str:
    """Return a value as JSON; text stays unchanged."""
    return value if isinstance(value, str) else to_json(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise WrongValueError(f"is {in_words(value)}, not text")
    return value


def _id(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise WrongValueError(f"is {in_words(value)}, not text or an integer")


def _token_ids(value: Any) -> list[int]:
    found: list[int] = _list_of(value, int, "integers")
    numbers = [item for item in found if item is not None] if None in found else found
    if numbers and (min(numbers) not in INT64 or max(numbers) not in INT64):
        raise WrongValueError("holds an integer of more than 64 bits")
    return found


def _texts(value: Any) -> list[str]:
    return _list_of(value, str, "texts")


def _id_lists(value: Any) -> list[list[int] | None]:
    return [None if item is None else _token_ids(item) for item in _list_of(value, list, "lists of integers")]


def _choices(value: Any) -> list[Any]:
    try:
        return _texts(value)
    except WrongValueError:
        return _id_lists(value)


def _list_of(value: Any, kind: type, wanted: str) -> list[Any]:
    """Return a list of `kind` items or nulls; a text is parsed as JSON, because CSV has only text.

    Raises:
        WrongValueError: the value is no such list.
    """
    if isinstance(value, str | msgspec.Raw):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            raise WrongValueError(f"is text, not a list of {wanted}") from None
    if not isinstance(value, list):
        raise WrongValueError(f"is {in_words(value)}, not a list of {wanted}")
    if not set(map(type, value)) <= {kind, type(None)}:
        wrong = next(item for item in value if type(item) not in (kind, type(None)))
        raise WrongValueError(f"is a list that holds {in_words(wrong)}, not a list of {wanted}")
    return value


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "text": _text,
    "json": json_text,
    "strict_json": to_json,
    "id": _id,
    "token_ids": _token_ids,
    "texts": _texts,
    "id_lists": _id_lists,
    "int64": int,
    "double": float,
    RESPELLED: float,
    "bool": _BOOL_TEXTS.__getitem__,
}
# by role of columns that every row needs: a function that raises for a wrong value
_RIGHT: dict[str, Callable[[Any], Any]] = {"text": _text, "id": _id, "token_ids": _token_ids, "choices": _choices}
