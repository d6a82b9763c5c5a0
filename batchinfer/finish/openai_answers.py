"""Answers in the form of OpenAI's batch API: a line for each input row, with all its samples as choices.

rows 0, 2      ──► outputs/x.jsonl          {"custom_id": …, "response": {"status_code": 200, "body": {…}}}
row 1, failed  ──► outputs/x.errors.jsonl   {"custom_id": …, "response": {"status_code": 400, "body": {"error": …}}}

Equal jobs give equal bytes: ids are digests of shard, row and custom_id, and the time `created` is 0.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.config import JobConfig
from batchinfer.data.columns import column_type
from batchinfer.data.formats.openai_keys import CHAT, COMPLETIONS, RESPONSES
from batchinfer.data.row_values import have_tools
from batchinfer.data.shard_schemas import shard_schema
from batchinfer.finish.answers import Answer, AnswerReader
from batchinfer.finish.join import NOT_COMPUTED
from batchinfer.finish.json_lines import Lines
from batchinfer.finish.kept_columns import KeptRows
from batchinfer.finish.response_object import repeated_keys, response_object
from batchinfer.finish.tool_calls import call_ids
from batchinfer.records import Shard

SLICE_ROWS, SLICE_BYTES = (
    64,
    1 << 20,
)  # converted at a time; as Python objects, log-probabilities are 50 times as large
LEAST_LOGPROB = -9999.0  # OpenAI's value for anything lower
_PARAM = re.compile(r"\bbody\.([A-Za-z_]+)")

Row = dict[str, Any]
TokenOf = Callable[[int], tuple[str, bytes | None]]
"""Text and bytes (None: not known) of a token by its id."""


class OpenAIAnswers(Lines):
    """The lines of one shard: answers in the first file, errors in the second.

    Args:
        num_own: number of columns before the kept input columns, which may have any name.
        refused: int64, rows that the plan found bad; other failed rows failed while they were computed.
        reader: finds the calls in an answer.
    """

    def __init__(
        self, job: JobConfig, shard: Shard, num_own: int, token_of: TokenOf, refused: pa.Array, reader: AnswerReader
    ) -> None:
        self._reader = reader
        self._num_own, self._refused = num_own, refused
        self._shard, self._token_of = shard, token_of
        self._model = Path(job.model.path).name  # for rows without a model name
        self._url = CHAT if job.input.makes_chats else COMPLETIONS
        self._asked = KeptRows(shard, _asked_columns(job, shard), job.s3)
        self._samples: list[Row] = []  # samples of the last row until now

    def encode(self, rows: pa.Table) -> Iterator[tuple[int, bytes]]:
        own = rows.select(range(self._num_own))
        for num_rows, asked in self._asked.of(rows["row"].combine_chunks()):
            part, own = own.slice(0, num_rows), own.slice(num_rows)
            if asked:
                *named, tools = asked
                part = part.append_column("\0has_tools", have_tools(tools, are_requests=bool(named)))
                if named:
                    columns = {"url": named[0], "model": named[1], "repeated": repeated_keys(tools)}
                    for name, values in columns.items():
                        part = part.append_column(f"\0{name}", values)
            part = part.append_column("\0refused", pc.is_in(part["row"], value_set=self._refused))
            slice_rows = max(1, min(SLICE_ROWS, SLICE_BYTES * num_rows // max(1, part.nbytes)))
            for first in range(0, num_rows, slice_rows):
                for sample in part.slice(first, slice_rows).to_pylist():
                    if self._samples and self._samples[0]["row"] != sample["row"]:
                        yield from self.flush()
                    self._samples.append(sample)

    def flush(self) -> Iterator[tuple[int, bytes]]:
        if self._samples:
            is_ok, line = self._line(self._samples)
            yield int(not is_ok), msgspec.json.encode(line) + b"\n"
        self._samples = []

    def _line(self, samples: list[Row]) -> tuple[bool, Row]:
        first = samples[0]
        custom_id = None if first["id"] is None else str(first["id"])
        key = hashlib.blake2b(
            f"{self._shard.name}\x1f{first['row']}\x1f{custom_id}".encode(), digest_size=12
        ).hexdigest()
        failed = next((sample for sample in samples if sample["status"] != "ok"), None)
        line = {"id": f"batch_req_{key}", "custom_id": custom_id, "response": None, "error": None}
        if failed is not None and failed["error"] == NOT_COMPUTED:
            return False, {**line, "error": {"code": "batch_expired", "message": NOT_COMPUTED}}
        status, body = (200, self._body(key, samples)) if failed is None else _failure(failed)
        return failed is None, {
            **line,
            "response": {"status_code": status, "request_id": f"req_{key}", "body": body},
        }

    def _body(self, key: str, samples: list[Row]) -> Row:
        first = samples[0]
        url, model = first.get("\0url", self._url), first.get("\0model", self._model)
        prompt_logprobs = self._of_prompt(first.get("prompt_logprobs"))
        scored = {} if prompt_logprobs is None else {"prompt_logprobs": prompt_logprobs}
        usage = _usage(samples)
        if url == RESPONSES:
            repeated = msgspec.json.decode(first["\0repeated"])
            return {**response_object(key, self._chat_choice(key, first), usage, repeated, model), **scored}
        is_chat = url == CHAT
        choose = self._chat_choice if is_chat else self._text_choice
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{key}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": 0,
            "model": model,
            "choices": [choose(key, sample) for sample in samples],
            "usage": usage,
            **scored,
        }

    def _chat_choice(self, key: str, sample: Row) -> Row:
        content = sample["text"]
        calls = sample.get("tool_calls") if sample.get("\0has_tools", True) else None
        message = {"role": "assistant", "content": content, "refusal": None}
        if sample.get("reasoning") is not None:
            message["reasoning_content"] = sample["reasoning"]
        if calls:
            answer = self._reader.read(content, is_cut=sample["finish_reason"] == "length")
            message["content"] = answer.content or None
            message["tool_calls"] = _with_ids(calls, answer, f"{key}_{sample['sample']}")
        logprobs = sample["logprobs"]
        if logprobs is not None:
            content = [{**self._scored(item), "top_logprobs": [*map(self._scored, item["top"])]} for item in logprobs]
            logprobs = {"content": content, "refusal": None}
        has_ended = sample["finish_reason"] == "stop"
        finish_reason = "tool_calls" if calls and has_ended else sample["finish_reason"]
        return {"index": sample["sample"], "message": message, "logprobs": logprobs, "finish_reason": finish_reason}

    def _text_choice(self, key: str, sample: Row) -> Row:
        logprobs = sample["logprobs"]
        if logprobs is not None:
            scored = [self._scored(item) for item in logprobs]
            ends = [0]
            tops: list[dict[str, float]] = [{} for _ in logprobs]
            for item, own, top in zip(logprobs, scored, tops, strict=True):
                ends.append(ends[-1] + len(own["token"]))
                # most likely first: if several tokens have the same text, the likeliest counts
                for other in [*map(self._scored, item["top"]), own]:
                    top.setdefault(other["token"], other["logprob"])
            logprobs = {
                "text_offset": ends[:-1],
                "token_logprobs": [item["logprob"] for item in scored],
                "tokens": [item["token"] for item in scored],
                "top_logprobs": tops,
            }
        kept = {name: sample[name] for name in ("text", "finish_reason")}
        return {"index": sample["sample"], **kept, "logprobs": logprobs}

    def _scored(self, item: Row) -> Row:
        token, as_bytes = self._token_of(item["token_id"])
        return {
            "token": token,
            "bytes": None if as_bytes is None else list(as_bytes),
            "logprob": max(item["logprob"], LEAST_LOGPROB),
        }

    def _of_prompt(self, items: list[Row | None] | None) -> list[Row | None] | None:
        """Return the log-probabilities of the prompt in vLLM's form: by token id."""
        if items is None:
            return None
        return [
            None
            if item is None
            else {
                str(scored["token_id"]): {
                    "logprob": max(scored["logprob"], LEAST_LOGPROB),
                    "decoded_token": self._token_of(scored["token_id"])[0],
                }
                for scored in [item, *item["top"]]
            }
            for item in items
        ]


