"""Matching of calls with the tools that a row offers: by name, with values of the declared types."""

from __future__ import annotations

import re
from typing import Any

from batchinfer.data.call_ids import WITH_NAME
from batchinfer.finish.answers import Answer
from batchinfer.finish.call_forms import TYPE_OF_TOOL, WrittenCall
from batchinfer.finish.json_text import BLANKS, is_object, json_value, members, object_of
from batchinfer.finish.parameters import Parameters

Call = dict[str, str]  # name, and arguments as JSON text of an object

_WRAPPERS = ("arguments", "input")  # names under which models nest all arguments once more
_NOTHING = Parameters(None)


class OfferedTools:
    """The tools of a row, by name. If no tools are known, all names in calls are accepted.

    Args:
        tools: {"type": "function", "function": {"name": …, "parameters": …}}, or the inner object alone. Tools of
            another form have no name and cannot be called.
    """

    def __init__(self, tools: list[dict[str, Any]] | None = None) -> None:
        self._parameters: dict[str, Parameters] = {}
        for tool in tools or []:
            function = tool.get("function")
            function = function if isinstance(function, dict) else tool
            if isinstance(name := function.get("name"), str):
                self._parameters.setdefault(name, Parameters(function.get("parameters")))

    def calls(self, answer: Answer) -> list[Call] | None:
        """Return the calls in an answer as calls of these tools.

        Returns:
            None if a call could not be read, no tool fits its name, several do, or an argument is not of its type.
        """
        if answer.calls is None:
            return None
        id_names_tool = answer.form is not None and answer.form.ids is WITH_NAME
        found = [self._offered(written, id_names_tool) for written in answer.calls]
        return None if None in found else [call for call in found if call is not None]

    def _offered(self, written: WrittenCall, id_names_tool: bool) -> Call | None:
        if not self._parameters:
            # a call of V3 without the function's name
            return None if written.name == TYPE_OF_TOOL else _call(written.name, written.arguments, _NOTHING)
        name, arguments = self._name_of(written, id_names_tool), written.arguments
        if name is None and id_names_tool and isinstance(arguments, str):
            name, arguments = self._named_inside(arguments)
        if name is None:
            return None
        call = _call(name, arguments, self._parameters[name])
        return call and {**call, "arguments": _unwrapped(call["arguments"], self._parameters[name])}

    def _name_of(self, written: WrittenCall, id_names_tool: bool) -> str | None:
        if written.name in self._parameters:
            return written.name
        if not id_names_tool or written.id is None:
            return None
        fitting = [name for name in self._parameters if _is_id_of(written.id, name)]
        return fitting[0] if len(fitting) == 1 else None

    def _named_inside(self, arguments: str) -> tuple[str | None, str]:
        """Return the tool named by an argument `name` (None if there is none), and the other arguments."""
        inside = json_value(arguments)
        name = inside.get("name") if isinstance(inside, dict) else None
        if not isinstance(name, str) or name not in self._parameters or self._parameters[name].declares("name"):
            return None, arguments
        return name, object_of({key: value for key, value in members(arguments).items() if key != "name"})


def _call(name: str, arguments: str | dict[str, str], parameters: Parameters) -> Call | None:
    if isinstance(arguments, str):
        return {"name": name, "arguments": arguments}
    values: dict[str, str] = {}
    for key, text in arguments.items():
        value = parameters.json_of(key, text)
        if value is None:
            return None
        values[key] = value
    return {"name": name, "arguments": object_of(values)}


def _is_id_of(own_id: str, name: str) -> bool:
    """Return whether an id is `functions.NAME:0`, or a variant of it by clients that allow fewer characters."""
    return re.fullmatch(rf"(functions[._:-]?)?{re.escape(name)}([._:-]?\d+)?", own_id) is not None


def _unwrapped(arguments: str, parameters: Parameters) -> str:
    """Return the arguments without an object around them that the tool does not declare."""
    found = json_value(arguments)
    if not isinstance(found, dict) or len(found) != 1:
        return arguments
    ((wrapper, inside),) = found.items()
    if wrapper not in _WRAPPERS or parameters.declares(wrapper):
        return arguments
    if isinstance(inside, dict):
        return members(arguments)[wrapper]
    return inside.strip(BLANKS) if isinstance(inside, str) and is_object(inside) else arguments
