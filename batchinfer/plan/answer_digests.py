"""Digests of requests: equal for two requests whose answers are equal on the same model and kind of machine."""

# K requests

import hashlib
import json

import numpy as np
import pyarrow as pa

from batchinfer.data.schemas.internal import ANSWER_DIGEST
from batchinfer.plan.rows import NO_CODE, SamplingTexts
from batchinfer.records import Sampling, sampling_to_json

_DIGEST_BYTES = ANSWER_DIGEST.byte_width
# n changes no sample, and the seed acts through the sampling key alone; max_tokens counts as cut to the window
_WITHOUT_EFFECT = ("n", "seed", "max_tokens")


class AnswerDigests:
    """Digests of a plan's requests over prompt tokens, sampling, scored tokens and sampling key.

    Args:
        texts: distinct sampling overrides of the rows.
        default: the job's own sampling.
    """

    def __init__(self, texts: SamplingTexts, default: Sampling) -> None:
        self._texts, self._default = texts, default
        self._started: dict[int, hashlib.blake2b] = {}  # by sampling code

    def of(
        self,
        token_ids: pa.ListArray,
        sampling_codes: np.ndarray,
        max_tokens: np.ndarray,
        score_from: np.ndarray,
        keys: np.ndarray,
    ) -> pa.Array:
        """Return [K] digests.

        Args:
            token_ids: [K] prompts.
            sampling_codes: [K] indices into the overrides, or NO_CODE.
            max_tokens: [K] limits, cut to the model's window.
            score_from: [K], see records.Request.
            keys: [K] uint64 sampling keys, 0 for greedy requests.
        """
        tokens = token_ids.flatten().to_numpy().astype("<i4", copy=False).tobytes()
        ends = (4 * np.cumsum(token_ids.value_lengths().to_numpy())).tolist()
        numbers = np.stack([column.astype(np.uint64) for column in (max_tokens, score_from, keys)], axis=1)
        fixed, width = numbers.astype("<u8").tobytes(), 8 * numbers.shape[1]
        digests, begin = [], 0
        for place, (code, end) in enumerate(zip(sampling_codes.tolist(), ends, strict=True)):
            hasher = self._of_sampling(code).copy()
            hasher.update(fixed[place * width : (place + 1) * width])
            hasher.update(tokens[begin:end])
            digests.append(hasher.digest())
            begin = end
        return pa.array(digests, ANSWER_DIGEST)

    def _of_sampling(self, code: int) -> hashlib.blake2b:
        """Return the state of the hash after the sampling settings."""
        if code not in self._started:
            text = sampling_to_json(self._default) if code == NO_CODE else self._texts[code]
            settings = {name: value for name, value in json.loads(text).items() if name not in _WITHOUT_EFFECT}
            data = json.dumps(settings, sort_keys=True).encode()
            started = hashlib.blake2b(len(data).to_bytes(8, "little"), digest_size=_DIGEST_BYTES)
            started.update(data)
            self._started[code] = started
        return self._started[code]
