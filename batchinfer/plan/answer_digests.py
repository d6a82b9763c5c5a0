"""Digests of requests: equal for two requests whose answers are equal on the same model and kind of machine."""

# K requests

import hashlib
import json
import struct

import numpy as np
import pyarrow as pa

from batchinfer.records import Sampling

_DIGEST_BYTES = 16
ANSWER_DIGEST = pa.binary(_DIGEST_BYTES)
# n changes no sample, and the seed acts through the sampling key alone; max_tokens counts as cut to the window
_WITHOUT_EFFECT = ("n", "seed", "max_tokens")
_SETTINGS = tuple(name for name in Sampling.__struct_fields__ if name not in _WITHOUT_EFFECT)


def sampling_digest(sampling: Sampling) -> tuple[int, int]:
    """Return a 128-bit digest, in two halves, of the settings that decide an answer."""
    settings = {name: getattr(sampling, name) for name in _SETTINGS}
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16).digest()
    first, second = struct.unpack("<QQ", digest)
    return first, second


def answer_digests(
    token_ids: pa.ListArray,
    sampling_digests: np.ndarray,
    max_tokens: np.ndarray,
    score_from: np.ndarray,
    keys: np.ndarray,
) -> pa.Array:
    """Return [K] digests over prompt tokens, sampling, scored tokens and sampling key.

    Args:
        token_ids: [K] prompts.
        sampling_digests: [K, 2] uint64, of sampling_digest.
        max_tokens: [K] limits, cut to the model's window.
        score_from: [K], see records.Request.
        keys: [K] uint64 sampling keys, 0 for greedy requests.
    """
    tokens = memoryview(token_ids.flatten().to_numpy().astype("<i4", copy=False).view(np.uint8))
    ends = (4 * np.cumsum(token_ids.value_lengths().to_numpy())).tolist()
    numbers = np.stack([column.astype(np.uint64) for column in (max_tokens, score_from, keys)], axis=1)
    fixed = memoryview(np.concatenate([sampling_digests, numbers], axis=1).astype("<u8").tobytes())
    width, digests, begin = len(fixed) // max(len(ends), 1), [], 0
    for place, end in enumerate(ends):
        hasher = hashlib.blake2b(fixed[place * width : (place + 1) * width], digest_size=_DIGEST_BYTES)
        hasher.update(tokens[begin:end])
        digests.append(hasher.digest())
        begin = end
    return pa.Array.from_buffers(ANSWER_DIGEST, len(ends), [None, pa.py_buffer(b"".join(digests))])
