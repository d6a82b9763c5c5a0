"""100 answers of DeepSeek V4, always the same: 80 in its form of tool calls, and 20 that models should not write.

v4_answers.json has the first 16 hex digits of the SHA-256 of what deepseek-recipe 0.2.0 reads in each one (`digest`).
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

NUM_DRAWN = 80
DIGESTS = Path(__file__).with_name("v4_answers.json")
VALUES: tuple[Any, ...] = (
    *("Bern", "", 'a "b"\nc', "<b> & </x>", "ü ≤", "1.10", " x "),
    *(3, -2, 1.5, True, None, [1, {"a": None}], {"k": "v w"}),
)
THOUGHTS = ("", "need weather", "a\n\nb", "if <x> then", "call weather?")
TEXTS = ("", "It rains.", "Two\nlines", '{"a": 1}', "5 < 6 & 7 > 6")
BEGIN, END = "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"


def parameter(name: str, text: str, *, is_string: bool = True) -> str:
    """A parameter of a call."""
    kind = str(is_string).lower()
    return f'<｜DSML｜parameter name="{name}" string="{kind}">{text}</｜DSML｜parameter>\n'


def call(name: str, parameters: str = "") -> str:
    """A call."""
    return f'<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>\n'


def block(*calls: str) -> str:
    """A block of calls, as it stands behind a text."""
    return f"\n\n{BEGIN}\n{''.join(calls)}{END}"


def drawn_call(draw: random.Random) -> str:
    """A call with up to three parameters of all types."""
    name = draw.choice(("weather", "tide", "find_all"))
    values = {f"k{place}": draw.choice(VALUES) for place in range(draw.choice((0, 1, 2, 3)))}
    return call(
        name,
        "".join(
            parameter(key, value if isinstance(value, str) else json.dumps(value), is_string=isinstance(value, str))
            for key, value in values.items()
        ),
    )


def drawn_answer(number: int) -> str:
    """Thinking, whose beginning is in the prompt, a text, and up to three calls."""
    draw = random.Random(number)
    thought, text = draw.choice(THOUGHTS), draw.choice(TEXTS)
    calls = [drawn_call(draw) for _ in range(draw.choice((0, 0, 1, 1, 2, 3)))]
    return f"{thought}</think>{text}{block(*calls) if calls else ''}"


A = "x</think>a"
HOSTILE = {
    "numbers as they are written": A + block(call("f", parameter("a", '{"a": 1.10, "b": 1e5}', is_string=False))),
    "V3.2's block": (A + block(call("f", parameter("a", "b")))).replace("tool_calls", "function_calls"),
    "text behind the calls": A + block(call("f")) + " and more text",
    "calls inside the thinking": "think" + block(call("f", parameter("a", "b"))),
    "thinking without an end": "never ends its thinking",
    "the end of thinking inside a call": A + block(call("f", parameter("a", "</think>"))),
    "no line breaks": f"x</think>{BEGIN}{call('f', parameter('a', '1', is_string=False))}{END}".replace("\n", ""),
    "only the end of thinking": "</think>",
    "nothing": "",
    "no JSON": A + block(call("f", parameter("a", "{bad", is_string=False))),
    "an object in place of parameters": A + block(call("f", '{"a": 1}\n')),
    "cut off": A + block(call("f", parameter("a", "cut of"))).partition(" of<")[0],
    "a mark in the thinking": f"the mark is {BEGIN} in prose</think>answer",
    "a second end of thinking": "x</think>one</think>two",
    "a parameter twice": A + block(call("f", parameter("a", "1") + parameter("a", "2"))),
    "an empty block": A + block(),
    "a mark in prose": f"x</think>quoted {BEGIN} here",
    "a second block": A + block(call("f", parameter("a", "b"))) + block(call("g")),
    "empty lines before the text": "x</think>\n\nanswer\n",
    "a call outside a block": A + call("f"),
}


def answers() -> dict[str, str]:
    """Return all answers by what they are."""
    return {f"drawn {number}": drawn_answer(number) for number in range(NUM_DRAWN)} | HOSTILE


def digest(reasoning: str, content: str, calls: list[tuple[str, str]]) -> str:
    """Return the digest of an answer's parts; `calls` are names and arguments as JSON."""
    parts = [reasoning, content, [[name, json.loads(arguments)] for name, arguments in calls]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
