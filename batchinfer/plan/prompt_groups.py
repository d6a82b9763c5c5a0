"""Groups of prompts with a long common start, whose answers are expected to have similar lengths."""

# N prompts in prefix order, K requests in the order of execution

import hashlib
from collections.abc import Iterator

import numpy as np

MIN_PROMPTS = 16  # of a group: fewer do not predict the next answer's length
DEPTH_STEP = 8  # depths are multiples of this, so that another job with the same instructions has the same groups


def group_depths(shared_tokens: np.ndarray) -> np.ndarray:
    """Return the tokens of the longest start that each prompt shares with MIN_PROMPTS - 1 neighbours or more.

    Args:
        shared_tokens: [N] integers, tokens shared with the prompt before it; the first entry is not read.

    Returns:
        [N] int32 tokens, multiples of DEPTH_STEP; 0: no group.
    """
    num_prompts = len(shared_tokens)
    depths = np.zeros(num_prompts, dtype=np.int32)
    num_windows = num_prompts - MIN_PROMPTS + 1
    if num_windows < 1:
        return depths
    # common tokens of all prompts in the window that begins at k
    of_window = np.asarray(shared_tokens[1 : 1 + num_windows]).astype(np.int32)
    for place in range(2, MIN_PROMPTS):
        np.minimum(of_window, shared_tokens[place : place + num_windows], out=of_window, casting="unsafe")
    of_window -= of_window % DEPTH_STEP
    for place in range(MIN_PROMPTS):
        part = depths[place : place + num_windows]
        np.maximum(part, of_window, out=part)
    return depths


def group_ids(
    token_ids: np.ndarray, offsets: np.ndarray, depths: np.ndarray, shared_tokens: np.ndarray, known: dict[int, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of the requests' groups and the expected lengths of their answers.

    Args:
        token_ids: flat [num_tokens] integers.
        offsets: [K + 1] int64, request k's prompt is token_ids[offsets[k]:offsets[k + 1]].
        depths: [K] from `group_depths`.
        shared_tokens: [K] tokens shared with the request before it; the first entry is not read.
        known: answer lengths by group, of an earlier run. A prompt's deepest known group counts; key 0 is for prompts
            without a known group.

    Returns:
        ([K] int64 group ids, 0 for none; [K] float32 expected answer tokens, NaN if not known).
    """
    group_of_request = group_numbers(depths, shared_tokens)
    places = np.flatnonzero(np.diff(group_of_request, prepend=-1))
    ids = np.zeros(len(places), dtype=np.int64)
    expected = np.full(len(places), np.nan, dtype=np.float32)
    for group, place in enumerate(places.tolist()):
        prompt = token_ids[offsets[place] : offsets[place + 1]]
        depth = int(depths[place])
        if not known:
            ids[group] = group_id(prompt, depth)
            continue
        expected[group] = known.get(0, np.nan)
        for name in _ids_down_to(prompt, depth):
            ids[group] = name
            expected[group] = known.get(name, expected[group])
    return ids[group_of_request], expected[group_of_request]


def group_numbers(depths: np.ndarray, shared_tokens: np.ndarray) -> np.ndarray:
    """Return [K] int64, the numbers of groups in the order of execution, from 0; neighbours without a group have one.

    Args:
        depths: [K] from `group_depths`.
        shared_tokens: [K] tokens shared with the request before it; the first entry is not read.
    """
    starts = np.ones(len(depths), dtype=bool)
    starts[1:] = (depths[1:] != depths[:-1]) | (shared_tokens[1:] < depths[1:])
    return np.cumsum(starts) - 1


def group_id(prompt: np.ndarray, depth: int) -> int:
    """Return a hash (63 bits) of the first `depth` tokens of a prompt, the same in every job; 0 for no tokens."""
    return _number(hashlib.blake2b(_as_bytes(prompt[:depth]), digest_size=8)) if depth else 0


def _ids_down_to(prompt: np.ndarray, depth: int) -> Iterator[int]:
    """Yield `group_id` for every multiple of DEPTH_STEP up to `depth`; each token is hashed once."""
    start, hasher = _as_bytes(prompt[:depth]), hashlib.blake2b(digest_size=8)
    step = len(start) // max(depth, 1) * DEPTH_STEP
    for first in range(0, len(start), step or 1):
        hasher.update(start[first : first + step])
        yield _number(hasher.copy())


def _as_bytes(tokens: np.ndarray) -> bytes:
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


def _number(hasher: hashlib.blake2b) -> int:
    return int.from_bytes(hasher.digest(), "little") >> 1
