"""Bodies of OpenAI's Responses API (text and functions only): turned into a chat and keys of [sampling].

instructions                     ──► a system message in front
input  text                      ──► a user's message
       message                   ──► a message
       reasoning, function_call  ──► parts of an assistant's message
       function_call_output      ──► a tool's message
tools  {type, name, …}           ──► {type, function: {name, …}}, as chat templates take them
"""

from typing import Any

from batchinfer.data.effort import EFFORT_VARIABLES, EFFORTS
from batchinfer.data.formats.openai_chats import (
    MOST_INT,
    MOST_LOGPROBS,
    may_call,
    same_keys,
    set_structured,
    structured,
    tools_of,
)
from batchinfer.data.formats.openai_keys import check_object, check_only, integer_of, shown, text_of
from batchinfer.data.formats.values import WrongValueError, in_words

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text")
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")
_LOGPROBS = "message.output_text.logprobs"
_REASONING_KEYS = {"effort": None, "summary": "auto"}
_TEXT_KEYS = {"format": None, "verbosity": "medium"}


def request(body: dict[str, Any], url: str) -> dict[str, Any]:
    """Return the chat in the form that row_prompts.py reads; `response` has the keys that the answer repeats.

    Raises:
        WrongValueError: names the key that is missing or wrong.
    """
    found: dict[str, Any] = {"messages": _messages(body)}
    if "chat_template_kwargs" in body:
        found["chat_template_kwargs"] = body["chat_template_kwargs"]
    if (effort := _effort(body)) is not None:
        found["effort"] = effort
    tools = [_function(tool, f"tools[{place}]") for place, tool in enumerate(tools_of(body))]
    if may_call(body):
        found["tools"] = [{"type": "function", "function": function} for function in tools]
    repeated: dict[str, Any] = {name: body[name] for name in ("instructions", "tool_choice") if name in body}
    if "metadata" in body:
        repeated["metadata"] = _metadata(body["metadata"])
    return {**found, "response": {**repeated, "tools": [{"type": "function", **function} for function in tools]}}


def sampling(body: dict[str, Any], url: str) -> dict[str, Any]:
    """Return the keys of [sampling] that a body sets; `n` is always 1.

    Raises:
        WrongValueError: names the key that is wrong.
    """
    found = {**same_keys(body), "n": 1}
    if "max_output_tokens" in body:
        found["max_tokens"] = integer_of(body, "max_output_tokens", MOST_INT, least=1)
    include = body.get("include", [])
    for item in include if isinstance(include, list) else [include]:
        check_only(item, _LOGPROBS, "include[]")
    num_top = integer_of(body, "top_logprobs", MOST_LOGPROBS) if "top_logprobs" in body else 0
    if num_top and not include:
        raise WrongValueError(f'body.top_logprobs is set, but body.include has no "{_LOGPROBS}"')
    if "include" in body:
        found["logprobs"] = num_top if include else None
    form = check_object(body.get("text", {}), "text", _TEXT_KEYS).get("format")
    set_structured(found, {} if form is None else {"text.format": structured(form, "text.format", "schema", form)})
    return found


def _effort(body: dict[str, Any]) -> str | None:
    effort = check_object(body.get("reasoning", {}), "reasoning", _REASONING_KEYS).get("effort")
    if effort is None:
        return None
    if effort not in EFFORTS:
        raise WrongValueError(f"body.reasoning.effort is {shown(effort)}, not one of {', '.join(EFFORTS)}")
    variables = body.get("chat_template_kwargs", {})
    for name in EFFORT_VARIABLES:
        if isinstance(variables, dict) and name in variables:
            raise WrongValueError(
                f"body.reasoning.effort and body.chat_template_kwargs.{name} are both set; leave one out"
            )
    return str(effort)


def _metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise WrongValueError(f"body.metadata is {shown(metadata)}, not an object of texts")
    return metadata


