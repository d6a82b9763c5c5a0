"""The global prefix plan in memory: the order in which each distinct prefix is computed once."""

from dataclasses import dataclass

import numpy as np

CHUNK_TOKENS = 1_000_000  # tokens compared at once; bounds the scratch memory


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """An order of requests and what it shares.

    Attributes:
        order: [N] int64 (int32 if streamed), order[k] is the k-th request to run.
        cached_tokens: [N] the same type, by request: tokens of its prompt that an earlier one in the order has
            computed; always less than its length, since the last token must run to give logits.
        shared_tokens: [N] by request, the same without that limit (equal to the length for a repeated prompt).
        distinct_tokens: edges of the token trie over all prompts; no order can compute fewer.
    """

    order: np.ndarray
    cached_tokens: np.ndarray
    shared_tokens: np.ndarray
    distinct_tokens: int


def plan_prefixes(token_ids: np.ndarray, offsets: np.ndarray, *, block_tokens: int) -> PrefixPlan:
    """Order prompts so that those with a common prefix run one after the other.

    Lexicographic order walks the token trie depth first: the longest prefix that a prompt shares with any earlier one
    is the one it shares with its predecessor. So each edge of the trie is computed once, and only the pages on the
    path to the current prompt must be kept. Equal prompts keep their input order.

    Args:
        token_ids: flat [num_tokens] integers, all prompts one after the other.
        offsets: [N + 1] int64, prompt i is token_ids[offsets[i]:offsets[i + 1]].
        block_tokens: tokens per block of the store on disk, at least 1 (in memory sharing is by token).

    Raises:
        ValueError: offsets do not describe token_ids, or block_tokens < 1.
    """
    offsets = np.asarray(offsets, dtype=np.int64)
    check_prompts(token_ids, offsets, block_tokens)
    num_prompts = len(offsets) - 1
    # big-endian bytes of non-negative integers sort like the integers
    big_endian = np.ascontiguousarray(token_ids).astype(">u2" if token_ids.dtype == np.uint16 else ">u4")
    keys = [big_endian[offsets[i] : offsets[i + 1]].tobytes() for i in range(num_prompts)]
    order = np.array(sorted(range(num_prompts), key=keys.__getitem__), dtype=np.int64)
    del keys, big_endian
    shared = np.zeros(num_prompts, dtype=np.int64)
    shared[order] = _shared_with_predecessor(np.asarray(token_ids), offsets, order)
    lengths = np.diff(offsets)
    return prefix_plan(order, shared, lengths)


def prefix_plan(order: np.ndarray, shared_tokens: np.ndarray, lengths: np.ndarray) -> PrefixPlan:
    """Return the prefix plan for an order of requests.

    Args:
        order: [N] integers, the requests in their order.
        shared_tokens: [N] integers by request, tokens shared with the request before it in the order.
        lengths: [N] integers by request, tokens of its prompt.
    """
    return PrefixPlan(
        order=order,
        cached_tokens=np.minimum(shared_tokens, np.maximum(lengths - 1, 0), dtype=shared_tokens.dtype),
        shared_tokens=shared_tokens,
        distinct_tokens=int((lengths - shared_tokens).sum()),
    )


def last_units(
    shared_tokens: np.ndarray, unit_starts: np.ndarray, *, block_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the last work unit that uses each KV block that outlives the first unit that computes it.

    In prefix order the prompts with a block are together. So a block outlives its unit only if the first prompt of the
    next unit shares it, and is used up to the first unit of which a prompt shares less with the one before it.

    Args:
        shared_tokens: [N] integers in the order of execution, tokens shared with the prompt before it.
        unit_starts: [U + 1] integers, first prompt of each unit, and N; no unit is empty.
        block_tokens: tokens per block; only whole blocks count.

    Returns:
        ([B] int64 first prompts, rising; [B] last units): of the blocks that a prompt is the first to compute, in
        their order, which are leading ones.
    """
    starts = unit_starts[:-1].tolist()
    at_start = shared_tokens[unit_starts[:-1]].tolist()
    least = np.minimum.reduceat(shared_tokens, unit_starts[:-1]).tolist() if starts else []  # also of its first prompt
    firsts, lasts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for unit, begin in enumerate(starts[:-1]):
        ends = np.arange(block_tokens, at_start[unit + 1] + 1, block_tokens)  # of blocks that the next unit shares
        if len(ends) == 0:
            continue
        # with the last prompt of the unit, every prompt from a place on shares at least this much
        common = np.minimum.accumulate(shared_tokens[begin : starts[unit + 1]][::-1])
        if unit == 0:
            common[-1] = 0  # nothing comes before it
        counts = np.searchsorted(-common, -ends, side="right")  # of prompts after the first with a block
        is_first_here = counts < len(common)  # else an earlier unit computes the block
        ends, counts = ends[is_first_here], counts[is_first_here]
        last = np.full(len(ends), unit + 1)
        num_going_on, following = len(ends), unit + 1
        while following + 1 < len(starts):
            most = min(least[following], at_start[following + 1])
            num_going_on = int(np.searchsorted(ends[:num_going_on], most, side="right"))
            if num_going_on == 0:
                break
            following += 1
            last[:num_going_on] = following
        firsts.append(starts[unit + 1] - 1 - counts)
        lasts.append(last)
    first = np.concatenate(firsts)
    by_prompt = np.argsort(first, kind="stable")
    return first[by_prompt], np.concatenate(lasts)[by_prompt]


def check_prompts(token_ids: np.ndarray, offsets: np.ndarray, block_tokens: int, largest: int = 2**32 - 1) -> None:
    """Refuse what no prefix plan can be made of (ValueError, see `plan_prefixes`), or token ids above `largest`."""
    if block_tokens < 1:
        raise ValueError(f"block_tokens is {block_tokens}, but a block has at least one token")
    if len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != len(token_ids) or (np.diff(offsets) < 0).any():
        raise ValueError(f"offsets must rise from 0 to the number of tokens, {len(token_ids)}")
    if len(token_ids) and (np.min(token_ids) < 0 or np.max(token_ids) > largest):
        raise ValueError(f"token ids must be between 0 and {largest}")


def _shared_with_predecessor(token_ids: np.ndarray, offsets: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return [N] int64, the tokens that each prompt of the order shares with the one before it; 0 for the first."""
    lengths = np.diff(offsets)[order]
    starts = offsets[:-1][order]
    shared = np.zeros(len(order), dtype=np.int64)
    # compared: how many leading tokens of prompt k its predecessor has at all
    compared = np.minimum(lengths[1:], lengths[:-1])
    ends = np.cumsum(compared)
    first = 0
    while first < len(compared):
        base = ends[first - 1] if first else 0
        last = max(int(np.searchsorted(ends, base + CHUNK_TOKENS, side="right")), first + 1)
        counts = compared[first:last]
        position = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        here = token_ids[np.repeat(starts[1 + first : 1 + last], counts) + position]
        before = token_ids[np.repeat(starts[first:last], counts) + position]
        shared[1 + first : 1 + last] = _first_mismatch(here != before, counts)
        first = last
    return shared


def _first_mismatch(differs: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return [M] int64, the index of the first True in each of M consecutive runs of flags, else the run's length.

    Args:
        differs: flags of all runs.
        counts: [M] lengths of the runs.
    """
    ends = np.cumsum(counts)
    starts = ends - counts
    places = np.flatnonzero(differs)
    next_place = np.searchsorted(places, starts)
    padded = np.append(places, len(differs))
    return np.minimum(padded[next_place], ends) - starts
