"""Batch files as OpenAI's documentation has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MODEL = "gpt-3.5-turbo-0125"

# https://platform.openai.com/docs/guides/batch, "1. Prepare your batch file", to the letter
DOCUMENTED = """\
{"custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "gpt-3.5-turbo-0125", \
"messages": [{"role": "system", "content": "You are a helpful assistant."},\
{"role": "user", "content": "Hello world!"}],"max_tokens": 1000}}
{"custom_id": "request-2", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "gpt-3.5-turbo-0125", \
"messages": [{"role": "system", "content": "You are an unhelpful assistant."},\
{"role": "user", "content": "Hello world!"}],"max_tokens": 1000}}
"""
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

FLAT_WEATHER = {"type": "function", **WEATHER["function"]}  # as the Responses API has it


def chat(custom_id: Any, text: Any = "Hello", **body: Any) -> dict[str, Any]:
    """A line that asks for the answer to a user's message, with these keys in its body (None: without the key)."""
    return line(custom_id, CHAT, {"messages": [{"role": "user", "content": text}]} | body)


def completion(custom_id: Any, prompt: Any = "Hello", **body: Any) -> dict[str, Any]:
    return line(custom_id, COMPLETIONS, {"prompt": prompt} | body)


def response(custom_id: Any, given: Any = "Hello", **body: Any) -> dict[str, Any]:
    return line(custom_id, RESPONSES, {"input": given} | body)


def line(custom_id: Any, url: Any, body: dict[str, Any]) -> dict[str, Any]:
    body = {name: value for name, value in ({"model": MODEL} | body).items() if value is not None}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write_batch(path: Path, lines: list[Any]) -> Path:
    """Objects as JSON, text and bytes as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [item if isinstance(item, str | bytes) else json.dumps(item, ensure_ascii=False) for item in lines]
    path.write_bytes(b"\n".join(text if isinstance(text, bytes) else text.encode() for text in texts) + b"\n")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_bytes().splitlines()]
