"""300 conversations of all kinds that DeepSeek V4's encoding knows, the same in every run.

v4_prompts.json has the first 16 hex digits of the SHA-256 of each one's prompt as deepseek-recipe 0.2.0 renders it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

NUM_CONVERSATIONS = 300
DIGESTS = Path(__file__).with_name("v4_prompts.json")
TEXTS = ("Hi", "How far?\n\nReally?", "", "x" * 40, "Zwölf ≤ 12\t", '<b> & {"a": 1}', " spaces ", "</think>", "Two\n")
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"place": "Bern"},
    {"a": [1, {"b": None}], "c": True, "d": 1.5, "e": "ü"},
    {"text": 'quoted "words"\nand lines', "n": -3},
)
EFFORTS = ("low", "high", "xhigh", "max")


def tool(name: str, draw: random.Random) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    parameters = {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}}
    described = {"name": name, "description": draw.choice(TEXTS), "parameters": parameters | {"required": ["place"]}}
    return {"type": "function", "function": described}


def conversation(number: int) -> dict[str, Any]:
    """Messages and tools in OpenAI's form, `thinking` and `reasoning_effort`."""
    draw = random.Random(number)
    names = ["weather", "tide"][: draw.choice([0, 0, 1, 2])]
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.6:
        messages.append({"role": "system", "content": draw.choice(TEXTS)})
    for _ in range(draw.randint(1, 4)):
        messages += [{"role": "user", "content": draw.choice(TEXTS)} for _ in range(draw.choice([1, 1, 2]))]
        answer: dict[str, Any] = {"role": "assistant", "content": draw.choice(TEXTS)}
        if draw.random() < 0.6:
            answer["reasoning_content"] = draw.choice(TEXTS)
        calls: list[dict[str, Any]] = [
            {"id": f"c{place}", "type": "function", "function": {"name": draw.choice(names), "arguments": ""}}
            for place in range(draw.choice([0, 1, 3]) if names else 0)
        ]
        for call in calls:
            call["function"]["arguments"] = json.dumps(draw.choice(ARGUMENTS), ensure_ascii=False)
        messages.append(answer | ({"tool_calls": calls} if calls else {}))
        messages += [{"role": "tool", "content": draw.choice(TEXTS), "tool_call_id": call["id"]} for call in calls]
    if messages[-1]["role"] == "assistant" or draw.random() < 0.5:
        messages.append({"role": "user", "content": draw.choice(TEXTS)})
    return {
        "messages": messages,
        "tools": [tool(name, draw) for name in names],
        "thinking": draw.random() < 0.6,
        "reasoning_effort": draw.choice(EFFORTS),
    }
