"""Encoding of prompts in worker processes, on all cores; a row that ends its worker becomes an error row.

    piece of a batch ──► worker ──► its rows encoded                         nearly always
                            └─ lost ──► fresh worker, row by row ──► the rows before the one it dies at
                                           └─ lost at its first row ──► that row's error; on with the rest

A row is found bad in a fresh worker only, by processor time and by memory beyond that of a fresh worker. The verdict
depends neither on the other rows nor on the load of the machine.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from types import TracebackType

import pyarrow as pa

from batchinfer.config import JobConfig
from batchinfer.data.columns import ENCODED
from batchinfer.data.tokenizer_process import ONE_BY_ONE, PROMPT, TOGETHER, Ended, TokenizerProcess, Worker
from batchinfer.data.wide_rows import bytes_of_rows, runs_of_rows
from batchinfer.host_info import num_cores
from batchinfer.records import BatchinferError

PIECE_ROWS = 256  # most rows that a worker gets at once
MIN_PIECE_ROWS = 64
PIECE_BYTES = 1 << 20  # of long rows there are fewer
MAX_WORKERS = 32
LARGE_BYTES = 1_000_000  # larger rows, and rows of lost workers, are encoded one at a time, which bounds the memory
RETRIES = 3  # after a worker was killed from outside

Pieces = list["Future[pa.RecordBatch]"]


@dataclass(frozen=True, slots=True)
class EncoderLimits:
    """Time and memory limits of a worker: 1000 times the usual need of a row, 10 times that of a batch.

    row_s, row_s_per_byte: processor time for one row, by the bytes of the row.
    batch_s_per_byte: processor time for several rows together; after a timeout, each row gets a time of its own.
    batch_bytes, row_bytes: memory beyond that of a fresh worker; a million characters take some 150 MB.
    load_s, load_bytes: to read the model's files and encode trial rows; a tokenizer.json of 30 MB takes 5 s.
    """

    row_s: float = 5.0
    row_s_per_byte: float = 20e-6
    batch_s_per_byte: float = 4e-6
    batch_bytes: int = 1 << 29
    row_bytes: int = 1 << 30
    load_s: float = 60.0
    load_bytes: int = 4 << 30


LIMITS = EncoderLimits()


class Encoders:
    """The tokenizer of a job in worker processes; a context manager that ends the workers.

    Attributes:
        columns: the input columns that prompts are made of.
        digest: changes with every change of the model folder that changes a prompt's ids.
        has_chat_template: whether the model folder has a chat template.
        bos_token_id: the BOS token; None if the tokenizer names none.
        writes_tools: whether the chat template, if there is one, writes the tools that it is given.
        writes_calls: whether the chat template, if there is one, writes tool calls of earlier messages.
        lacks_date: whether the chat template writes the date if it is given one, and the job gives none.
        ends_thinking: whether the tokenizer has a token for the end of thinking.
        tool_forms: forms in which the model writes tool calls (tokenizer_worker.py); empty if the folder shows none.
        most_chars: a text of more characters cannot fit into the window; None if no limit is known.
    """

    def __init__(
        self,
        job: JobConfig,
        *,
        window: int,
        process: TokenizerProcess | None = None,
        limits: EncoderLimits | None = None,
    ) -> None:
        """Load the tokenizer, and the chat template if the job has messages.

        Args:
            window: most tokens of prompt and output together.
            process: the tokenizer process, if it was started before.

        Raises:
            ModelError: tokenizer or template is missing, is not valid, or cannot encode the trial rows.
        """
        self._limits = limits or LIMITS
        self._process = process or TokenizerProcess()
        settings = {
            "folder": job.model.path,
            "input": job.input.model_dump(exclude={"files"}),
            "most_tokens": window,
            **asdict(self._limits),
        }
        try:
            loaded = self._process.load(settings)
        except BaseException:
            self._process.end()
            raise
        self.window = window
        self.columns: list[str] = loaded["columns"]
        self.digest: str = loaded["digest"]
        self.has_chat_template: bool = loaded["has_chat_template"]
        self.bos_token_id: int | None = loaded["bos_token_id"]
        self.writes_tools: bool = loaded["writes_tools"]
        self.writes_calls: bool = loaded["writes_calls"]
        self.lacks_date: bool = loaded["lacks_date"]
        self.ends_thinking: bool = loaded["ends_thinking"]
        self.tool_forms: list[str] = loaded["tool_forms"]
        self.most_chars: int | None = loaded["most_chars"]
        self.num_workers = min(num_cores(), MAX_WORKERS)
        self._pool = ThreadPoolExecutor(max_workers=self.num_workers)
        self._idle: list[Worker] = []
        self._one_large = threading.Lock()

    def __enter__(self) -> Encoders:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._process.end()  # first, to wake threads that wait for a worker
        self.close()

    def close(self) -> None:
        """End the workers after the job's last text. Further calls do nothing."""
        self._process.let_go()
        self._pool.shutdown(cancel_futures=True)
        while self._idle:
            self._idle.pop().close()

    def start(self, column: pa.Array, what: str = PROMPT) -> Pieces:
        """Begin to encode a column, or a struct of `columns`.

        Args:
            what: PROMPT, or CHOICE for texts that follow a prompt.

        Returns:
            Futures of the encoded rows (columns.ENCODED), which joined are the rows of the column in order.
        """
        batch = pa.RecordBatch.from_arrays([column], names=[what])
        rows = min(PIECE_ROWS, max(MIN_PIECE_ROWS, -(-len(column) // self.num_workers)))
        runs = runs_of_rows(bytes_of_rows(column), PIECE_BYTES, rows)
        return [self._pool.submit(self._encode, batch.slice(first, end - first)) for first, end in runs]

    def _encode(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        answer = self._together(batch) if len(batch) > 1 or batch.nbytes <= LARGE_BYTES else None
        if answer is not None:
            return answer
        with self._one_large:
            rows = pa.Table.from_batches(self._one_by_one(batch), schema=ENCODED)
            return rows.combine_chunks().to_batches()[0]

    def _together(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = self._process.fork()
        seconds = self._limits.row_s + self._limits.batch_s_per_byte * batch.nbytes
        for answer in _answers(worker, TOGETHER, batch, [seconds]):
            self._idle.append(worker)
            return answer
        self._process.ended(worker)
        worker.close()
        return None

    def _one_by_one(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        row = retries = 0
        while row < len(batch):
            seconds = [
                self._limits.row_s + self._limits.row_s_per_byte * batch.slice(place, 1).nbytes
                for place in range(row, len(batch))
            ]
            worker, first = self._process.fork(), row
            for answer in _answers(worker, ONE_BY_ONE, batch.slice(row), seconds):
                row, retries = row + 1, 0
                yield answer
            worker.channel.close()  # a worker that is done ends with its channel
            ended = self._process.ended(worker)
            worker.close()
            if row == len(batch) or (row > first and not ended.by_time):
                continue  # a row is bad only if a worker ends at its first row
            if ended.from_outside:
                retries += 1
                if retries > RETRIES:
                    raise BatchinferError(
                        f"processes that tokenise are ended by somebody else ({ended.reason()}), perhaps since the "
                        "memory of this host is used up; run the same command to go on"
                    )
                continue
            sentence = self._sentence(ended, seconds[row - first])
            yield pa.RecordBatch.from_pylist(
                [{"token_ids": [], "error": sentence, "control_tokens": False}], schema=ENCODED
            )
            row += 1

    def _sentence(self, ended: Ended, seconds: float) -> str:
        if ended.by_time:
            return f"tokenizing it takes more than {seconds:.0f} s of processor time"
        if ended.by_memory:
            return f"tokenizing it needs more than {self._limits.row_bytes / 2**30:g} GiB of memory"
        return f"the tokenizer fails on it: {ended.reason()}"


def _answers(worker: Worker, how: bytes, batch: pa.RecordBatch, seconds: list[float]) -> Iterator[pa.RecordBatch]:
    """Yield the worker's answers, one for each entry of `seconds` (its time limits), until the worker ends."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    try:
        worker.channel.send_bytes(how)
        worker.channel.send_bytes(sink.getvalue())
        worker.channel.send_bytes(json.dumps(seconds).encode())
        for _ in seconds:
            with pa.ipc.open_stream(worker.channel.recv_bytes()) as reader:
                answer = reader.read_next_batch()
            yield answer
    except (EOFError, ConnectionError):
        return
