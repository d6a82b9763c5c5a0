"""The ids of a shard's rows as text."""

import numpy as np
import pyarrow as pa

from batchinfer.config import JobConfig
from batchinfer.data.column_checks import id_column
from batchinfer.data.columns import column_type, is_id_type, without_dictionary
from batchinfer.data.prompts import RowBatch

END = 1 << 53  # from here on, different integers have the same double


class IdColumn:
    """Reader of a shard's column of ids, which may be missing.

    Args:
        schema: the shard's schema.
        id_type: type of the outputs' ids, None if not known. If it is integer, doubles in this shard are integers:
            pandas makes doubles of integers with nulls.
    """

    def __init__(self, job: JobConfig, schema: pa.Schema, id_type: pa.DataType | None) -> None:
        self._name = job.input.id
        kind = column_type(schema, self._name)
        self._are_doubles = kind == pa.float64() and id_type == pa.int64()
        self._are_there = self._are_doubles or (kind is not None and is_id_type(kind))
        self.are_missing = self._name not in schema.names
        self.problem = None if self.are_missing or self._are_doubles else id_column(job).problem(schema)  # of every row

    def of(self, batch: RowBatch) -> pa.Array:
        """Return [R] the ids as text; blame rows whose double may have been another integer."""
        if not self._are_there:
            return pa.nulls(batch.num_rows, pa.string())
        column = batch.columns[self._name]
        return self._of_doubles(batch, column) if self._are_doubles else _texts(column)

    def _of_doubles(self, batch: RowBatch, column: pa.Array) -> pa.Array:
        numbers = column.fill_null(0).to_numpy(zero_copy_only=False)
        is_integer = (np.abs(numbers) < END) & (numbers == np.floor(numbers))
        for row in np.flatnonzero(~is_integer).tolist():
            what = f"{self._name} is {numbers[row]}, a double that is no integer below 2^53"
            batch.blame(row, f"{what}; store ids as integers")
        is_id = is_integer & column.is_valid().to_numpy(zero_copy_only=False)
        return pa.array(np.where(is_id, numbers, 0).astype(np.int64), mask=~is_id).cast(pa.string())


def _texts(column: pa.Array) -> pa.Array:
    ids = without_dictionary(column)
    try:
        text = ids.cast(pa.string())
        text.validate(full=True)
    except pa.ArrowInvalid:
        # bytes that are not UTF-8 are replaced
        raw = ids.cast(pa.large_binary()).to_pylist()
        text = pa.array([None if value is None else value.decode("utf-8", "replace") for value in raw], pa.string())
    return text
