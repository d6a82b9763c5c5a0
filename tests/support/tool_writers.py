"""Random tool calls, and texts of them as the chat templates of the families write them.

Values are pairs (text, is a string): a string, or the literal that stands for any other value in JSON.
"""

from __future__ import annotations

import json
import random
from typing import Any

Value = tuple[str, bool]
Arguments = dict[str, Value]

STRINGS = (
    *("10001", "1.10", "007", "1e5", "-0", "123_456", "12345678901234567890", "true", "null", '"q"', '{"a":1}', "[1]"),
    *("", " ", " 5 ", "\n", "  x\n", "\tif a < b:\n\t\tgo()\n", "Zürich", "東京", "😊", "a\\b", 'say "no"', "\u2028"),
)
INTEGERS = ("3", "-7", "0", "12345678901234567890", "9007199254740993")
NUMBERS = ("1.10", "1e5", "-0.0", "2.50E-3", "3", "93859586.77423489")
OBJECTS = ('{"a":1.10}', '{ "b" : [1e5, null] }', "{}", '{"ü": "😊", "deep": {"x": [{"y": "1.10"}]}}')
LISTS = ("[]", "[1.0,2]", '[ "5", 5 , null]', '[{"n": 1.10}]')
SIMPLE = {
    "integer": INTEGERS,
    "number": NUMBERS,
    "boolean": ("true", "false"),
    "null": ("null",),
    "object": OBJECTS,
    "array": LISTS,
}


def random_tool(seed: int) -> tuple[dict[str, Any], Arguments]:
    """Return a tool named f, and arguments of its declared types."""
    rng = random.Random(seed)
    properties: dict[str, Any] = {}
    arguments: Arguments = {}
    for place in range(rng.randrange(6)):
        name = f"p{place}" if rng.random() < 0.8 else f"größe {place}"
        schema, arguments[name] = _parameter(rng)
        if schema is not None:
            properties[name] = schema
    parameters = {"type": "object", "properties": properties, "$defs": {"Text": {"type": "string"}}}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}, arguments


def _parameter(rng: random.Random) -> tuple[dict[str, Any] | None, Value]:
    """Return a schema (None: the parameter is not declared) and a value that it allows."""
    string = (rng.choice(STRINGS), True)
    kind = rng.choice([*SIMPLE, "string", "nullable", "union", "enum", "const", "ref", "all", "mixed", "unsaid"])
    if kind in SIMPLE:
        return {"type": rng.choice([kind, [kind, "null"]])}, (rng.choice(SIMPLE[kind]), False)
    if kind == "nullable":
        value = ("null", False) if rng.random() < 0.3 or string[0] == "null" else string
        is_short = rng.random() < 0.5
        return {"type": ["string", "null"]} if is_short else {"oneOf": [{"type": "null"}, {"type": "string"}]}, value
    if kind == "mixed":
        value = (rng.choice(INTEGERS), False) if rng.random() < 0.5 else ("auto", True)
        return {"anyOf": [{"enum": ["auto", "none"]}, {"type": "integer"}]}, value
    if kind == "unsaid":
        return rng.choice([None, {}, {"description": "x"}]), (rng.choice([*NUMBERS, *OBJECTS, *LISTS, "true"]), False)
    schemas: dict[str, dict[str, Any]] = {
        "string": {"type": "string"},
        "union": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "object"}]},
        "enum": {"enum": [string[0], "other"]},
        "const": {"const": string[0]},
        "ref": {"$ref": "#/$defs/Text"},
        "all": {"allOf": [{"$ref": "#/$defs/Text"}, {"minLength": 0}]},
    }
    return schemas[kind], string


def as_object(arguments: Arguments, rng: random.Random) -> str:
    """Return arguments as JSON text of an object, with white space and escapes as models choose them."""
    escapes, colon, comma = rng.random() < 0.3, rng.choice([":", ": ", " :\n"]), rng.choice([",", ", "])
    members = [
        json.dumps(name, ensure_ascii=escapes) + colon + (json.dumps(text, ensure_ascii=escapes) if is_string else text)
        for name, (text, is_string) in arguments.items()
    ]
    return "{" + comma.join(members) + "}"


def deepseek_v3(name: str, arguments: Arguments, rng: random.Random) -> str:
    call = f"function<｜tool▁sep｜>{name}\n```json\n{as_object(arguments, rng)}\n```"
    return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def deepseek_v31(name: str, arguments: Arguments, rng: random.Random) -> str:
    call = f"{name}<｜tool▁sep｜>{as_object(arguments, rng)}"
    return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def deepseek_v32(name: str, arguments: Arguments, rng: random.Random) -> str:
    parameters = "".join(
        f'<｜DSML｜parameter name="{key}" string="{str(is_string).lower()}">{text}</｜DSML｜parameter>\n'
        for key, (text, is_string) in arguments.items()
    )
    invoke = f'<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>'
    return f"\n\n<｜DSML｜function_calls>\n{invoke}\n</｜DSML｜function_calls>"


def kimi_k2(name: str, arguments: Arguments, rng: random.Random) -> str:
    section = f"tool_call{rng.choice(['s', ''])}_section"
    call = f"functions.{name}:0<|tool_call_argument_begin|>{as_object(arguments, rng)}"
    return f"<|{section}_begin|><|tool_call_begin|>{call}<|tool_call_end|><|{section}_end|>"


def glm(name: str, arguments: Arguments, rng: random.Random) -> str:
    line = rng.choice(["\n", ""])
    parameters = "".join(
        f"<arg_key>{key}</arg_key>{line}<arg_value>{text}</arg_value>{line}" for key, (text, _) in arguments.items()
    )
    return f"<tool_call>{name}{line}{parameters}</tool_call>"


def hermes(name: str, arguments: Arguments, rng: random.Random) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {as_object(arguments, rng)}}}\n</tool_call>'


def minimax(name: str, arguments: Arguments, rng: random.Random) -> str:
    parameters = "".join(f'<parameter name="{key}">{text}</parameter>\n' for key, (text, _) in arguments.items())
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{parameters}</invoke>\n</minimax:tool_call>'


def harmony(name: str, arguments: Arguments, rng: random.Random) -> str:
    heads = (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json",
        f"<|start|>assistant to=functions.{name}<|channel|>commentary json",
    )
    return f"{rng.choice(heads)}<|message|>{as_object(arguments, rng)}{rng.choice(['<|call|>', ''])}"


def mistral(name: str, arguments: Arguments, rng: random.Random) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{as_object(arguments, rng)}"


def old_mistral(name: str, arguments: Arguments, rng: random.Random) -> str:
    return f'[TOOL_CALLS][{{"name": {json.dumps(name)}, "arguments": {as_object(arguments, rng)}}}]'


WRITERS = {
    "deepseek_v3": (deepseek_v3, deepseek_v31),
    "deepseek_v32": (deepseek_v32,),
    "kimi_k2": (kimi_k2,),
    "glm": (glm,),
    "hermes": (hermes,),
    "minimax": (minimax,),
    "harmony": (harmony,),
    "mistral": (mistral, old_mistral),
}
