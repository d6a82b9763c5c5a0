"""The model's chat template: messages in, one text out.

Templates are code of the model's author, so they run in a sandbox. The text is what transformers' `apply_chat_template`
gives, but what depends on the clock or on chance is missing (the same row must always give the same prompt), and its
size is limited.
"""

import json
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchinfer.records import ModelError

MAX_CHARS = 1 << 26  # of one rendered chat; only a template gone wild writes more


class ChatError(ValueError):
    """One chat cannot be rendered; the message is the row's error."""


class ChatTemplate:
    """A compiled template with the special tokens that it may name.

    Raises:
        ModelError: the template is not valid Jinja.
    """

    def __init__(self, text: str, special_tokens: dict[str, str]) -> None:
        self._variables = {**special_tokens, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            self._template = _environment().from_string(text)
        except (TemplateError, RecursionError) as error:
            raise ModelError(f"the chat template is not valid: {_one_line(error)}; correct the template") from None

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt text of a chat, up to where the assistant answers; keys without a value are left out.

        The sandbox bounds `range`, and the text is bounded by MAX_CHARS; what loops write nothing can still take very
        long, and time is bounded by who renders (data/tokenizer_worker.py).

        Raises:
            ChatError: the template refuses the chat, or fails on it.
        """
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(messages=chat, **self._variables):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_CHARS:
                    raise ChatError(f"the chat template writes more than {MAX_CHARS} characters")
        except (ChatError, MemoryError):
            raise  # how much memory there is says nothing about one row
        except Exception as error:
            # whatever the template's code does wrong concerns this row only
            raise ChatError(_failure(error)) from None
        return "".join(pieces)


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it is only a block."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's interface)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    # chance would give the same row another prompt each time; strftime_now is missing for the same reason
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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise ChatError(f"the chat template refuses the messages: {message}")


def _failure(error: Exception) -> str:
    if "'strftime_now' is undefined" in str(error):
        return "the chat template asks for today's date (strftime_now), on which a prompt must not depend"
    return f"the chat template fails on the messages: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
