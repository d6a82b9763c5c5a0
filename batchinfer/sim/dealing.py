"""How evenly the real balancers deal out sampled batches of a workload.

Parts of one prompt count like prompts: they run in steps that follow each other, which sampled batches represent.
"""

from typing import NamedTuple

import numpy as np

from batchinfer.balance.decode import assign_decode
from batchinfer.balance.prefill import assign_prefill, attention_work
from batchinfer.sim.workload import Workload, parts_of_prompts

SAMPLED_BATCHES = 4
SAMPLED_RANKS = 32  # larger units are dealt out as to this number: that is about as even, and much sooner known


class Skews(NamedTuple):
    """Work of the busiest GPU of a unit by the mean."""

    new_tokens: float
    attention: float


class Deals:
    """The balancers' deals of one workload, each made once.

    Args:
        num_batches: to take the mean over, from all over the workload; a few very long prompts make it vary.
    """

    def __init__(self, workload: Workload, num_batches: int = SAMPLED_BATCHES) -> None:
        self._workload, self._num_batches = workload, num_batches
        self._prefill: dict[tuple[int, int], Skews] = {}
        self._decode: dict[tuple[int, int], float] = {}

    def prefill(self, num_ranks: int, tokens_per_rank: int) -> Skews:
        """Of prefill steps with this number of new tokens per rank; even for a workload that does not fill one."""
        key = min(num_ranks, SAMPLED_RANKS), tokens_per_rank
        if key not in self._prefill:
            self._prefill[key] = self._prefill_skews(*key)
        return self._prefill[key]

    def decode(self, num_ranks: int, requests_per_rank: int) -> float:
        """KV tokens of the busiest rank of a full unit; even for a workload that does not fill one."""
        key = min(num_ranks, SAMPLED_RANKS), requests_per_rank
        if key not in self._decode:
            self._decode[key] = self._decode_skew(*key)
        return self._decode[key]

    def _prefill_skews(self, num_ranks: int, tokens_per_rank: int) -> Skews:
        per_prompt = max(1.0, float(self._workload.new_tokens.mean()))
        tokens, attention = [], []
        for part in self._samples(max(num_ranks, int(tokens_per_rank * num_ranks / per_prompt))):
            new, cached = parts_of_prompts(self._workload, part)
            rank = assign_prefill(new, cached, num_ranks=num_ranks)
            tokens.append(_max_over_mean(rank, new, num_ranks))
            attention.append(_max_over_mean(rank, attention_work(new, cached), num_ranks))
        return Skews(float(np.mean(tokens or [1.0])), float(np.mean(attention or [1.0])))

    def _decode_skew(self, num_ranks: int, requests_per_rank: int) -> float:
        found = []
        for part in self._samples(num_ranks * requests_per_rank):
            # requests of a running unit are anywhere in their answers
            kv = self._workload.prompt_tokens[part] + self._workload.output_tokens[part] // 2
            found.append(_max_over_mean(assign_decode(kv, num_ranks=num_ranks), kv, num_ranks))
        return float(np.mean(found or [1.0]))

    def _samples(self, batch: int) -> list[slice]:
        """Whole batches that begin at even distances."""
        num = len(self._workload)
        starts = np.linspace(0, num, self._num_batches, endpoint=False).astype(np.int64)
        return [slice(start, start + batch) for start in starts if start + batch <= num]


def _max_over_mean(rank: np.ndarray, sizes: np.ndarray, num_ranks: int) -> float:
    loads = np.bincount(rank, sizes, minlength=num_ranks)
    return float(loads.max() / loads.mean())
