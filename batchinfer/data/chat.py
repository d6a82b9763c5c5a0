"""Jinja templates: the model's chat template (messages to text), and the job's texts that have a row's columns in them.

A chat template is code of the model's author, so all run in a sandbox. The text equals that of transformers'
`apply_chat_template`, with two differences. Functions of the clock or of chance are missing, because the same row must
always give the same prompt (a date may be given as a variable). And the text's size is limited.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, meta, nodes, pass_eval_context
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_join, make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchinfer.data.call_ids import NINE_CHARACTERS, WITH_NAME, IdForm, with_ids
from batchinfer.records import ModelError
from batchinfer.sanitize import error_text

MAX_CHARS = 1 << 26  # of one rendered chat; only a template gone wild writes more
_TRIAL_ARGUMENTS = {"city": "Rome on the Tiber"}  # of the call that shows which form a template takes
_TRIAL_NAME, _TRIAL_ID = "weather", "call_0123456789abcdef"
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' mark of the place at which the final message goes on
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # of a message, in transformers' order
# transformers and vLLM write the day on which they run
NO_DATE = (
    "the chat template asks for today's date (strftime_now), on which a prompt must not depend; give it one: "
    'input.chat_template_kwargs = { strftime_now = "2026-01-31" }'
)


class ChatError(ValueError):
    """One chat cannot be rendered; the message is the row's error."""


class _NullError(ChatError):
    """A row's text would have a null written into it."""


