"""Writer of the plan's tables; requests are in the order of execution, with their token ids."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from batchinfer.config import PAGE_TOKENS
from batchinfer.data.parquet import table_writer
from batchinfer.data.schemas.internal import DUPLICATES, PLAN_UNITS, REQUESTS, with_token_type
from batchinfer.data.schemas.table import TOKEN_IDS
from batchinfer.manifest import Manifest
from batchinfer.plan.answer_digests import ANSWER_DIGEST, answer_digests
from batchinfer.plan.forecast import PlannedWork
from batchinfer.plan.packing import cut_units
from batchinfer.plan.prefix.in_memory import last_units
from batchinfer.plan.prefix.prompt_parts import SortedPrompts, offsets_of
from batchinfer.plan.prompt_groups import group_ids
from batchinfer.plan.requests import PlannedRequests
from batchinfer.plan.rows import RowTable, take
from batchinfer.plan.scored import scored_first
from batchinfer.rundir import RunDir

ROW_GROUP_REQUESTS = 4096
ROW_GROUP_TOKENS = 1 << 20  # a writer needs some 20 bytes per token of a row group


@dataclass(frozen=True, slots=True)
class WrittenPlan:
    """The requests of a plan's tables, in the order of execution."""

    work: PlannedWork
    requests: PlannedRequests
    prefix_places: np.ndarray | slice  # [Q] int64, each request's place in prefix order; a slice: the same order
    digests: pa.ChunkedArray  # [Q] answer digests, if they were asked for


