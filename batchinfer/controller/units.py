"""Requests of a work unit read from the plan, and its results as rows."""

from itertools import starmap
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from batchinfer.data.parquet import open_parquet, own_file
from batchinfer.data.schemas.internal import RESULTS
from batchinfer.data.schemas.table import LOGPROBS
from batchinfer.manifest import Manifest
from batchinfer.records import Completion, Request, RequestKey, Sampling, TokenLogprobs, sampling_from_json
from batchinfer.rundir import RunDir

# attributes of a completion that are columns of a result file
COUNTS = (
    "prompt_tokens", "cached_memory_tokens", "cached_disk_tokens", "replicated_tokens", "recomputed_tokens",
    "computed_tokens", "reasoning_tokens", "kv_tokens_sum",
)  # fmt: skip
_TEXTS = ("text", "token_ids", "reasoning", "logprobs", "prompt_logprobs")
# column of a result file -> attribute of a completion
_ATTRIBUTES = {
    **{name: name for name in (*_TEXTS, *COUNTS, "unit", "error", "finish_reason", "stop_reason", "structured_valid")},
    **{name: f"key.{name}" for name in ("shard", "row", "sample")},
    **{name: f"times.{name}" for name in ("admitted_s", "first_token_s", "finished_s")},
}
# columns of plan/requests without nulls, and others, that make a request
_NUMBERS = (
    "unit", "shard", "row", "sample", "sampling_key", "max_tokens", "cached_tokens", "score_from", "prompt_group",
)  # fmt: skip
_REQUEST_COLUMNS = [*_NUMBERS, "sampling", "last_units", "expected_tokens", "token_ids"]
# an error row has null texts and zero counts
_OF_AN_ERROR = {"status": "error", **dict.fromkeys(_TEXTS), **dict.fromkeys((*COUNTS, "completion_tokens"), 0)}


class PlannedRequests:
    """The plan's requests, read unit by unit.

    The file stays open from the first read on: its footer, which has an entry for every unit, is parsed once. A plan
    that takes its place is opened, and refused by its checksums.

    Args:
        manifest: manifest of the plan.
        default: sampling of rows without their own.
    """

    def __init__(self, run: RunDir, manifest: Manifest, default: Sampling) -> None:
        self._path, self._manifest, self._default = run.requests, manifest, default
        self._file: pq.ParquetFile | None = None
        self._opened: tuple[int, ...] = ()  # which file `_file` is

    def _current_file(self) -> pq.ParquetFile:
        status = self._path.stat()
        found = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        if self._file is None or found != self._opened:
            self._file, self._opened = open_parquet(self._path, self._manifest), found
        return self._file

    def of_unit(self, row: dict[str, Any], *, after_tokens: int = 0) -> list[Request]:
        """Return the requests of one unit in the plan's order. Only the unit's row groups are read.

        Args:
            row: the unit's row of plan/units.
            after_tokens: tokens that the last request shares with the first of the next unit.

        Raises:
            DamagedFileError: the plan is damaged.
        """
        groups = range(row["first_row_group"], row["first_row_group"] + row["num_row_groups"])
        with own_file(self._path):
            table = self._current_file().read_row_groups(list(groups), columns=_REQUEST_COLUMNS)
        return _requests(table, self._default, after_tokens)


def _requests(table: pa.Table, default: Sampling, after_tokens: int) -> list[Request]:
    columns = {name: table[name].to_numpy().tolist() for name in _NUMBERS}  # many times as fast as `to_pylist`
    cached = columns["cached_tokens"]
    sampling = table["sampling"].combine_chunks().dictionary_encode()
    overrides = [*map(sampling_from_json, sampling.dictionary.to_pylist()), default]  # of null
    codes = sampling.indices.fill_null(len(overrides) - 1).to_numpy().tolist()
    how_N = list(zip(codes, columns["max_tokens"], strict=True))
    samplings = {how: replace(overrides[how[0]], max_tokens=how[1]) for how in set(how_N)}
    not_dealt = [0] * len(cached)
    fields = zip(
        map(RequestKey, columns["shard"], columns["row"], columns["sample"]),
        columns["unit"],
        _lists(table["token_ids"]),
        map(samplings.__getitem__, how_N),
        columns["sampling_key"],
        cached,
        not_dealt,  # shared, replicated and counted tokens
        not_dealt,
        not_dealt,
        map(max, cached, [*cached[1:], after_tokens]),
        map(tuple, _lists(table["last_units"])),
        columns["prompt_group"],
        table["expected_tokens"].to_pylist(),
        columns["score_from"],
        strict=True,
    )
    return list(starmap(Request, fields))


def _lists(column: pa.ChunkedArray) -> list[list[int]]:
    """Convert lists of integers, a null to an empty list; `to_pylist` makes a scalar of each value first."""
    lists = column.combine_chunks()
    ends = lists.value_lengths().fill_null(0).to_numpy().cumsum().tolist()
    values = lists.flatten().to_numpy().tolist()
    return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def kv_tokens(units: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the KV tokens of all requests of these units, in whole pages, and those of the largest request."""
    return sum(row["kv_tokens"] for row in units), max((row["largest_kv_tokens"] for row in units), default=0)


def result_table(completions: list[Completion]) -> pa.Table:
    """Convert finished requests to rows of a result file (schemas.RESULTS), column by column."""
    of_each = zip(*map(attrgetter(*_ATTRIBUTES.values()), completions), strict=True)
    columns: dict[str, Any] = dict(zip(_ATTRIBUTES, map(list, of_each), strict=True))
    failed = [place for place, error in enumerate(columns["error"]) if error is not None]
    columns["status"] = ["ok"] * len(completions)
    columns["completion_tokens"] = list(map(len, columns["token_ids"]))
    for name, value in _OF_AN_ERROR.items():
        for place in failed:
            columns[name][place] = value
    for name in ("logprobs", "prompt_logprobs"):
        columns[name] = _logprob_lists(columns[name])
    return pa.table(columns, schema=RESULTS.schema)


def _logprob_lists(of_each: list[TokenLogprobs | None]) -> pa.Array:
    """Convert log-probabilities to schemas.LOGPROBS."""
    if not any(item is not None for item in of_each):
        return pa.nulls(len(of_each), LOGPROBS)
    scored = [item for item in of_each if item is not None]
    num_top = np.repeat([item.num_top for item in scored], [len(item) for item in scored]).astype(np.int32)
    chosen = _scored_tokens([item.token_ids for item in scored], [item.logprobs for item in scored])
    others = _scored_tokens([item.top_token_ids for item in scored], [item.top_logprobs for item in scored])
    top = pa.ListArray.from_arrays(_offsets(num_top), pa.StructArray.from_arrays([*others.values()], [*others]))
    columns = {**chosen, "top": top}
    return pa.ListArray.from_arrays(
        _offsets(np.array([len(item or ()) for item in of_each])),
        pa.StructArray.from_arrays([*columns.values()], [*columns]),
        mask=pa.array([item is None for item in of_each]),
    )


def _scored_tokens(token_ids: list[bytearray], logprobs: list[bytearray]) -> dict[str, pa.Array]:
    """Convert columns of TokenLogprobs to the columns of a struct."""
    found = {
        "token_id": np.frombuffer(b"".join(token_ids), dtype=np.int32),
        "logprob": np.frombuffer(b"".join(logprobs), dtype=np.float64).astype(np.float32),
    }
    return {name: pa.array(values) for name, values in found.items()}


def _offsets(lengths: np.ndarray) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