class _Null(str):
    """Null as the content of a message that calls tools: equal to none in a template, and written as nothing."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is None or other is self

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(None)


_NULL = _Null()


class ChatTemplate:
    """A compiled template with the special tokens that it may name.

    Attributes:
        names: the variables that the template reads.

    Raises:
        ModelError: the template is not valid Jinja.
    """

    def __init__(self, text: str, special_tokens: dict[str, str]) -> None:
        self._names_calls = "tool_calls" in text
        self._variables = {**special_tokens, "tools": None, "documents": None, "add_generation_prompt": True}
        environment = _environment(trim_blocks=True, lstrip_blocks=True)
        environment.tests["none"] = lambda value: value is None or value is _NULL
        environment.tests["string"] = lambda value: isinstance(value, str) and value is not _NULL
        try:
            self._template = environment.from_string(text)
            self.names = frozenset(meta.find_undeclared_variables(environment.parse(text)))
        except (TemplateError, RecursionError) as error:
            raise ModelError(f"the chat template is not valid: {_one_line(error)}; correct the template") from None

    def with_arguments(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with the arguments of their tool calls in the form that the template takes.

        OpenAI's API writes arguments as JSON text, which DeepSeek's templates need; GLM's and others need an object.
        Arguments stay unchanged if the template takes both forms, or if a text is not a JSON object.
        """
        if not any(message.get("tool_calls") for message in messages):
            return messages
        if self._argument_types == {str}:
            return _with_arguments(messages, _as_text)
        return _with_arguments(messages, _as_object) if self._argument_types == {dict} else messages

    def with_ids(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with ids of tool calls in the form that the template takes (data/call_ids.py)."""
        if self._id_form is None or not any(message.get("tool_calls") for message in messages):
            return messages
        return with_ids(messages, self._id_form)

    @cached_property
    def writes_calls(self) -> bool:
        """Whether the template writes tool calls of earlier messages, as far as its text or a trial chat shows."""
        if self._names_calls:
            return True
        call = {"type": "function", "function": {"name": _TRIAL_NAME, "arguments": _to_json(_TRIAL_ARGUMENTS)}}
        chat: list[dict[str, Any]] = [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "user", "content": "Hello"},
        ]
        try:
            return _TRIAL_NAME in self.render(chat)
        except ChatError:
            return True  # such chats become error rows

    @cached_property
    def _id_form(self) -> IdForm | None:
        """The form of call ids that the template takes; None if the template takes any id, or no call at all."""
        arguments = _to_json(_TRIAL_ARGUMENTS) if str in self._argument_types else _TRIAL_ARGUMENTS
        written = self._tried(arguments, _TRIAL_ID)
        if not written:
            return NINE_CHARACTERS if self._argument_types else None
        return WITH_NAME if _TRIAL_ID in written and _TRIAL_NAME not in written else None

    @cached_property
    def _argument_types(self) -> set[type]:
        """The forms of a call's arguments that the template takes: str for JSON text, dict for an object."""
        text = _to_json(_TRIAL_ARGUMENTS)
        taken = {str: text, dict: _TRIAL_ARGUMENTS}
        written = {kind: self._tried(arguments) for kind, arguments in taken.items()}
        # a template may write a text as JSON once more, or nothing of it
        is_text = _TRIAL_ARGUMENTS["city"] in written[str] and _to_json(text) not in written[str]
        return {kind for kind in taken if written[kind] and (kind is dict or is_text)}

    def _tried(self, arguments: Any, call_id: str = "abcdefgh1") -> str:
        """Return the text of a trial chat with a call of these arguments, "" if the template fails on the chat."""
        function = {"name": _TRIAL_NAME, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        for content in (None, ""):  # a template may take one of them only
            chat: list[dict[str, Any]] = [
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": content, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call_id, "name": "station", "content": "Rain"},
            ]
            try:
                return self.render(chat)
            except ChatError:
                continue
        return ""

    def render(
        self, messages: list[dict[str, Any]], variables: dict[str, Any] | None = None, *, continues: bool = False
    ) -> str:
        """Return the prompt text of a chat, up to the place where the assistant answers.

        Keys with null are left out, except for the content of a message that calls tools: templates ask whether that
        content is null, and the text gets nothing for it. Reasoning is given under the names that transformers gives.

        Args:
            variables: more variables for the template, such as `tools`.
            continues: end the text with the final message's content, which the model is to continue.

        The sandbox bounds `range`, and MAX_CHARS bounds the text. A loop that writes nothing can still take very long:
        the worker that renders has a time limit (data/tokenizer_worker.py).

        Raises:
            ChatError: the template refuses the chat, or fails on it.
        """
        chat = [_as_templates_read(message) for message in messages]
        values = {**self._variables, **(variables or {}), "messages": chat}
        if not continues:
            return _written(self._template, values, "the chat template", _failure)
        final = chat[-1].get("content")
        if final is None or final is _NULL:
            raise ChatError("the final message has no content to continue (input.continue_final_message)")
        chat[-1]["content"] = final + _CONTINUE
        text = _written(self._template, {**values, "add_generation_prompt": False}, "the chat template", _failure)
        # the template may have cut white space around the content, and with it the mark's own blank
        before, mark, after = text.rpartition(_CONTINUE.strip())
        if not mark or final.strip() not in text:
            raise ChatError("the chat template leaves out the final message, which is to be continued")
        return before if after.startswith(" ") else before.rstrip()


_JINJA = re.compile(r"\{[{%]")
# filters that make a text of any value: "None" of null
_TEXT_FILTERS = (
    "capitalize", "center", "e", "escape", "forceescape", "format", "indent", "lower", "pprint", "replace", "safe",
    "string", "striptags", "title", "trim", "truncate", "upper", "urlencode", "urlize", "wordcount", "wordwrap",
)  # fmt: skip
_FILLING_FILTERS = ("format", "replace")  # write their arguments, too
_WRITTEN = "not null"  # an own filter, by a name that no template can have


class RowTemplate:
    """A text of the job that is written from a row's columns.

    Args:
        key: that the text is of, input.template or input.system.

    Attributes:
        columns: the columns that the template names, sorted.

    Raises:
        ModelError: the template is not valid Jinja; input.template names no column.
    """

    def __init__(self, text: str, key: str) -> None:
        self._key, is_system = key, key == "input.system"
        environment = _environment(undefined=StrictUndefined, finalize=_not_null, keep_trailing_newline=is_system)
        environment.filters |= {
            name: _refusing_null(environment.filters[name], fills=name in _FILLING_FILTERS) for name in _TEXT_FILTERS
        }
        environment.filters |= {"join": _join, _WRITTEN: _not_null}
        environment.intercepted_binops = frozenset("%")
        environment.binop_table["%"] = _remainder
        try:
            tree = environment.parse(text)
            self.columns = sorted(meta.find_undeclared_variables(tree) - set(environment.globals))
            for joined in tree.find_all(nodes.Concat):  # a ~ b
                joined.nodes = [nodes.Filter(part, "string", [], [], None, None) for part in joined.nodes]
                joined.set_environment(environment)
            for call in tree.find_all(nodes.Call):  # "{}".format(a)
                if isinstance(call.node, nodes.Getattr) and call.node.attr == "format":
                    call.args = [nodes.Filter(value, _WRITTEN, [], [], None, None) for value in call.args]
                    for option in call.kwargs:
                        option.value = nodes.Filter(option.value, _WRITTEN, [], [], None, None)
                    call.set_environment(environment)
            self._template = environment.from_string(tree)
        except (TemplateError, ChatError, RecursionError) as error:
            raise ModelError(f"{key} is not valid Jinja: {_one_line(error)}; correct it") from None
        if not self.columns and not is_system:
            raise ModelError(f"{key} names no column of the rows; write one as {{{{ column }}}}")

    @classmethod
    def of_system(cls, text: str) -> "RowTemplate | None":
        """Return the template of input.system; None for a text without `{{` and `{%`."""
        return cls(text, "input.system") if _JINJA.search(text) else None

    def render(self, row: dict[str, Any]) -> str:
        """Return the text of a row.

        Raises:
            ChatError: the template fails on the row, or writes a value that is null.
        """
        nulls = [name for name in self.columns if row.get(name) is None]
        where = f" ({', '.join(nulls)} {'is' if len(nulls) == 1 else 'are'} null)" if nulls else ""
        try:
            return _written(
                self._template, row, self._key, lambda error: f"{self._key} fails on the row: {_one_line(error)}{where}"
            )
        except _NullError:
            default = f"{{{{ {nulls[0] if nulls else 'column'} or '' }}}}"
            raise ChatError(f"{self._key} writes a value that is null{where}; give it a default: {default}") from None


def _as_templates_read(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without nulls (_NULL for the content of calls) and with reasoning under two names."""
    calls = message.get("tool_calls")
    found = {
        key: _NULL if value is None else value
        for key, value in message.items()
        if value is not None or (key == "content" and calls)
    }
    reasoning = next((found[key] for key in _REASONING_KEYS if key in found), None)
    return found if reasoning is None else {"thinking": reasoning, **found, "reasoning_content": reasoning}


def _with_arguments(messages: list[dict[str, Any]], change: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Return the messages with `change` applied to the arguments of each tool call; malformed calls stay unchanged."""

    def changed(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            return call
        return {**call, "function": {**function, "arguments": change(function["arguments"])}}

    return [
        {**message, "tool_calls": [changed(call) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _as_text(arguments: Any) -> Any:
    """Return an object as JSON text; other arguments, and an object nested too deeply for JSON, stay unchanged."""
    try:
        return _to_json(arguments) if isinstance(arguments, dict) else arguments
    except RecursionError:
        return arguments


def _as_object(arguments: Any) -> Any:
    """Return the object in a JSON text, {} for an empty text; arguments of any other kind stay unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _written(template: Template, variables: dict[str, Any], what: str, failure: Callable[[Exception], str]) -> str:
    pieces: list[str] = []
    num_chars = 0
    try:
        for piece in template.generate(variables):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_CHARS:
                raise ChatError(f"{what} writes more than {MAX_CHARS} characters")
    except (ChatError, MemoryError):
        raise  # how much memory there is says nothing about one row
    except Exception as error:
        # an error in the template's code concerns this row only
        raise ChatError(failure(error)) from None
    return "".join(pieces)


def _not_null(value: Any) -> Any:
    if value is None:
        raise _NullError
    return value


def _refusing_null(text_filter: Callable[..., Any], *, fills: bool) -> Callable[..., Any]:
    """Return a filter of Jinja that does not write null; one that `fills` writes its arguments, too."""
    place = int(hasattr(text_filter, "jinja_pass_arg"))  # the environment comes first

    @functools.wraps(text_filter)
    def checked(*arguments: Any, **options: Any) -> Any:
        for value in [*arguments[place:], *options.values()] if fills else arguments[place : place + 1]:
            _not_null(value)
        return text_filter(*arguments, **options)

    return checked


def _remainder(left: Any, right: Any) -> Any:
    """Return left % right, or a text with values in it, none of which is null."""
    if isinstance(left, str) and isinstance(right, dict):
        return left % {key: value for key, value in right.items() if value is not None}  # others may be left out
    if isinstance(left, str):
        for value in right if isinstance(right, tuple) else (right,):
            _not_null(value)
    return left % right


@pass_eval_context
def _join(context: nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's filter `join`, which writes no null."""
    items = value if attribute is None else map(make_attrgetter(context.environment, attribute), value)
    return str(do_join(context, list(map(_not_null, items)), d))


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's text for training; here only a block."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's interface)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _environment(**options: Any) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(extensions=[_Generation, loopcontrols], **options)
    environment.filters["tojson"] = _to_json
    environment.filters["fromjson"] = json.loads
    environment.globals["raise_exception"] = _raise_exception
    # chance would give the same row another prompt each time; strftime_now is missing for the same reason (NO_DATE)
    del environment.filters["random"], environment.globals["lipsum"]
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which prompts must not
    return json.dumps(
        _with_null(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _with_null(value: Any) -> Any:
    """Return a content, message or chat with None for _NULL; other values stay unchanged."""
    if isinstance(value, list):
        return [_with_null(message) if isinstance(message, dict) else message for message in value]
    if isinstance(value, dict):
        return {**value, "content": None} if value.get("content") is _NULL else value
    return None if value is _NULL else value


def _raise_exception(message: str) -> None:
    raise ChatError(f"the chat template refuses the messages: {message}")


def _failure(error: Exception) -> str:
    if "'strftime_now' is undefined" in str(error):
        return NO_DATE
    return f"the chat template fails on the messages: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    return " ".join(error_text(error).split()) or type(error).__name__
