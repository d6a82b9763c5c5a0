"""Reader of OpenAI's batch files: each line is a request, whose fields become columns; an unsupported one is a bad row.

custom_id, url ───────────────────────────────────────► custom_id, url
body   model ─────────────────────────────────────────► model
       messages, tools, chat_template_kwargs; prompt;
       input, instructions, reasoning ────────────────► request     JSON of a chat, a text or token ids (row_prompts.py)
       temperature, stop, response_format, … ─────────► sampling    JSON of keys of [sampling]

A key of a body that is null counts as missing.
"""

import io
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from xxhash import xxh3_128_intdigest

from batchinfer.config.exact_json import to_json
from batchinfer.data.formats import openai_chats, openai_responses
from batchinfer.data.formats.jsonl import json_records
from batchinfer.data.formats.lines import BadRow, Record
from batchinfer.data.formats.openai_keys import CHAT, COMPLETIONS, RESPONSES, check_keys, shown, text_of
from batchinfer.data.formats.values import WrongValueError, in_words, role_of

SCHEMA = pa.schema([(name, pa.string()) for name in ("custom_id", "url", "model", "request", "sampling")])

# the url of a line without one, by the first of these keys that the body has
_URL_OF_KEY = {"messages": CHAT, "input": RESPONSES, "prompt": COMPLETIONS}
_OTHER_ENDPOINTS = {
    "/v1/embeddings": "embeddings are",
    "/v1/moderations": "moderations are",
    "/v1/images": "images are",
    "/v1/audio": "speech and transcripts are",
    "/v1/videos": "videos are",
}


def are_requests(schema: pa.Schema) -> bool:
    """Return whether columns of JSON lines are those of a batch file; lines may lack method and url."""
    if not {"custom_id", "body"} <= set(schema.names):
        return False
    body = schema.field("body")
    return "url" in schema.names or not pa.types.is_string(body.type) or role_of(body) != ""


def openai_records(content: io.BufferedReader) -> Iterator[Record]:
    """Yield the requests in a batch file with the columns of SCHEMA; a bad request with its valid columns only."""
    requests = _Requests()
    for number, num_bytes, line in json_records(content):
        if isinstance(line, str):
            yield number, num_bytes, line
            continue
        values: dict[str, object] = {}
        try:
            for name, value in requests.columns(number, line):
                values[name] = value
        except WrongValueError as error:
            values = BadRow(values, f"line {number}: {error}")
        except RecursionError:
            values = BadRow(values, f"line {number}: body is nested too deeply")
        yield number, num_bytes, values


class _Requests:
    """Checks of a file's lines, which must have different ids and the same model."""

    def __init__(self) -> None:
        self._line_of_id: dict[int, int] = {}  # by the id's digest: some 150 bytes for each
        self._model: str | None = None

    def columns(self, number: int, line: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield (column, value) of a line.

        Raises:
            WrongValueError: a value is wrong; columns before it were yielded already.
        """
        custom_id = text_of(line, "custom_id")
        yield "custom_id", custom_id
        if not custom_id.strip():
            raise WrongValueError(f"custom_id {shown(custom_id)} is blank")
        first = self._line_of_id.setdefault(xxh3_128_intdigest(custom_id.encode()), number)
        if line.get("method") is not None and text_of(line, "method") != "POST":
            raise WrongValueError(f'method is {shown(line["method"])}, not "POST"')
        url, body = _endpoint(line)
        if first != number:
            raise WrongValueError(f"custom_id {shown(custom_id)} is that of an earlier line, too: line {first}")
        yield "url", url
        model = text_of(body, "model", "body.")
        yield "model", model
        self._model = self._model or model
        if model != self._model:
            raise WrongValueError(
                f"body.model is {shown(model)}, but on earlier lines {shown(self._model)}; a file is for one model"
            )
        check_keys(body, url)
        form = openai_responses if url == RESPONSES else openai_chats
        yield "request", to_json(form.request(body, url))
        yield "sampling", to_json(form.sampling(body, url))


def _endpoint(line: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the url of a line and its body without nulls.

    Raises:
        WrongValueError: the url is not supported, or there is no body.
    """
    url = None if line.get("url") is None else text_of(line, "url")
    if url is not None and url not in _URL_OF_KEY.values():
        raise WrongValueError(_refusal(url))
    body = line.get("body")
    if not isinstance(body, dict):
        is_no_request = url is None and body is None
        raise WrongValueError("body is missing" if is_no_request else f"body is {in_words(body)}, not an object")
    body = {name: value for name, value in body.items() if value is not None}
    if url is None:
        url = next((url for key, url in _URL_OF_KEY.items() if key in body), None)
    if url is None:
        raise WrongValueError(f"url is missing, and body has none of {', '.join(_URL_OF_KEY)}; set url to {CHAT}")
    return url, body


def _refusal(url: str) -> str:
    for start, things in _OTHER_ENDPOINTS.items():
        if url == start or url.startswith(f"{start}/"):
            return f"url is {shown(url)}, but {things} not computed here; remove the line"
    return f"url is {shown(url)}, not {CHAT}, {COMPLETIONS} or {RESPONSES}"
