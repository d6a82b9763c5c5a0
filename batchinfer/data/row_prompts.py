"""Prompts of rows: each row's columns become a text, token ids, or a chat with variables for the chat template.

prompt            text ─────────────────────────────► text
user              text ─────────────────────────────► the user's message of a chat
system            text, or columns ─► Jinja ─► text ► the system message of a chat that has none
template          columns ─► Jinja ─► text ─────────► text, or with `system`, even "", the user's message of a chat
messages          list, or JSON text, or ShareGPT's ► messages ─► chat with tools and chat_template_kwargs
format = openai   JSON of the request ──────────────► text, token ids, or chat with its own tools and kwargs
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pyarrow as pa

from batchinfer.data.chat import ChatError, RowTemplate
from batchinfer.data.columns import is_json, python_values
from batchinfer.data.row_values import DATE, RowError, json_value, tool_list, without_nulls
from batchinfer.records import ModelError

_OWN_NAMES = ("messages", "tools", "add_generation_prompt", "continue_final_message")
_SHAREGPT_ROLES = {"system": "system", "human": "user", "gpt": "assistant"}

_OPENAI_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages with variables for the chat template.

    effort: reasoning effort of a request, to be passed as variables of the template (data/effort.py).
    """

    messages: list[dict[str, Any]]
    variables: dict[str, Any] = field(default_factory=dict)
    effort: str | None = None


Prompt = str | Chat | list[int] | RowError


class RowPrompts:
    """Makes the prompts of a job's rows.

    Args:
        settings: the keys of [input] in the job file.

    Attributes:
        columns: the input columns that prompts are made of.
        makes_chats: whether all prompts are chats.
        may_make_chats: whether prompts may be chats.
        may_have_tools: whether the job has tools for its chats, or a column with them.
        may_lack_date: whether there may be chats for which neither job nor rows give a date.
        have_variables: whether rows may have variables for the chat template, in addition to those of the job.

    Raises:
        ModelError: `template` or `system` is not valid Jinja, or names no column; `system` names columns beside
            format = "openai"; `chat_template_kwargs` sets a variable that has a key of its own, or strftime_now to a
            value that is no date.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._template = RowTemplate(settings["template"], "input.template") if settings["template"] else None
        kinds = ("messages", "user", "prompt", "token_ids")
        self._column: str = next((settings[kind] for kind in kinds if settings[kind]), "")
        self._is_user = settings["user"] is not None
        self._system: str | None = settings["system"]
        self._row_system = RowTemplate.of_system(self._system or "")
        if self._row_system is not None and not self._row_system.columns:
            try:
                self._system, self._row_system = _rendered(self._row_system, {}), None
            except RowError as error:
                raise ModelError(f"{error}; correct it") from None
        if self._row_system is not None and settings["format"] == "openai":
            raise ModelError(
                "input.system has {{ … }} for columns of the rows, but lines of format = 'openai' have none; write the "
                "text itself, or a system message into each line"
            )
        self._tools, self._kwargs = settings["tools"], settings["chat_template_kwargs"]
        self.may_have_tools = self._tools is not None
        if isinstance(self._kwargs, dict):
            try:
                self._kwargs = template_variables("input.chat_template_kwargs", self._kwargs)
            except RowError as error:
                raise ModelError(str(error)) from None
        has_chats = settings["messages"] is not None or self._is_user
        self.may_make_chats = has_chats or (self._template is not None and self._system is not None)
        self.makes_chats = self.may_make_chats and settings["format"] != "openai"
        self.may_lack_date = self.may_make_chats and not _is_name(self._kwargs) and DATE not in (self._kwargs or {})
        self.have_variables = _is_name(self._kwargs) or settings["format"] == "openai"
        self.continues = bool(settings["continue_final_message"])
        own = self._template.columns if self._template else [self._column]
        own += self._row_system.columns if self._row_system else []
        self.columns = list(dict.fromkeys([*own, *(name for name in (self._tools, self._kwargs) if _is_name(name))]))
        self._is_one = self._template is None and len(self.columns) == 1
        self._as_json: list[str] = []  # columns of the rows at hand

    def of(self, column: pa.Array) -> list[Prompt]:
        """Return the prompt of each row, or the row's error.

        Args:
            column: the column in `columns`; a struct of the columns if there are several, or a template. A column of
                Arrow's JSON stands for the values in its texts.
        """
        parts = column.type if pa.types.is_struct(column.type) and not self._is_one else ()
        self._as_json = [part.name for part in parts if is_json(part.type)]
        is_text = self._template is None and not self.may_make_chats and self._settings["format"] != "openai"
        return [
            value if is_text and isinstance(value, str) and value else self._checked(value)
            for value in python_values(column)
        ]

    def _checked(self, value: Any) -> Prompt:
        try:
            if isinstance(value, UnicodeDecodeError):
                raise RowError(f"{' or '.join(self.columns)} is not valid UTF-8")
            row = {self.columns[0]: value} if self._is_one else value
            found = {name: json_value(name, row[name]) for name in self._as_json if row[name] is not None}
            return self._prompt({**row, **found} if found else row)
        except RowError as error:
            return error

    def chat(self, messages: list[dict[str, Any]], row: dict[str, Any] | None = None) -> Chat:
        """Return a chat of these messages with system text, tools and template variables of the job or the row.

        Args:
            row: values of `columns`; None: only the job's own.

        Raises:
            RowError: the row's tools or variables are malformed, or input.system fails on the row.
        """
        if self._system and all(message["role"] != "system" for message in messages):
            system = _rendered(self._row_system, row) if self._row_system and row else self._system
            messages = [{"role": "system", "content": system}, *messages] if system else messages
        tools, kwargs = self._tools, self._kwargs
        if _is_name(kwargs):
            kwargs = _keywords(kwargs, row[kwargs]) if row else None
        if _is_name(tools):
            tools = tool_list(tools, row[tools]) if row else None
        elif isinstance(tools, dict):
            tools = [tools]
        return Chat(messages, {**(kwargs or {}), **({} if tools is None else {"tools": tools})})

    def _prompt(self, row: dict[str, Any]) -> str | Chat | list[int]:
        if self._template is not None:
            text = _rendered(self._template, row)
            if not text:
                raise RowError("input.template writes an empty prompt")
            return self.chat([{"role": "user", "content": text}], row) if self.makes_chats else text
        value = row[self._column]
        if self._settings["format"] == "openai":
            return self._requested(json_value(self._column, value or "{}"))
        if not self.makes_chats or self._is_user:
            if not value:
                raise RowError(f"{self._column} is {'null' if value is None else 'empty'}")
            return self.chat([{"role": "user", "content": value}], row) if self._is_user else str(value)
        messages = json_value(self._column, value) if isinstance(value, str) else _of_structs(value)
        return self.chat(_messages(self._column, messages, self._settings["format"]), row)

    def _requested(self, request: dict[str, Any]) -> str | Chat | list[int]:
        """Return the prompt of a request (written by data/formats/openai_batch.py) with the request's variables."""
        if "prompt" in request:
            prompt: str | list[int] = request["prompt"]
            return prompt
        chat = self.chat(_messages("body.messages", request.get("messages"), "openai"))
        tools = tool_list("body.tools", request.get("tools"))
        kwargs = _keywords("body.chat_template_kwargs", request.get("chat_template_kwargs")) or {}
        variables = {**chat.variables, **kwargs, **({} if tools is None else {"tools": tools})}
        return Chat(chat.messages, variables, request.get("effort"))


