"""Answers to requests for /v1/responses, in the form of OpenAI's Responses API.

message.reasoning_content ──► {"type": "reasoning", "content": [{"type": "reasoning_text", …}]}
message.content, logprobs ──► {"type": "message", "content": [{"type": "output_text", …}]}
message.tool_calls        ──► {"type": "function_call", …}, one for each call
"""

from typing import Any

import msgspec
import pyarrow as pa

Json = dict[str, Any]


class _Request(msgspec.Struct):
    """A request of data/formats/openai_responses.py, read for the keys that its response repeats."""

    response: msgspec.Raw = msgspec.Raw(b"")


def repeated_keys(requests: pa.ChunkedArray) -> pa.Array:
    """Return the JSON of the keys that each request's response repeats; null for chats and completions."""
    decoded = (None if text is None else msgspec.json.decode(text, type=_Request) for text in requests.to_pylist())
    texts = ("" if request is None else bytes(request.response).decode() for request in decoded)
    return pa.array([text or None for text in texts], pa.string())


def response_object(key: str, choice: Json, usage: Json, repeated: Json, model: str) -> Json:
    """Return the response object of an answer.

    Args:
        key: makes the ids of the response and its items unique among all lines.
        choice: the answer as a choice of a chat completion.
        usage: token counts of a chat completion.
        repeated: keys of the request with their values, from `repeated_keys`.
        model: the model's name in the request.
    """
    is_cut = choice["finish_reason"] == "length"
    status = "incomplete" if is_cut else "completed"
    return {
        "id": f"resp_{key}",
        "object": "response",
        "created_at": 0,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": repeated.get("instructions"),
        "metadata": repeated.get("metadata", {}),
        "model": model,
        "output": _items(key, choice, status),
        "parallel_tool_calls": True,
        "tool_choice": repeated.get("tool_choice", "auto"),
        "tools": repeated["tools"],
        "usage": _usage(usage),
    }


def _items(key: str, choice: Json, status: str) -> list[Json]:
    message, logprobs = choice["message"], choice["logprobs"]
    items: list[Json] = []
    if "reasoning_content" in message:
        thoughts = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        items.append({"id": f"rs_{key}", "type": "reasoning", "summary": [], "content": thoughts})
    if message["content"] is not None or logprobs is not None:
        text = {
            "type": "output_text",
            "text": message["content"] or "",
            "annotations": [],
            "logprobs": [] if logprobs is None else [_with_bytes(token) for token in logprobs["content"]],
        }
        items.append({"id": f"msg_{key}", "type": "message", "role": "assistant", "status": status, "content": [text]})
    for place, call in enumerate(message.get("tool_calls", [])):
        items.append(
            {
                "id": f"fc_{key}_{place}",
                "type": "function_call",
                "call_id": call["id"],
                **call["function"],
                "status": "completed",
            }
        )
    return items


def _with_bytes(token: Json) -> Json:
    """Return a token's log-probability with the list of bytes that this API requires, [] if they are not known."""
    found = {**token, "bytes": token["bytes"] or []}
    if "top_logprobs" in token:
        found["top_logprobs"] = [_with_bytes(other) for other in token["top_logprobs"]]
    return found


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
