"""Ids of the tool calls in a chat's history, in the form that the model's chat template takes.

any      call_8Zk…               as the API gave them
Mistral  call00000               nine letters and digits; its templates refuse others
Kimi-K2  functions.weather:0     its template writes the id alone, so that it has to name the function
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class IdForm:
    """A form of tool call ids.

    takes: whether an id has this form, given the id and the function's name.
    make: an id of this form, given the function's name and the number of the call in the chat.
    """

    takes: Callable[[str, str], bool]
    make: Callable[[str, int], str]


def _has_nine_characters(found: str, name: str) -> bool:
    return re.fullmatch("[a-zA-Z0-9]{9}", found) is not None


def _names_function(found: str, name: str) -> bool:
    return re.fullmatch(rf"(functions\.)?{re.escape(name)}(:\d+)?", found) is not None


NINE_CHARACTERS = IdForm(_has_nine_characters, lambda name, number: f"call{number:05d}")
WITH_NAME = IdForm(_names_function, lambda name, number: f"functions.{name}:{number}")


def with_ids(messages: Messages, form: IdForm) -> Messages:
    """Return the messages with call ids of this form; all ids are made new if one has another form or occurs twice.

    If several calls had the same id, results get the new ids of the latest message with such calls, in their order.
    """
    all_calls = [(_id(call), name) for message in messages for call, name in _calls(message)]
    if len({own for own, _ in all_calls}) == len(all_calls) and all(form.takes(own, name) for own, name in all_calls):
        return messages
    new_ids: dict[str, list[str]] = {}  # by the old id; the last new id is for all further results
    changed = []
    number = 0
    for message in messages:
        calls = []
        of_message: dict[str, list[str]] = {}
        for call, name in _calls(message):
            made = form.make(name, number)
            of_message.setdefault(_id(call), []).append(made)
            calls.append({**call, "id": made})
            number += 1
        new_ids |= of_message
        new: dict[str, Any] = {}
        if calls:
            new = {"tool_calls": calls}
        elif message.get("role") == "tool" and (left := new_ids.get(_id(message, "tool_call_id"))):
            new = {"tool_call_id": left.pop(0) if len(left) > 1 else left[0]}
        changed.append({**message, **new})
    return changed


def _id(holder: dict[str, Any], key: str = "id") -> str:
    """Return the id under `key`, "" if there is none."""
    found = holder.get(key)
    return found if isinstance(found, str) else ""


def _calls(message: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return the tool calls of a message, each with the name of its function; [] if a call has no function name."""
    calls = message.get("tool_calls")
    found = []
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            return []
        found.append((call, name))
    return found
