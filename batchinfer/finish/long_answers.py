"""Long answers between results and outputs: kept in a file apart from their rows, which are sorted without them.

    results ─┬─ rows, short answers with them ──► sorted and joined by DuckDB ──┬─► output rows, a few at a time
             └─ long answers, in a file of their own ───────── by position ─────┘

DuckDB holds thousands of rows at a time, whatever their size: answers of 32,000 tokens, or log-probabilities of many
alternatives, would fill any memory. No thread is started, because users of the Python API read by this module, too.
"""

from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.data.duckdb_sql import read_parquet
from batchinfer.data.parquet import own_file
from batchinfer.data.schemas.internal import RESULTS
from batchinfer.data.wide_rows import bytes_of_rows, runs_of_rows
from batchinfer.whole_files import cannot_write

LONG_BYTES = 16 << 10  # a longer answer goes into the file
BATCH_BYTES = 16 << 20  # read at a time, roughly
VALUE_BYTES = 8  # rough size of a list's value
GROUP_ROWS = 2048  # rows per row group of the file without long answers
FILLED_BYTES = 128 << 20  # of long answers put into rows at a time; a longer answer comes alone

ANSWER = pa.schema(
    [RESULTS.schema.field(name) for name in ("text", "token_ids", "reasoning", "logprobs", "prompt_logprobs")]
)
SHORT_ROWS = RESULTS.schema.append(pa.field("answer_place", pa.int64())).append(pa.field("mean_logprob", pa.float64()))
_MEAN = "list_avg(list_transform(logprobs, lambda token: token.logprob)) AS mean_logprob"


def all_rows(rows: str) -> str:
    """Return SQL for results that keep all their answers; `rows` is SQL, too, and `answer_place` is null."""
    return f"SELECT *, NULL::BIGINT AS answer_place, {_MEAN} FROM {rows}"