def _function(tool: Any, name: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise WrongValueError(
            f"body.{name} is of the type {shown(kind)}, which cannot be called here; write functions of your own, "
            'of the type "function"'
        )
    found = {key: tool[key] for key in _FUNCTION_KEYS if tool.get(key) is not None}
    text_of(found, "name", f"body.{name}.")
    for key, kind in (("description", str), ("parameters", dict), ("strict", bool)):
        if key in found and not isinstance(found[key], kind):
            wanted = {str: "text", dict: "an object", bool: "true or false"}[kind]
            raise WrongValueError(f"body.{name}.{key} is {in_words(found[key])}, not {wanted}")
    return found


# ---- messages


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    items = body.get("input")
    if items is None:
        raise WrongValueError("body.input is missing")
    if not isinstance(items, str | list):
        raise WrongValueError(f"body.input is {in_words(items)}, not text or a list of items")
    if not items:
        raise WrongValueError(f"body.input is {'empty' if isinstance(items, str) else 'an empty list'}")
    chat = _Chat(body.get("instructions"))
    for place, item in enumerate([{"role": "user", "content": items}] if isinstance(items, str) else items):
        chat.add(item, f"body.input[{place}]")
    return chat.messages()


class _Chat:
    """Builder of a chat from items of `input`; the items of one answer become one message of the assistant."""

    def __init__(self, instructions: Any) -> None:
        if not isinstance(instructions, str | None):
            raise WrongValueError(f"body.instructions is {in_words(instructions)}, not text")
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
        self._answer: dict[str, Any] = {}  # message of the assistant that is not complete yet

    def messages(self) -> list[dict[str, Any]]:
        self._end_answer()
        return self._messages

    def add(self, item: Any, where: str) -> None:
        """Add an item of `input`.

        Raises:
            WrongValueError: names the item and what is wrong.
        """
        if not isinstance(item, dict):
            raise WrongValueError(f"{where} is {in_words(item)}, not an item with a type, or with role and content")
        kind = item.get("type") or ("message" if "role" in item else None)
        add = {
            "message": self._add_message,
            "reasoning": self._add_reasoning,
            "function_call": self._add_call,
            "function_call_output": self._add_result,
        }.get(kind if isinstance(kind, str) else "")
        if add is None:
            raise WrongValueError(
                f"{where} is of the type {shown(kind)}, which is not supported; write it as a message, or leave it out"
            )
        add(item, where)

    def _add_message(self, item: dict[str, Any], where: str) -> None:
        role = text_of(item, "role", f"{where}.")
        if role not in _ROLES:
            raise WrongValueError(f"{where} has the role {shown(role)}, not one of {', '.join(_ROLES)}")
        content = _text(item.get("content"), f"{where}.content")
        if role == "assistant":
            if "content" in self._answer or "tool_calls" in self._answer:
                self._end_answer()
            self._answer["content"] = content
            return
        self._end_answer()
        self._messages.append({"role": "system" if role == "developer" else role, "content": content})

    def _add_reasoning(self, item: dict[str, Any], where: str) -> None:
        parts = item.get("content")
        if not isinstance(parts, list) or not parts:
            raise WrongValueError(f"{where} holds reasoning without a content that can be read here; leave it out")
        if self._answer:
            self._end_answer()
        self._answer["reasoning_content"] = _text(parts, f"{where}.content", ("reasoning_text",))

    def _add_call(self, item: dict[str, Any], where: str) -> None:
        name, call_id = text_of(item, "name", f"{where}."), text_of(item, "call_id", f"{where}.")
        arguments = item.get("arguments")
        if not isinstance(arguments, str):
            raise WrongValueError(f"{where}.arguments is {in_words(arguments)}, not text")
        function = {"name": name, "arguments": arguments}
        self._answer.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def _add_result(self, item: dict[str, Any], where: str) -> None:
        call_id = text_of(item, "call_id", f"{where}.")
        content = _text(item.get("output"), f"{where}.output")
        self._end_answer()
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _end_answer(self) -> None:
        if self._answer:
            # templates ask whether the content of a message with tool calls alone is null
            content = None if "tool_calls" in self._answer else ""
            self._messages.append({"role": "assistant", "content": content, **self._answer})
        self._answer = {}


def _text(content: Any, where: str, kinds: tuple[str, ...] = _TEXT_PARTS) -> str:
    """Return a content's text; parts are joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise WrongValueError(f"{where} is {in_words(content)}, not text or a list of parts")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise WrongValueError(
                f"{where}[{place}] is of the type {shown(kind)}, but only {' and '.join(kinds)} are read"
            )
        if not isinstance(part.get("text"), str):
            raise WrongValueError(f"{where}[{place}].text is {in_words(part.get('text'))}, not text")
        texts.append(part["text"])
    return "".join(texts)
