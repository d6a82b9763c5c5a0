"""Code of the tokenizer process, which loads the tokenizer once, and of its forked workers, for encoding batches.

Limits are processor time, and memory beyond that held at the start, so that a busy machine changes no result.
"""

import gc
import json
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa

from batchinfer import own_process
from batchinfer.data import chat  # noqa: F401  (the template engine, before it is asked for)
from batchinfer.data.prompt_tokenizer import harmony_tokens, thinking_tokens
from batchinfer.data.row_encoder import RowEncoder
from batchinfer.data.row_prompts import RowPrompts
from batchinfer.data.text_loss import check_round_trip
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.data.tokenizer_process import CHOICE, TOGETHER
from batchinfer.host_info import held_bytes
from batchinfer.records import ModelError
from batchinfer.sanitize import clip
from batchinfer.stop_signals import ignore_signals

Encode = Callable[[pa.Array], pa.RecordBatch]


def serve(control: socket.socket) -> NoReturn:
    """Load the model folder of the first message; at each further message, fork a worker or wait for a worker's end."""
    ignore_signals()
    own_process.end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, files, _, _ = socket.recv_fds(control, 64, 1)
    if not files:
        os._exit(0)
    with os.fdopen(files[0], "rb") as file:
        settings = file.read()
    encoder, answer = _load(json.loads(settings))
    control.send(json.dumps(answer).encode())
    gc.freeze()  # else a collection in a worker would copy the memory shared with the others
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 64, 2)
        if not message:
            os._exit(0)
        if not descriptors:
            control.send(b"%d" % os.waitpid(int(message), 0)[1])
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            own_process.end_with_parent(signal.SIGKILL)
            os.dup2(descriptors[1], 2)
            _work(Connection(descriptors[0]), encoder, json.loads(settings))
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(b"%d" % pid)


def _load(settings: dict[str, Any]) -> tuple[RowEncoder | None, dict[str, Any]]:
    """Return the encoder and its properties for the command, or None and {"error": sentence}."""
    encoder, lacks_date = None, False
    try:
        with _limited(seconds=settings["load_s"], num_bytes=settings["load_bytes"]):
            tokenizer = load_tokenizer(Path(settings["folder"]))
            prompts = RowPrompts(settings["input"])
            if settings["input"]["token_ids"] is None or settings["input"]["choices"] is not None:
                encoder = RowEncoder(tokenizer, prompts, settings["most_tokens"], settings["input"]["control_tokens"])
                encoder.try_out()
                lacks_date = encoder.lacks_date()
                check_round_trip(tokenizer)
    except ModelError as error:
        return None, {"error": clip(str(error))}
    of_tools = tokenizer.template_text(with_tools=True)
    writes_all = not prompts.may_make_chats or of_tools is None
    return encoder, {
        "columns": prompts.columns,
        "digest": tokenizer.digest,
        "most_chars": tokenizer.most_chars(settings["most_tokens"]),
        "has_chat_template": tokenizer.template_text() is not None,
        "bos_token_id": tokenizer.token_id(tokenizer.named_tokens.get("bos_token", "")),
        "writes_tools": writes_all or "tools" in tokenizer.chat_template(with_tools=True).names,
        "writes_calls": writes_all or tokenizer.chat_template(with_tools=True).writes_calls,
        "lacks_date": lacks_date,
        "ends_thinking": (thinking_tokens(tokenizer) or harmony_tokens(tokenizer)) is not None,
        "tool_forms": forms_of_model(of_tools, lambda mark: tokenizer.token_id(mark) is not None),
    }


def _work(channel: Connection, encoder: RowEncoder | None, settings: dict[str, Any]) -> NoReturn:
    assert encoder is not None
    is_limited = False
    try:
        while True:
            how = channel.recv_bytes()
            with pa.ipc.open_stream(channel.recv_bytes()) as reader:
                batch = reader.read_next_batch()
            encode = encoder.encode_choices if batch.schema.names == [CHOICE] else encoder.encode
            seconds = json.loads(channel.recv_bytes())
            if not is_limited:
                _limit_memory(settings["batch_bytes" if how == TOGETHER else "row_bytes"])
                is_limited = True
            if how == TOGETHER:
                _answer(channel, encode, batch[0], seconds[0])
            else:
                for row, row_seconds in enumerate(seconds):
                    _answer(channel, encode, batch[0].slice(row, 1), row_seconds)
    except EOFError:
        os._exit(0)
    except BaseException as error:
        # Rust's panics are no Exceptions, and after one its data may be in any state
        os.write(2, f"\n{type(error).__name__}: {' '.join(str(error).split())}".encode(errors="replace"))
        os._exit(1)


def _answer(channel: Connection, encode: Encode, column: pa.Array, seconds: float) -> None:
    _limit_time(seconds)
    batch = encode(column)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    channel.send_bytes(sink.getvalue())


# ---- limits


@contextmanager
def _limited(*, seconds: float, num_bytes: int) -> Iterator[None]:
    _limit_time(seconds)
    undo = _limit_memory(num_bytes)
    yield
    undo()
    _set_limit(resource.RLIMIT_CPU, resource.RLIM_INFINITY)


def _limit_time(seconds: float) -> None:
    """Limit the processor time from now on, rounded up to a second; SIGXCPU then ends the process."""
    _set_limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds))


def _limit_memory(num_bytes: int) -> Callable[[], None]:
    """Limit the process's memory to `num_bytes` more than it holds now; return the function that removes the limit."""
    before = resource.getrlimit(resource.RLIMIT_DATA)[0]
    held = held_bytes()
    assert held is not None
    _set_limit(resource.RLIMIT_DATA, held + num_bytes)
    return lambda: _set_limit(resource.RLIMIT_DATA, before)


def _set_limit(name: int, value: int) -> None:
    hard = resource.getrlimit(name)[1]
    lower = [limit for limit in (value, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(name, (min(lower, default=resource.RLIM_INFINITY), hard))


# for each form of calls, a text that the chat template writes and that is a token of the tokenizer
_MARKS = {
    "deepseek_v3": "<｜tool▁calls▁begin｜>",
    "deepseek_v32": "｜DSML｜",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "glm": "<arg_key>",
    "hermes": "<tool_call>",
    "minimax": "<minimax:tool_call>",
    "harmony": "<|channel|>",
    "mistral": "[TOOL_CALLS]",
}


def forms_of_model(template: str | None, has_token: Callable[[str], bool]) -> list[str]:
    """Return the forms with marks that the chat template writes, else the forms with marks that are tokens.

    The template takes precedence, because tokenizers of a family keep the tokens of the family's earlier forms.
    """
    shown = [form for form, mark in _MARKS.items() if mark in (template or "")]
    found = shown or [form for form, mark in _MARKS.items() if has_token(mark)]
    # GLM's calls are between the same marks as those of Hermes
    return [form for form in found if form != "hermes" or "glm" not in found]


if __name__ == "__main__":
    own_process.configure_interpreter()
    serve(socket.socket(fileno=int(sys.argv[1])))