def _with_ids(calls: list[Row], answer: Answer, key: str) -> list[Row]:
    """Return the tool calls of a message, each with a distinct id."""
    keys = [f"{key}_{place}" for place in range(len(calls))]
    ids = call_ids(answer, [call["name"] for call in calls], keys)
    return [{"id": call_id, "type": "function", "function": call} for call_id, call in zip(ids, calls, strict=True)]


def _asked_columns(job: JobConfig, shard: Shard) -> list[pa.Field]:
    """Return the input columns that the form of answers depends on; the last column tells which rows have tools."""
    if shard.format == "openai":
        return [pa.field(name, pa.string()) for name in ("url", "model", "request")]
    if not isinstance(job.input.tools, str):
        return []
    kind = column_type(shard_schema(shard), job.input.tools)
    return [pa.field(job.input.tools, kind or pa.null())]


def _usage(samples: list[Row]) -> Row:
    num_prompt, num_new = samples[0]["prompt_tokens"], sum(sample["completion_tokens"] for sample in samples)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": samples[0]["cached_tokens"]},
        "completion_tokens_details": {"reasoning_tokens": sum(sample.get("reasoning_tokens", 0) for sample in samples)},
    }


def _failure(sample: Row) -> tuple[int, Row]:
    """Return (HTTP status, body) of a failed row: 400 if the plan refused the row, 500 if computing failed."""
    is_bad_row = sample["\0refused"]
    param = _PARAM.search(sample["error"])
    error = {
        "message": sample["error"],
        "type": "invalid_request_error" if is_bad_row else "server_error",
        "param": param and param[1],
        "code": None,
    }
    return 400 if is_bad_row else 500, {"error": error}
