"""OpenAI's batch files: each line is a request, whose fields become columns; what cannot be done is said of the row.

custom_id, url ───────────────────────────────────────► custom_id, url
body   model ─────────────────────────────────────────► model
       messages, tools, chat_template_kwargs; prompt ─► request     JSON of a chat, a text or token ids (row_prompts.py)
       temperature, stop, response_format, … ─────────► sampling    JSON of keys of [sampling]

A key of a body that is null is as good as missing.
"""

import io
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa
from pydantic import ValidationError
from xxhash import xxh3_128_intdigest

from batchinfer.config import SamplingConfig
from batchinfer.data.formats.jsonl import json_records
from batchinfer.data.formats.lines import BadRow, Record
from batchinfer.data.formats.values import WrongValueError, in_words

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LINE_KEYS = {"custom_id", "method", "url", "body"}
SCHEMA = pa.schema([(name, pa.string()) for name in ("custom_id", "url", "model", "request", "sampling")])

_MOST_INT = 2**31 - 1
_MOST_SHOWN = 80  # characters of a value in a sentence
# keys of [sampling], vLLM's among them, that a body has by the same name and with the same meaning
_SAMPLING = SamplingConfig.model_fields.keys() - {"logprobs"}
_GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}  # vLLM's former names
_OF_ALL = {"model", "logprobs", "response_format", *_GUIDED}
_OF_URL = {
    CHAT: {"messages", "tools", "tool_choice", "chat_template_kwargs", "max_completion_tokens", "top_logprobs"},
    COMPLETIONS: {"prompt"},
}
# these change no answer
_UNUSED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "priority", "request_id",
}  # fmt: skip
_KNOWN = {url: _SAMPLING | _OF_ALL | own | _UNUSED for url, own in _OF_URL.items()}
# these may only say what is so anyway
_ONLY = {
    "stream": False, "echo": False, "parallel_tool_calls": True, "modalities": ["text"], "use_beam_search": False,
    "skip_special_tokens": True, "add_generation_prompt": True, "continue_final_message": False,
}  # fmt: skip


def openai_records(content: io.BufferedReader) -> Iterator[Record]:
    """The requests in a batch file, with the columns of SCHEMA; of a bad one those that it has."""
    requests = _Requests()
    for number, num_bytes, line in json_records(content):
        if isinstance(line, str):
            yield number, num_bytes, line
            continue
        values: dict[str, object] = {}
        try:
            for name, value in requests.columns(line):
                values[name] = value
        except WrongValueError as error:
            values = BadRow(values, f"line {number}: {error}")
        except RecursionError:
            values = BadRow(values, f"line {number}: body is nested too deeply")
        yield number, num_bytes, values