class LongAnswers:
    """A file of long answers, and their rows without them; close it before its folder is deleted.

    Args:
        folder: folder for the two files.
        keeps: whether answers are kept, so that `filled` can put them back into rows.
    """

    def __init__(self, folder: Path, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._answers, self._rows = folder / "long_answers.arrow", folder / "short_rows.parquet"
        self._num_bytes: list[int] = []  # by position
        self._file: pa.OSFile | None = None  # the file of answers, once it is complete
        self._reader: pa.RecordBatchFileReader

    def close(self) -> None:
        """Close the file: NFS cannot delete the folder of an open file."""
        if self._file is not None:
            self._file.close()

    def set_apart(self, connection: duckdb.DuckDBPyConnection, files: list[Path]) -> str:
        """Move the long answers of result files to the file; return SQL for the rows.

        The rows have the additional columns `answer_place` and `mean_logprob`.

        Args:
            files: at least one result file.

        Raises:
            DamagedFileError: a file cannot be read.
            ConfigError: the folder cannot be written.
        """
        mixed = [path for path in files if _has_long(path)]
        if not mixed:
            return all_rows(read_parquet(*files))
        try:
            self._write(connection, mixed)
            self._file = pa.OSFile(str(self._answers))
            self._reader = pa.ipc.open_file(self._file, options=pa.ipc.IpcReadOptions(use_threads=False))
        except OSError as error:
            raise cannot_write(self._answers, error) from None
        others = set(files).difference(mixed)
        parts = [f"SELECT * FROM {read_parquet(self._rows)}"]
        if others:
            parts.append(all_rows(read_parquet(*sorted(others))))
        return " UNION ALL BY NAME ".join(parts)

    def filled(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield rows of samples.sql with their long answers: the same rows in order, in smaller batches."""
        places = rows["answer_place"]
        if places.null_count == len(rows):
            yield rows
            return
        is_long = places.is_valid().to_numpy(zero_copy_only=False)
        num_bytes = np.zeros(len(rows), dtype=np.int64)
        num_bytes[is_long] = np.array(self._num_bytes)[places.drop_null().to_numpy()]
        for first, end in runs_of_rows(num_bytes, FILLED_BYTES, len(rows)):
            yield self._filled(rows.slice(first, end - first), np.flatnonzero(is_long[first:end]))

    def _write(self, connection: duckdb.DuckDBPyConnection, files: list[Path]) -> None:
        """Write both files from the rows of result files."""
        compressed = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
        with (
            pa.OSFile(str(self._answers), "w") as file,
            pa.ipc.new_file(file, ANSWER, options=compressed) as answers,
            pq.ParquetWriter(self._rows, SHORT_ROWS) as rows,
        ):
            pending: list[pa.RecordBatch] = []
            for path in files:
                for batch in _batches(path, RESULTS.schema.names):
                    pending.append(self._without_long(batch, answers, connection.cursor()))
                    if sum(map(len, pending)) >= GROUP_ROWS:
                        rows.write_table(pa.Table.from_batches(pending))
                        pending.clear()
            rows.write_table(pa.Table.from_batches(pending, SHORT_ROWS))

    def _without_long(
        self, batch: pa.RecordBatch, answers: pa.RecordBatchFileWriter, connection: duckdb.DuckDBPyConnection
    ) -> pa.RecordBatch:
        """Write the long answers of result rows to the file; return the rows with the schema SHORT_ROWS."""
        num_bytes = _answer_bytes(batch)
        is_long = num_bytes > LONG_BYTES
        places = np.cumsum(is_long) - 1 + len(self._num_bytes)
        for row in np.flatnonzero(is_long).tolist() if self._keeps else ():
            answers.write_batch(_as_delivered(batch.slice(row, 1)))
        self._num_bytes += num_bytes[is_long].tolist()
        connection.register("answers", batch.select(["logprobs"]))
        means = connection.sql(f"SELECT {_MEAN} FROM answers").to_arrow_table()["mean_logprob"].combine_chunks()
        without = pa.array(np.arange(len(batch)), mask=is_long)
        columns = {name: batch[name] for name in batch.schema.names}
        columns |= {name: batch[name].take(without) for name in ANSWER.names}
        columns |= {"answer_place": pa.array(places, mask=~is_long), "mean_logprob": means}
        return pa.RecordBatch.from_pydict(columns, SHORT_ROWS)

    def _filled(self, rows: pa.RecordBatch, long_rows: np.ndarray) -> pa.RecordBatch:
        if not len(long_rows):
            return rows
        places = rows["answer_place"].drop_null().to_pylist()
        answers = pa.Table.from_batches([self._reader.get_batch(place) for place in places])
        is_first = rows["sample"].to_numpy()[long_rows] == 0
        for index, name in enumerate(rows.schema.names):
            if name in ANSWER.names:
                field = ANSWER.field(name)
                source = np.arange(len(rows))
                source[long_rows] = len(rows) + np.arange(len(long_rows))
                if name == "prompt_logprobs":  # of the first sample only
                    source[long_rows[~is_first]] = long_rows[~is_first]
                column = pa.concat_arrays([rows[name].cast(field.type), *answers[name].chunks])
                rows = rows.set_column(index, field, column.take(pa.array(source)))
        return rows


def _has_long(path: Path) -> bool:
    return any((_answer_bytes(batch) > LONG_BYTES).any() for batch in _batches(path, ANSWER.names))


def _batches(path: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a result file in batches of about BATCH_BYTES."""
    with own_file(path), pq.ParquetFile(path, pre_buffer=False) as file:
        metadata = file.metadata
        chunks = [group.column(place) for group in map(metadata.row_group, range(metadata.num_row_groups))
                  for place in range(metadata.num_columns)]  # fmt: skip
        num_bytes = VALUE_BYTES * sum(chunk.num_values for chunk in chunks)
        rows = max(1, BATCH_BYTES * metadata.num_rows // max(1, num_bytes))
        yield from file.iter_batches(rows, columns=columns, use_threads=False)


def _answer_bytes(batch: pa.RecordBatch) -> np.ndarray:
    """Return [N] int64, the decoded size of each row's answer in bytes."""
    return np.sum([bytes_of_rows(batch[name]) for name in ANSWER.names], axis=0)


def _as_delivered(row: pa.RecordBatch) -> pa.RecordBatch:
    """Return the answer of one result row as samples.sql has it: the prompt's first token has no log-probability."""
    columns = {name: row[name] for name in ANSWER.names}
    scored = columns["prompt_logprobs"]
    if scored.null_count == 0:
        values = pa.concat_arrays([pa.nulls(1, scored.type.value_type), scored.flatten()])
        columns["prompt_logprobs"] = pa.ListArray.from_arrays([0, len(values)], values)
    return pa.RecordBatch.from_pydict(columns, ANSWER)
