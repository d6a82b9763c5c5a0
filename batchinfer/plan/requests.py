"""From tokenised rows to ordered requests: equal greedy requests merged, samples expanded. Called by the planner."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.config import PAGE_TOKENS
from batchinfer.plan.prefix import plan_prefixes
from batchinfer.records import Sampling, Shard, sampling_key
from batchinfer.rundir import RunDir

BATCH_ROWS = 65536
NO_OVERRIDE = -1  # sampling code of rows that use the job's own sampling


@dataclass(frozen=True, slots=True)
class RowTable:
    """The good rows of all shards, column by column, in input order (R rows)."""

    shard: np.ndarray  # [R] int32
    row: np.ndarray  # [R] int64
    n: np.ndarray  # [R] int32, samples
    max_tokens: np.ndarray  # [R] int32
    sampling_code: np.ndarray  # [R] int32, index into sampling_texts or NO_OVERRIDE
    sampling_texts: list[str]  # distinct overrides, as JSON
    row_id: pa.Array  # [R] string, null where the input has none
    occurrence: np.ndarray  # [R] int64, rows with the same id before this one
    token_ids: np.ndarray  # flat int32
    offsets: np.ndarray  # [R + 1] int64
    num_bad: int  # output rows of bad input rows
    num_input_rows: int

    @property
    def num_tokens(self) -> np.ndarray:
        return np.diff(self.offsets)


@dataclass(frozen=True, slots=True)
class PlannedRequests:
    """Requests in the order of execution (Q), and duplicates (D); indices are rows of the RowTable."""

    row_index: np.ndarray  # [Q] int64
    sample: np.ndarray  # [Q] int32
    cached_tokens: np.ndarray  # [Q] int64, prompt tokens predicted to be in memory
    duplicate_row: np.ndarray  # [D] int64
    duplicate_sample: np.ndarray  # [D] int32
    original_row: np.ndarray  # [D] int64, the row (sample 0) that answers it
    distinct_tokens: int


def load_rows(run: RunDir, shards: list[Shard]) -> RowTable:
    """Read tokens/*.parquet of the readable shards in input order, good rows only."""
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ("shard", "row", "n", "max_tokens", "length", "tokens")}
    ids, good_flags, overrides = [], [], []
    num_bad = 0
    for shard in shards:
        if shard.problem is not None:
            continue
        for batch in pq.ParquetFile(run.tokens(shard.index)).iter_batches(BATCH_ROWS):
            is_good = pc.is_null(batch["error"])
            num_bad += pc.sum(batch["n"].filter(pc.invert(is_good))).as_py() or 0
            ids.append(batch["id"])
            good_flags.append(is_good.to_numpy(zero_copy_only=False))
            good = batch.filter(is_good)
            parts["shard"].append(np.full(len(good), shard.index, dtype=np.int32))
            for name in ("row", "n", "max_tokens"):
                parts[name].append(good[name].to_numpy())
            parts["length"].append(pc.list_value_length(good["token_ids"]).to_numpy().astype(np.int64))
            parts["tokens"].append(good["token_ids"].flatten().to_numpy())
            overrides.append(good["sampling"])
    columns = {name: np.concatenate(arrays) if arrays else np.zeros(0, np.int64) for name, arrays in parts.items()}
    good_rows = np.concatenate(good_flags) if good_flags else np.zeros(0, bool)
    all_ids = pa.chunked_array(ids, pa.string()).combine_chunks() if ids else pa.array([], pa.string())
    codes, texts = _dictionary(
        pa.chunked_array(overrides, pa.string()) if overrides else pa.chunked_array([], pa.string())
    )
    return RowTable(
        shard=columns["shard"].astype(np.int32),
        row=columns["row"],
        n=columns["n"],
        max_tokens=columns["max_tokens"],
        sampling_code=codes,
        sampling_texts=texts,
        row_id=all_ids.filter(pa.array(good_rows)),
        occurrence=_occurrences(all_ids)[good_rows],
        token_ids=columns["tokens"].astype(np.int32, copy=False),
        offsets=np.concatenate([[0], np.cumsum(columns["length"])]).astype(np.int64),
        num_bad=num_bad,
        num_input_rows=len(good_rows),
    )


def plan_requests(rows: RowTable, default: Sampling) -> PlannedRequests:
    """Order all requests by prefix; compute equal greedy requests once.

    Greedy requests are equal when prompt, max_tokens and sampling are; the first in input order is computed, with
    sample 0, and answers all others and all further samples. Sampled requests are never merged: each has its own draws.
    """
    prefixes = plan_prefixes(rows.token_ids, rows.offsets, block_tokens=PAGE_TOKENS)
    order, lengths = prefixes.order, rows.num_tokens
    greedy = _greedy_flags(rows, default)
    original = _originals(rows, greedy, order, prefixes.shared_tokens)
    is_computed = ~greedy | (original == np.arange(len(lengths)))
    counts = np.where(greedy, 1, rows.n) * is_computed
    row_index = np.repeat(order, counts[order])
    sample = _ranges(counts[order]).astype(np.int32)
    # the first sample of a prompt finds what its predecessor shares; further samples all but their last token
    cached = np.where(sample == 0, prefixes.cached_tokens[row_index], lengths[row_index] - 1)
    num_copies = np.where(greedy, rows.n - is_computed, 0)
    duplicate_row = np.repeat(np.arange(len(lengths)), num_copies)
    return PlannedRequests(
        row_index=row_index,
        sample=sample,
        cached_tokens=cached,
        duplicate_row=duplicate_row,
        duplicate_sample=(_ranges(num_copies) + is_computed[duplicate_row]).astype(np.int32),
        original_row=original[duplicate_row],
        distinct_tokens=prefixes.distinct_tokens,
    )


def sampling_keys(rows: RowTable, planned: PlannedRequests, shards: list[Shard], default: Sampling) -> np.ndarray:
    """[Q] uint64, the keys of the requests' random draws; 0 for greedy requests, which draw nothing."""
    seeds = np.array([default.seed, *(json.loads(text)["seed"] for text in rows.sampling_texts)], dtype=np.int64)
    greedy = _greedy_flags(rows, default)
    names = {shard.index: shard.name for shard in shards}
    keys = np.zeros(len(planned.row_index), dtype=np.uint64)
    for place in np.flatnonzero(~greedy[planned.row_index]):
        index = planned.row_index[place]
        row_id = rows.row_id[index].as_py()
        if row_id is None:
            row_id = f"{names[int(rows.shard[index])]}:{rows.row[index]}"
        seed = int(seeds[rows.sampling_code[index] + 1])
        keys[place] = sampling_key(seed, row_id, int(rows.occurrence[index]), int(planned.sample[place]))
    return keys


def _greedy_flags(rows: RowTable, default: Sampling) -> np.ndarray:
    by_code = [default.is_greedy, *(json.loads(text)["temperature"] == 0 for text in rows.sampling_texts)]
    return np.array(by_code)[rows.sampling_code + 1]


def _originals(rows: RowTable, greedy: np.ndarray, order: np.ndarray, shared_tokens: np.ndarray) -> np.ndarray:
    """[R] for a greedy row the first equal row in input order (often itself); other rows stand for themselves."""
    lengths = rows.num_tokens
    ordered_lengths = lengths[order]
    repeats = np.zeros(len(order), dtype=bool)
    repeats[1:] = (shared_tokens[order][1:] == ordered_lengths[1:]) & (ordered_lengths[1:] == ordered_lengths[:-1])
    prompt = np.zeros(len(order), dtype=np.int64)
    prompt[order] = np.cumsum(~repeats)
    original = np.arange(len(order))
    indices = np.flatnonzero(greedy)
    if len(indices):
        keys = np.stack([prompt[indices], rows.sampling_code[indices], rows.max_tokens[indices]], axis=1)
        _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        original[indices] = indices[first[inverse.reshape(-1)]]
    return original


def _occurrences(ids: pa.Array) -> np.ndarray:
    """[N] int64, how many equal ids stand before each; null ids count nothing."""
    codes, _ = _dictionary(pa.chunked_array([ids]))
    by_code = np.argsort(codes, kind="stable")
    sorted_codes = codes[by_code]
    is_first = np.ones(len(codes), dtype=bool)
    is_first[1:] = sorted_codes[1:] != sorted_codes[:-1]
    places = np.arange(len(codes))
    occurrence = np.empty(len(codes), dtype=np.int64)
    occurrence[by_code] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    occurrence[codes == NO_OVERRIDE] = 0
    return occurrence


def _dictionary(texts: pa.ChunkedArray) -> tuple[np.ndarray, list[str]]:
    """[N] int32 codes (-1 for null) and the distinct texts."""
    encoded = texts.combine_chunks().dictionary_encode()
    codes = encoded.indices.fill_null(NO_OVERRIDE).to_numpy().astype(np.int32)
    return codes, encoded.dictionary.to_pylist()


def _ranges(counts: np.ndarray) -> np.ndarray:
    """0 .. c - 1 for each count c, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