def _rendered(template: RowTemplate, row: dict[str, Any]) -> str:
    try:
        return template.render(row)
    except ChatError as error:
        raise RowError(str(error)) from None


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _messages(column: str, messages: Any, form: str) -> list[dict[str, Any]]:
    if messages is None:
        raise RowError(f"{column} is null")
    if not isinstance(messages, list):
        raise RowError(f"{column} is not a list of messages")
    if not messages:
        raise RowError(f"{column} is an empty list")
    found = []
    for index, item in enumerate(messages):
        if item is None:
            raise RowError(f"{column} has a null in place of message {index}")
        if not isinstance(item, dict):
            raise RowError(f"{column}[{index}] is not an object with role and content")
        message = _from_sharegpt(f"{column}[{index}]", item) if form == "sharegpt" else item
        role, content = message.get("role"), message.get("content")
        if role is None:
            raise RowError(f"{column} has no role in message {index}")
        # an assistant that only called a tool said nothing
        if content is None and message.get("tool_calls") is None:
            raise RowError(f"{column} has no content in message {index}")
        if not isinstance(role, str):
            raise RowError(f"{column}[{index}] has a role that is not text")
        if form == "openai":
            message = _from_openai(f"{column}[{index}]", role, message)
        found.append({**message, "content": _text(f"{column}[{index}]", content)} if "content" in message else message)
    return found


def _from_sharegpt(place: str, turn: dict[str, Any]) -> dict[str, Any]:
    who = turn.get("from")
    if not isinstance(who, str) or who not in _SHAREGPT_ROLES:
        raise RowError(f"{place} is from {who!r}, not from {', '.join(_SHAREGPT_ROLES)}")
    return {"role": _SHAREGPT_ROLES[who], "content": turn.get("value")}


def _from_openai(place: str, role: str, message: dict[str, Any]) -> dict[str, Any]:
    if role not in _OPENAI_ROLES:
        raise RowError(f"{place} has the role {role!r}, not one of {', '.join(_OPENAI_ROLES)}")
    return {**message, "role": "system"} if role == "developer" else message


def _text(place: str, content: Any) -> str | None:
    """Return the text of a message's content; OpenAI's content parts are joined."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(f"{place} has content that is neither text nor a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise RowError(f"{place} has a content part without a type")
        if kind != "text":
            raise RowError(f"{place} holds {'an' if kind[:1] in 'aeiou' else 'a'} {kind}, which this model cannot read")
        if not isinstance(part.get("text"), str):
            raise RowError(f"{place} has a content part of type text without a text")
        texts.append(part["text"])
    return "".join(texts)


def _keywords(column: str, value: Any) -> dict[str, Any] | None:
    found = json_value(column, value) if isinstance(value, str) else without_nulls(value)
    if found is None:
        return None
    if not isinstance(found, dict):
        raise RowError(f"{column} is not an object of variables for the chat template")
    return template_variables(column, found)


def template_variables(what: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the variables for the chat template; a date at strftime_now becomes a function that formats the date."""
    for name in kwargs:
        if name in _OWN_NAMES:
            raise RowError(f"{what} sets {name}, which the job has other keys for; leave it out")
    date = kwargs.get(DATE)
    others = {name: value for name, value in kwargs.items() if name != DATE}
    if date is None:
        return others
    try:
        return {**others, DATE: datetime.fromisoformat(date).strftime}
    except (TypeError, ValueError):
        raise RowError(f'{what} sets {DATE} to {date!r}, which is no date such as "2026-01-31"') from None


def _of_structs(messages: Any) -> Any:
    """Return messages from a column of structs, without nulls inside of a message's fields.

    A message's own fields stay if null, because a template may ask whether they are.
    """
    if not isinstance(messages, list):
        return messages
    return [
        {key: without_nulls(value) for key, value in item.items()} if isinstance(item, dict) else item
        for item in messages
    ]