def write_plan(
    run: RunDir,
    manifest: Manifest,
    rows: RowTable,
    planned: PlannedRequests,
    keys: np.ndarray,
    prompts: Iterator[SortedPrompts],
    *,
    num_ranks: int,
    block_tokens: int,
    answer_lengths: dict[int, float],
    token_type: pa.DataType,
    with_digests: bool = False,
) -> WrittenPlan:
    """Write plan/{requests,units,duplicates}.parquet.

    Args:
        manifest: gets the files' checksums.
        keys: [Q] uint64, the requests' sampling keys.
        prompts: all prompts in the prefix plan's order, part by part.
        num_ranks: ranks of the group that works on a unit.
        block_tokens: tokens per block of the KV store.
        answer_lengths: known answer lengths by prompt group.
        token_type: of the token ids of `prompts`.
        with_digests: whether to return the answer digests.

    Raises:
        ConfigError: the folder cannot be written.
    """
    prompt_tokens = rows.num_tokens[planned.row_index]
    max_tokens = take(rows.max_tokens, planned.row_index)
    planned, order, starts = _in_units(planned, prompt_tokens, max_tokens, num_ranks)
    keys, prompt_tokens, max_tokens = keys[order], prompt_tokens[order], max_tokens[order]
    expected_tokens = np.broadcast_to(np.float32(np.nan), len(prompt_tokens))
    if answer_lengths:
        expected_tokens = expected_tokens.copy()
    last_units = _last_units(starts, planned.shared_tokens, block_tokens)
    cursor = _PromptCursor(prompts)
    found_digests = []
    units = []
    num_row_groups = 0
    schema = with_token_type(REQUESTS.schema, token_type)
    with table_writer(run.requests, schema, plain="token_ids", manifest=manifest) as writer:
        for unit, (first, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
            first_row_group = num_row_groups
            for part, token_ids in _row_groups(cursor, first, planned.place[first:end], prompt_tokens[first:end]):
                groups, expected = group_ids(
                    token_ids.flatten().to_numpy(),
                    offsets_of(prompt_tokens[part]),
                    planned.group_depth[part],
                    planned.shared_tokens[part],
                    answer_lengths,
                )
                if with_digests:
                    samplings = rows.sampling_digest[rows.sampling_code[planned.row_index[part]]]
                    found_digests.append(
                        answer_digests(token_ids, samplings, max_tokens[part], planned.score_from[part], keys[part])
                    )
                if answer_lengths:
                    expected_tokens[part] = expected
                writer.write_table(
                    _request_table(schema, rows, planned, keys, unit, part, token_ids, groups, expected, last_units)
                )
                num_row_groups += 1
            kept = {"first_row_group": first_row_group, "num_row_groups": num_row_groups - first_row_group}
            totals = _unit_totals(prompt_tokens, max_tokens, planned.cached_tokens, first, end)
            units.append({"unit": unit, **kept, "shared_tokens": int(planned.shared_tokens[first]), **totals})
    write_rows(run.units, manifest, PLAN_UNITS.schema, *units)
    with table_writer(run.duplicates, DUPLICATES.schema, manifest=manifest) as writer:
        writer.write_table(_duplicate_table(rows, planned))
    work = PlannedWork(starts, prompt_tokens, planned.cached_tokens, max_tokens, expected_tokens)
    return WrittenPlan(work, planned, order, pa.chunked_array(found_digests, ANSWER_DIGEST))


def _in_units(
    planned: PlannedRequests, prompt_tokens: np.ndarray, max_tokens: np.ndarray, num_ranks: int
) -> tuple[PlannedRequests, np.ndarray | slice, np.ndarray]:
    """Return the requests in the order of execution, [Q] their previous places, and [U + 1] units' first requests."""
    new_tokens = prompt_tokens - planned.cached_tokens
    starts = cut_units(new_tokens, max_tokens, prompt_tokens=prompt_tokens, num_ranks=num_ranks)
    if not planned.score_from.any():
        return planned, slice(None), starts  # unchanged, without a copy
    # in parts as for one rank, so that outputs' cached_tokens do not depend on the number of ranks
    parts = cut_units(new_tokens, max_tokens, prompt_tokens=prompt_tokens)
    planned, order = scored_first(planned, prompt_tokens, parts)
    return planned, order, parts[np.unique(np.searchsorted(parts, starts))]  # units of more ranks are whole parts


def _unit_totals(
    prompt_tokens: np.ndarray, max_tokens: np.ndarray, cached_tokens: np.ndarray, first: int, end: int
) -> dict[str, int]:
    """Return the totals of requests [first, end) by columns of plan/units.parquet."""
    prompts, outputs, cached = prompt_tokens[first:end], max_tokens[first:end], cached_tokens[first:end]
    kv_tokens = prompts + np.maximum(outputs - 1, 0)  # the last token of an answer is never run
    return {
        "first_request": first,
        "num_requests": end - first,
        "prompt_tokens": int(prompts.sum()),
        "new_tokens": int((prompts - cached).sum()),
        "max_output_tokens": int(outputs.sum()),
        "kv_tokens": int((-(-kv_tokens // PAGE_TOKENS)).sum()) * PAGE_TOKENS,
        "largest_kv_tokens": int(kv_tokens.max()),
        "largest_output_tokens": int(outputs.max()),
    }


def _last_units(unit_starts: np.ndarray, shared_tokens: np.ndarray, block_tokens: int) -> dict[int, list[int]]:
    """Return the last unit that needs each KV block, for blocks that are needed after the unit that computes them.

    The key is the request that is the first to compute the blocks; only its leading blocks outlive its unit.
    """
    first, last = last_units(shared_tokens, unit_starts, block_tokens=block_tokens)
    found: dict[int, list[int]] = {}
    for request, unit in zip(first.tolist(), last.tolist(), strict=True):
        found.setdefault(request, []).append(unit)
    return found


def write_rows(target: Path, manifest: Manifest, schema: pa.Schema, *rows: dict[str, Any]) -> None:
    """Write a small table and add its checksums to the manifest.

    Raises:
        ConfigError: the folder cannot be written.
    """
    with table_writer(target, schema, manifest=manifest) as writer:
        writer.write_table(pa.Table.from_pylist(list(rows), schema=schema))


class _PromptCursor:
    """Reader of prompts in the plan's order by their places, which must not decrease."""

    def __init__(self, parts: Iterator[SortedPrompts]) -> None:
        self._parts = parts
        self._lists = pa.array([], TOKEN_IDS)  # the part that the places have reached
        self._first = 0  # place of its first prompt

    def take(self, places: np.ndarray) -> pa.Array:
        """Return [K] lists of token ids at these places ([K] int64, not decreasing)."""
        taken = []
        while len(places):
            count = int(np.searchsorted(places, self._first + len(self._lists)))
            if count:
                taken.append(self._lists.take(pa.array(places[:count] - self._first)))
                places = places[count:]
            else:
                self._first += len(self._lists)
                self._lists = _as_lists(next(self._parts))
        return pa.concat_arrays(taken)


def _as_lists(part: SortedPrompts) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(part.offsets.astype(np.int32)), pa.array(part.token_ids))


def _row_groups(
    cursor: _PromptCursor, first: int, places: np.ndarray, num_tokens: np.ndarray
) -> Iterator[tuple[slice, pa.Array]]:
    """Yield the row groups of a unit: the slice of requests, and their prompts.

    Args:
        first: the unit's first request.
        places: [K] places of the unit's prompts; if they decrease somewhere, all prompts are read at once.
        num_tokens: [K] prompt tokens of the unit's requests.
    """
    taken = None
    if (np.diff(places) < 0).any():
        by_place = np.argsort(places, kind="stable")
        taken = cursor.take(places[by_place]).take(pa.array(np.argsort(by_place)))
    ends = np.cumsum(num_tokens)
    begin = 0
    while begin < len(ends):
        most = (ends[begin - 1] if begin else 0) + ROW_GROUP_TOKENS
        end = min(max(int(np.searchsorted(ends, most, side="right")), begin + 1), begin + ROW_GROUP_REQUESTS, len(ends))
        yield slice(first + begin, first + end), cursor.take(places[begin:end]) if taken is None else taken[begin:end]
        begin = end


def _request_table(
    schema: pa.Schema,
    rows: RowTable,
    planned: PlannedRequests,
    keys: np.ndarray,
    unit: int,
    part: slice,
    token_ids: pa.Array,
    groups: np.ndarray,
    expected_tokens: np.ndarray,
    last_units: dict[int, list[int]],
) -> pa.Table:
    index = planned.row_index[part]
    overrides = [rows.sampling_texts[code] if code >= 0 else None for code in rows.sampling_code[index].tolist()]
    columns = {
        "unit": np.full(len(index), unit, dtype=np.int32),
        "shard": rows.shard[index],
        "row": rows.row[index],
        "sample": planned.sample[part],
        "sampling_key": keys[part],
        "sampling": pa.array(overrides, pa.string()),
        "max_tokens": rows.max_tokens[index],
        "cached_tokens": planned.cached_tokens[part],
        "score_from": planned.score_from[part],
        "prompt_group": groups,
        "expected_tokens": pa.array(expected_tokens, pa.float32(), from_pandas=True),  # NaN becomes null
        "last_units": _lists_of(last_units, part),
        "token_ids": token_ids,
    }
    return pa.table(columns, schema=schema)


def _lists_of(last_units: dict[int, list[int]], part: slice) -> pa.Array:
    """Return `_last_units` of a part of the requests as a column, null for requests that are not in it."""
    places = range(part.start, part.stop)
    found = [last_units.get(place) for place in places] if last_units else []
    return pa.array(found, TOKEN_IDS) if any(found) else pa.nulls(len(places), TOKEN_IDS)


def _duplicate_table(rows: RowTable, planned: PlannedRequests) -> pa.Table:
    copies, originals = planned.duplicate_row, planned.original_row
    columns = {
        "shard": rows.shard[copies],
        "row": rows.row[copies],
        "sample": planned.duplicate_sample,
        "of_shard": rows.shard[originals],
        "of_row": rows.row[originals],
        "of_sample": rows.choice[originals],
    }
    return pa.table(columns, schema=DUPLICATES.schema)
