"""The loops over tokens behind the streamed prefix plan: merging sorted prompts, comparing and copying them.

Compiled at the first call (seconds), without Python's lock, so that one thread can sort while another reads.
Prompts are flat token_ids [num_tokens] uint32 with offsets [N + 1] int64, as in in_memory.py; `shared` is [N] int64,
the tokens a prompt shares with the one before it.
"""

import numpy as np

from batchinfer.balance.compiled import compiled


@compiled
def sort_prompts(token_ids: np.ndarray, offsets: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort prompts, beginning with a given order: the fewer neighbours are out of order in it, the faster.

    Args:
        order: [N] int64 prompts; equal ones keep it.

    Returns: see `merge_sorted`.
    """
    shared, bounds = np.zeros_like(order), np.empty(len(order) + 1, np.int64)
    num_pieces = 0  # stretches of the order that are sorted already
    for place in range(len(order)):
        one, other = order[max(place - 1, 0)], order[place]
        shared[place] = _common_tokens(token_ids, offsets, one, other, 0)
        if place == 0 or not _is_not_greater(token_ids, offsets, one, other, shared[place]):
            bounds[num_pieces] = place
            num_pieces += 1
    bounds[num_pieces] = len(order)
    return merge_sorted(token_ids, offsets, order, shared, bounds[: num_pieces + 1])


@compiled
def merge_sorted(
    token_ids: np.ndarray, offsets: np.ndarray, order: np.ndarray, shared: np.ndarray, bounds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Merge sorted pieces of an order of prompts; equal prompts keep that order.

    Merge sort that carries common prefixes (Ng and Kakehi 2008): of two prompts, the one that shares more with the
    prompt put out last is the smaller one; tokens are compared only when both share equally much, and from there on.

    Args:
        order: [N] int64 prompts.
        shared: in that order, within each piece; the value of a piece's first prompt is not read.
        bounds: [pieces + 1] int64, where the pieces begin, and N.

    Returns:
        (order, shared): [N] int64 prompts in sorted order, and what each shares with the one before it in that order
        (for the first: 0).
    """
    order, shared = order.copy(), shared.copy()
    next_order, next_shared = np.empty_like(order), np.empty_like(shared)
    while len(bounds) > 2:
        for piece in range(0, len(bounds) - 1, 2):
            first, middle = bounds[piece], bounds[piece + 1]
            end = bounds[min(piece + 2, len(bounds) - 1)]
            _merge_two(token_ids, offsets, order, shared, first, middle, end, next_order, next_shared)
        order, next_order = next_order, order
        shared, next_shared = next_shared, shared
        bounds = np.append(bounds[:-1][::2], bounds[-1:])
    if len(shared):
        shared[0] = 0
    return order, shared


@compiled
def _merge_two(
    token_ids: np.ndarray,
    offsets: np.ndarray,
    order: np.ndarray,
    shared: np.ndarray,
    first: int,
    middle: int,
    end: int,
    next_order: np.ndarray,
    next_shared: np.ndarray,
) -> None:
    # order   [first, middle) left piece | [middle, end) right piece
    left, right = first, middle
    left_shared, right_shared = 0, 0  # with the prompt put out last
    for place in range(first, end):
        if left < middle and right < end and left_shared == right_shared:
            one, other = order[left], order[right]
            common = _common_tokens(token_ids, offsets, one, other, left_shared)
            takes_left = _is_not_greater(token_ids, offsets, one, other, common)
            next_shared[place] = left_shared
            # the one that stays shares this much with the one that goes out now
            if takes_left:
                right_shared = common
            else:
                left_shared = common
        else:
            takes_left = right == end or (left < middle and left_shared > right_shared)
            next_shared[place] = left_shared if takes_left else right_shared
        if takes_left:
            next_order[place] = order[left]
            left += 1
            left_shared = shared[left] if left < middle else 0
        else:
            next_order[place] = order[right]
            right += 1
            right_shared = shared[right] if right < end else 0


@compiled
def _common_tokens(token_ids: np.ndarray, offsets: np.ndarray, one: int, other: int, known: int) -> int:
    """Return the number of tokens in the common prefix of two prompts that share at least `known` tokens."""
    one_start, other_start = offsets[one], offsets[other]
    most = min(offsets[one + 1] - one_start, offsets[other + 1] - other_start)
    common = known
    while common < most and token_ids[one_start + common] == token_ids[other_start + common]:
        common += 1
    return common


@compiled
def _is_not_greater(token_ids: np.ndarray, offsets: np.ndarray, one: int, other: int, common: int) -> bool:
    """Return whether prompt `one` sorts before or equal to prompt `other`; `common`: length of their common prefix."""
    one_place, other_place = offsets[one] + common, offsets[other] + common
    if one_place == offsets[one + 1]:
        return True
    return other_place < offsets[other + 1] and token_ids[one_place] < token_ids[other_place]


@compiled
def count_up_to(
    token_ids: np.ndarray, offsets: np.ndarray, first: int, limit: np.ndarray, is_equal_counted: bool
) -> int:
    """Return the number of prompts of a sorted piece, from `first` on, before the prompt `limit` [num_tokens]."""
    low, high = first, len(offsets) - 1
    while low < high:
        middle = (low + high) // 2
        prompt = token_ids[offsets[middle] : offsets[middle + 1]]
        common = common_prefix(prompt, limit)
        if common == len(limit):
            is_counted = is_equal_counted and common == len(prompt)
        else:
            is_counted = common == len(prompt) or prompt[common] < limit[common]
        if is_counted:
            low = middle + 1
        else:
            high = middle
    return low - first


@compiled
def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of leading tokens that two prompts share."""
    most = min(len(one), len(other))
    common = 0
    while common < most and one[common] == other[common]:
        common += 1
    return common


@compiled
def take_tails(token_ids: np.ndarray, offsets: np.ndarray, order: np.ndarray, skipped: np.ndarray) -> np.ndarray:
    """Concatenate the prompts order[k], each without its first skipped[k] tokens."""
    size = 0
    for k in range(len(order)):
        size += offsets[order[k] + 1] - offsets[order[k]] - skipped[k]
    taken = np.empty(size, dtype=token_ids.dtype)
    done = 0
    for k in range(len(order)):
        for place in range(offsets[order[k]] + skipped[k], offsets[order[k] + 1]):
            taken[done] = token_ids[place]
            done += 1
    return taken


@compiled
def join_heads(tails: np.ndarray, offsets: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """Invert `take_tails` for sorted prompts: prompt k begins with the first heads[k] tokens of prompt k - 1.

    Args:
        tails: flat tokens after the heads.
        offsets: [N + 1] int64 of the whole prompts in the result.
        heads: [N] int64; heads[0] is 0.
    """
    joined = np.empty(offsets[-1], dtype=tails.dtype)
    done = 0
    for k in range(len(heads)):
        start, middle = offsets[k], offsets[k] + heads[k]
        for place in range(start, middle):
            joined[place] = joined[offsets[k - 1] + place - start]
        for place in range(middle, offsets[k + 1]):
            joined[place] = tails[done]
            done += 1
    return joined
