"""Requests of the ordered rows: equal greedy requests are merged, samples are expanded."""

from dataclasses import dataclass

import numpy as np

from batchinfer.manifest import Manifest
from batchinfer.plan.prefix import PrefixPlan
from batchinfer.plan.prompt_groups import group_depths
from batchinfer.plan.rows import RowTable, first_equal, load_ids, take
from batchinfer.records import Shard, sampling_key
from batchinfer.rundir import RunDir


@dataclass(frozen=True, slots=True)
class PlannedRequests:
    """Requests in the order of execution (Q), and duplicates (D); indices are rows of the RowTable.

    The integers are int32 where they fit; a column of equal values may be a view of one.
    """

    row_index: np.ndarray  # [Q]
    place: np.ndarray  # [Q], place of the prompt in the prefix plan's order; increasing except after scored.py
    sample: np.ndarray  # [Q]; for a row with choices, the number of the choice
    cached_tokens: np.ndarray  # [Q], prompt tokens predicted to be in memory
    score_from: np.ndarray  # [Q], see records.Request: of the first sample
    shared_tokens: np.ndarray  # [Q], like cached_tokens, but the last token may be among them
    group_depth: np.ndarray  # [Q], common tokens of the request's prompt group (prompt_groups.py)
    duplicate_row: np.ndarray  # [D]
    duplicate_sample: np.ndarray  # [D]
    original_row: np.ndarray  # [D], the row (its first sample) that answers it
    distinct_tokens: int


def plan_requests(rows: RowTable, prefixes: PrefixPlan) -> PlannedRequests:
    """Expand the ordered rows to requests; compute equal greedy requests once.

    Greedy requests are equal if prompt, max_tokens, sampling and scored tokens are equal. The first in input order is
    computed, with sample 0, and its answer is that of all others and of all further samples. Sampled requests are never
    merged, because each has its own random draws.
    """
    order, lengths = prefixes.order, rows.num_tokens
    greedy = rows.is_greedy[rows.sampling_code]
    original = _originals(rows, greedy, order, prefixes.shared_tokens)
    places = np.arange(len(order), dtype=order.dtype)
    is_computed = ~greedy | (original == places)
    one, none = np.int32(1), np.int32(0)
    counts = (np.where(greedy, one, rows.n) * is_computed)[order]
    place = np.repeat(places, counts)
    row_index = order[place]
    sample = _ranges(counts)
    # the first sample of a prompt finds what its predecessor shares; further samples all but their last token
    cached = np.where(sample == 0, prefixes.cached_tokens[row_index], lengths[row_index] - one)
    score_from = np.broadcast_to(none, len(place))
    if rows.score_from.any():
        score_from = np.where(sample == 0, rows.score_from[row_index], none)
        cached = np.where(score_from > 0, np.minimum(cached, score_from - one), cached)  # the others give logits
    shared = np.where(sample == 0, prefixes.shared_tokens[row_index], lengths[row_index])
    num_copies = np.where(greedy, rows.n - is_computed, none)
    duplicate_row = np.repeat(places, num_copies)
    return PlannedRequests(
        row_index=row_index,
        place=place,
        sample=sample + rows.choice[row_index] if rows.choice.any() else sample,
        cached_tokens=cached,
        score_from=score_from,
        shared_tokens=shared,
        group_depth=group_depths(prefixes.shared_tokens[order])[place],
        duplicate_row=duplicate_row,
        duplicate_sample=_ranges(num_copies) + (is_computed + rows.choice)[duplicate_row],
        original_row=original[duplicate_row],
        distinct_tokens=prefixes.distinct_tokens,
    )


def sampling_keys(
    run: RunDir,
    manifest: Manifest,
    shards: list[Shard],
    rows: RowTable,
    planned: PlannedRequests,
) -> np.ndarray:
    """Return [Q] uint64, the keys of the requests' random draws; 0 for greedy requests, which have no draws."""
    codes = take(rows.sampling_code, planned.row_index)
    sampled = np.flatnonzero(~rows.is_greedy[codes])
    if len(sampled) == 0:
        return np.broadcast_to(np.uint64(0), len(codes))
    keys = np.zeros(len(codes), dtype=np.uint64)
    names = {shard.index: shard.name for shard in shards}
    ids = load_ids(run, manifest, shards)
    for place in sampled:
        index = planned.row_index[place]
        row_id = ids.text[index].as_py()
        if row_id is None:
            row_id = f"{names[int(rows.shard[index])]}:{rows.row[index]}"
        seed = int(rows.seed[codes[place]])
        keys[place] = sampling_key(seed, row_id, int(ids.occurrence[index]), int(planned.sample[place]))
    return keys


def _originals(rows: RowTable, greedy: np.ndarray, order: np.ndarray, shared_tokens: np.ndarray) -> np.ndarray:
    """Return [R] for each greedy row the first equal row in input order, for each other row the row itself."""
    original = np.arange(len(order), dtype=order.dtype)
    lengths = rows.num_tokens[order]
    repeats = np.zeros(len(order), dtype=bool)
    repeats[1:] = (shared_tokens[order][1:] == lengths[1:]) & (lengths[1:] == lengths[:-1])
    has_equal = repeats.copy()
    has_equal[:-1] |= repeats[1:]
    places = np.flatnonzero(has_equal & greedy[order])
    if len(places) == 0:
        return original
    prompt = np.cumsum(~repeats)[places]
    index = order[places]
    # equal prompts are in input order already, and the sort keeps that order for equal keys
    by_key = np.lexsort((rows.score_from[index], rows.max_tokens[index], rows.sampling_code[index], prompt))
    prompt, index = prompt[by_key], index[by_key]
    original[index] = index[
        first_equal(prompt, rows.sampling_code[index], rows.max_tokens[index], rows.score_from[index])
    ]
    return original


def _ranges(counts: np.ndarray) -> np.ndarray:
    """Return the concatenated ranges 0 .. c - 1 of all counts c as int32."""
    if counts.max(initial=0) <= 1:
        return np.broadcast_to(np.int32(0), int(counts.sum()))
    return (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.int32)
