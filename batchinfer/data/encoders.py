"""Prompts encoded in worker processes, on all cores; a row that a worker does not survive becomes an error row.

    piece of a batch ──► worker ──► its rows encoded                         nearly always
                            └─ lost ──► fresh worker, row by row ──► the rows before the one it dies at
                                           └─ lost at its first row ──► that row's error; on with the rest

Whether a row is bad is decided in a fresh worker, by processor time and by memory beyond what such a worker holds, so
it depends neither on the row's company nor on how busy the machine is.
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
LARGE_BYTES = 1_000_000  # of such rows, and of suspects, one is encoded at a time, which bounds the memory of all
RETRIES = 3  # of a worker that somebody else ends

Pieces = list["Future[pa.RecordBatch]"]


@dataclass(frozen=True, slots=True)
class EncoderLimits:
    """What a worker may take: a thousand times what a tokenizer usually needs for a row, ten times for a batch.

    row_s, row_s_per_byte: processor time for one row, by the bytes of the row.
    batch_s_per_byte: for rows together; when it is not enough, each row gets its own.
    batch_bytes, row_bytes: memory beyond what a fresh worker holds; a million characters take some 150 MB.
    load_s, load_bytes: for reading the model's files and a first harmless row; a tokenizer.json of 30 MB takes 5 s.
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
    """The tokenizer of a job in worker processes; use it in a `with` statement.

    Attributes:
        columns: the input columns that prompts are made of.
        digest: changes with anything in the model folder that changes a prompt's ids.
        writes_tools: whether the chat template, where there is one, writes the tools that it is given.
        ends_thinking: whether there is a token for the end of thinking.
        tool_forms: the forms in which the model writes tool calls (tool_forms.py); empty: the folder shows none.
        most_chars: characters with which a text cannot fit into the window; None: not known.
    """

    def __init__(
        self,
        job: JobConfig,
        *,
        window: int,
        process: TokenizerProcess | None = None,
        limits: EncoderLimits | None = None,
    ) -> None:
        """Load the tokenizer, and the template for a job that has messages.

        Args:
            window: tokens of prompt and output together.
            process: one that was started before.

        Raises:
            ModelError: one of them is missing, not valid, or cannot even encode a harmless row.
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
        self.writes_tools: bool = loaded["writes_tools"]
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
            self._process.end()  # first: threads that wait for a worker wait no longer
        self.close()

    def close(self) -> None:
        """The job has no more texts: give the memory of the workers back; again: nothing happens."""
        self._process.let_go()
        self._pool.shutdown(cancel_futures=True)
        while self._idle:
            self._idle.pop().close()

    def start(self, column: pa.Array, what: str = PROMPT) -> Pieces:
        """Begin to encode a column, or a struct of `columns`; the results joined are its rows, as columns.ENCODED.

        Args:
            what: PROMPT, or CHOICE for texts that follow a prompt.
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
            worker.channel.close()  # one that is done ends with it
            ended = self._process.ended(worker)
            worker.close()
            if row == len(batch) or (row > first and not ended.by_time):
                continue  # what comes before it in its worker must not make a row bad
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
    """As many of a worker's answers, one for each entry of `seconds`, as it lives to give."""
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