class _Requests:
    """Lines of one file, whose ids differ and whose model is one and the same."""

    def __init__(self) -> None:
        self._ids: set[int] = set()  # digests: some 100 bytes for each
        self._model: str | None = None

    def columns(self, line: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """(column, value) of a line.

        Raises:
            WrongValueError: says what is wrong, after the columns before it.
        """
        custom_id = _text(line, "custom_id")
        yield "custom_id", custom_id
        digest = xxh3_128_intdigest(custom_id.encode())
        if digest in self._ids:
            raise WrongValueError(f"custom_id {_shown(custom_id)} is that of an earlier line, too")
        self._ids.add(digest)
        method = _text(line, "method")
        if method != "POST":
            raise WrongValueError(f'method is {_shown(method)}, not "POST"')
        url = _text(line, "url")
        if url not in _OF_URL:
            raise WrongValueError(f"url is {_shown(url)}, not {CHAT} or {COMPLETIONS}")
        yield "url", url
        body = line.get("body")
        if not isinstance(body, dict):
            raise WrongValueError(f"body is {in_words(body)}, not an object")
        body = {name: value for name, value in body.items() if value is not None}
        model = _text(body, "model", "body.")
        yield "model", model
        self._model = self._model or model
        if model != self._model:
            raise WrongValueError(
                f"body.model is {_shown(model)}, but on earlier lines {_shown(self._model)}; a file is for one model"
            )
        _refuse_unsupported(body, url)
        yield "request", _json(_request(body, url))
        yield "sampling", _json(_sampling(body, url))


def _refuse_unsupported(body: dict[str, Any], url: str) -> None:
    for name, value in body.items():
        if name in _ONLY:
            if value != _ONLY[name]:
                raise WrongValueError(f"body.{name} is {_shown(value)}, but only {_shown(_ONLY[name])} is supported")
        elif name not in _KNOWN[url]:
            raise WrongValueError(f"body.{name} is not supported for {url}; leave it out")


def _request(body: dict[str, Any], url: str) -> dict[str, Any]:
    """What is asked, as row_prompts.py takes it."""
    if url == COMPLETIONS:
        return {"prompt": _prompt(body.get("prompt"))}
    if "messages" not in body:
        raise WrongValueError("body.messages is missing")
    names = ["messages", "chat_template_kwargs"]
    if _may_call_tools(body):
        names.append("tools")
    return {name: body[name] for name in names if name in body}


def _prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and type(prompt[0]) is not int:
        (prompt,) = prompt
    if prompt is None:
        raise WrongValueError("body.prompt is missing")
    if not isinstance(prompt, str | list):
        raise WrongValueError(f"body.prompt is {in_words(prompt)}, not text or a list of token ids")
    if not prompt:
        raise WrongValueError("body.prompt is empty")
    if isinstance(prompt, list):
        if type(prompt[0]) is not int:
            raise WrongValueError(f"body.prompt is a list of {len(prompt)} prompts; write a line for each")
        for item in prompt:
            if type(item) is not int or not 0 <= item <= _MOST_INT:
                raise WrongValueError(f"body.prompt holds {_shown(item)}, which is no token id")
    return prompt


def _may_call_tools(body: dict[str, Any]) -> bool:
    choice = body.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise WrongValueError(f'body.tool_choice is {_shown(choice)}, but only "auto" and "none" are supported')
    tools = body.get("tools", [])
    for place, tool in enumerate(tools if isinstance(tools, list) else [tools]):
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise WrongValueError(f'body.tools[{place}] is not an object of the type "function" with a function')
        _text(tool["function"], "name", f"body.tools[{place}].function.")
    return bool(tools) and choice == "auto"


def _sampling(body: dict[str, Any], url: str) -> dict[str, Any]:
    """The keys of [sampling] that a body sets; only those with other names there are checked here.

    A null says that the line wants none, whatever the job has.
    """
    found = {name: body[name] for name in body if name in _SAMPLING}
    if "max_completion_tokens" in body:
        most = _int(body, "max_completion_tokens", _MOST_INT)
        if found.setdefault("max_tokens", most) != most:
            raise WrongValueError("body.max_tokens and body.max_completion_tokens differ; leave one out")
    if found.get("top_k") == -1:  # vLLM's word for all
        found["top_k"] = 0
    logprobs = _logprobs(body, url)
    if "logprobs" in body:
        found["logprobs"] = logprobs
    forms = {name: kind for name, kind in _GUIDED.items() if name in body}
    given = [*forms, *(name for name in ("response_format", "structured_outputs") if name in body)]
    if len(given) > 1:
        raise WrongValueError(f"body.{given[0]} and body.{given[1]} are both set; leave one out")
    structured = _response_format(body) or {kind: body[name] for name, kind in forms.items()}
    if structured:
        _refuse_unusable(given[0], structured)
        found["structured_outputs"] = structured
    elif "response_format" in body:
        found["structured_outputs"] = None
    return found


def _logprobs(body: dict[str, Any], url: str) -> int | None:
    """Alternatives for each token; None: nothing is asked for."""
    if url == COMPLETIONS:
        return _int(body, "logprobs", 100) if "logprobs" in body else None
    wanted = body.get("logprobs", False)
    if not isinstance(wanted, bool):
        raise WrongValueError(f"body.logprobs is {_shown(wanted)}, not true or false")
    if "top_logprobs" in body and not wanted:
        raise WrongValueError("body.top_logprobs is set, but body.logprobs is not true")
    return _int(body, "top_logprobs", 100) if "top_logprobs" in body else 0 if wanted else None


def _response_format(body: dict[str, Any]) -> dict[str, Any]:
    """It as structured_outputs; {} for plain text."""
    form = body.get("response_format", {"type": "text"})
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    schema = form.get("json_schema") if kind == "json_schema" else None
    schema = schema.get("schema") if isinstance(schema, dict) else None
    if not isinstance(schema, dict):
        raise WrongValueError(
            'body.response_format is not of the type "text" or "json_object", nor "json_schema" with json_schema.schema'
        )
    return {"json": schema}


def _refuse_unusable(name: str, structured: dict[str, Any]) -> None:
    try:
        SamplingConfig.model_validate({"max_tokens": 1, "structured_outputs": structured})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise WrongValueError(f"body.{name}: {problem}") from None


def _text(values: dict[str, Any], name: str, where: str = "") -> str:
    value = values.get(name)
    if value is None:
        raise WrongValueError(f"{where}{name} is missing")
    if not isinstance(value, str):
        raise WrongValueError(f"{where}{name} is {in_words(value)}, not text")
    if not value:
        raise WrongValueError(f"{where}{name} is empty")
    return value


def _int(body: dict[str, Any], name: str, most: int) -> int:
    value = body[name]
    if type(value) is not int or not 0 <= value <= most:
        raise WrongValueError(f"body.{name} is {_shown(value)}, not an integer from 0 to {most}")
    return value


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _json(value: dict[str, Any]) -> str:
    return msgspec.json.encode(value).decode()
