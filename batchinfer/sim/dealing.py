"""The evenness of samples of a workload, dealt by the engine's own balancers.

Prefill: work units, dealt to ranks and cut into steps (balance/prefill_steps.py), in which ranks wait for each other.
Decode: a simulated run through a part of the workload (balance/decode_run.py), in which requests come and go. A server,
for comparison, deals prompts as they arrive (arriving.py).
"""

from typing import NamedTuple

import numpy as np

from batchinfer.balance.decode_loads import MOVE_STEPS_BETWEEN_HOSTS
from batchinfer.balance.decode_run import Answers, PaperRanks, ReadyPrompts
from batchinfer.balance.decode_series import EVEN, Balance
from batchinfer.balance.prefill import assign_prefill
from batchinfer.balance.prefill_steps import max_over_mean, plan_rank_steps
from batchinfer.balance.request_load import ONE_PER_TOKEN, RequestLoad
from batchinfer.sim.arriving import step_loads
from batchinfer.sim.workload import Workload

SAMPLED_UNITS = 2
UNIT_STEPS = 25  # prefill steps of a work unit
ARRIVING_STEPS = 24  # of a server
FILLINGS = 3  # a decode unit's slots are filled this many times
SAMPLED_RANKS = 32  # larger units are dealt as if to this number: about as even, and much faster


class Skews(NamedTuple):
    """Work of the busiest GPU of each step, summed over steps, by the sum of the means."""

    new_tokens: float
    attention: float
    # tokens whose keys and values are expanded, by those of parts of `Workload.part_tokens`: each part of a prompt
    # expands all tokens before it, and even steps cut prompts finely
    expanded: float = 1.0


class Deals:
    """The balancers' deals of one workload, each made once.

    Args:
        num_units: prefill units in the mean, from all over the workload; a few long prompts make it vary.
        request_load: the cost of a request in a decode step.
    """

    def __init__(
        self, workload: Workload, num_units: int = SAMPLED_UNITS, *, request_load: RequestLoad = ONE_PER_TOKEN
    ) -> None:
        self._workload, self._num_units, self._request_load = workload, num_units, request_load
        self._prefill: dict[tuple[int, int], Skews] = {}
        self._decode: dict[tuple[int, int], Balance] = {}

    def prefill(self, num_ranks: int, tokens_per_rank: int) -> Skews:
        """Return the skews of prefill steps with this number of new tokens per rank; 1.0 if the workload fills none."""
        key = min(num_ranks, SAMPLED_RANKS), tokens_per_rank
        if key not in self._prefill:
            self._prefill[key] = self._prefill_skews(*key)
        return self._prefill[key]

    def arriving(self, num_ranks: int, tokens_per_rank: int) -> Skews:
        """Return the skews of prefill steps of a server, which deals prompts as they arrive."""
        work, ranks = self._workload, min(num_ranks, SAMPLED_RANKS)
        num = int(ARRIVING_STEPS * ranks * tokens_per_rank / max(1.0, float(work.new_tokens.mean())))
        loads = step_loads(
            work.new_tokens[:num],
            work.cached_tokens[:num],
            num_ranks=ranks,
            tokens_per_rank=tokens_per_rank,
            part_tokens=work.part_tokens,
        )
        if not len(loads):
            return Skews(1.0, 1.0)
        tokens, attention = max_over_mean(loads).tolist()
        return Skews(tokens, attention)

    def decode(self, num_ranks: int, requests_per_rank: int) -> Balance:
        """Return the balance of KV tokens while a unit is full; even if the workload does not fill one."""
        key = min(num_ranks, SAMPLED_RANKS), requests_per_rank
        if key not in self._decode:
            self._decode[key] = self._decode_balance(*key)
        return self._decode[key]

    def _prefill_skews(self, num_ranks: int, tokens_per_rank: int) -> Skews:
        new, cached = self._workload.new_tokens, self._workload.cached_tokens
        per_step = max(num_ranks, int(tokens_per_rank * num_ranks / max(1.0, float(new.mean()))))
        steps, expanded, expected = [], 0, 0
        for part in self._samples(min(UNIT_STEPS, max(1, len(new) // per_step)) * per_step):
            plans = plan_rank_steps(
                new[part] + cached[part],
                cached[part],
                assign_prefill(new[part], cached[part], num_ranks=num_ranks),
                num_ranks=num_ranks,
                most_tokens=tokens_per_rank,
                are_stored=True,
            )
            steps.append(np.stack([plan.loads() for plan in plans], axis=1))
            expanded += sum(int(plan.end_P.sum()) for plan in plans)
            expected += int(self._workload.expanded_tokens[part].sum())
        if not steps:
            return Skews(1.0, 1.0)
        tokens, attention = max_over_mean(np.concatenate(steps)).tolist()
        return Skews(tokens, attention, expanded / expected)

    def _decode_balance(self, num_ranks: int, requests_per_rank: int) -> Balance:
        work, num_slots = self._workload, num_ranks * requests_per_rank
        if len(work) < num_slots:
            return EVEN
        first = max(0, (len(work) - FILLINGS * num_slots) // 2)
        part = slice(first, first + FILLINGS * num_slots)
        prompts, outputs = work.prompt_tokens[part], work.output_tokens[part]
        ranks = PaperRanks(
            Answers(prompts, outputs, outputs, np.full(len(prompts), np.nan)),
            num_ranks,
            max_requests=requests_per_rank,
            request_load=self._request_load,
            move_steps=MOVE_STEPS_BETWEEN_HOSTS,
        )
        return ranks.run(ReadyPrompts(len(prompts))).kv_balance(only_full=True) or EVEN

    def _samples(self, batch: int) -> list[slice]:
        """Return whole batches that begin at even distances."""
        num = len(self._workload)
        starts = np.linspace(0, num, self._num_units, endpoint=False).astype(np.int64)
        return [slice(start, start + batch) for start in starts if start + batch <= num]
