"""Log-probabilities of given tokens, a few rows of logits at a time: a prompt has as many rows as tokens."""

# N tokens to be scored, V vocabulary, A alternatives

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from batchinfer.model.sampling import LogitOps

ROWS = 64  # logits that are in memory at once; what they are has no effect on the result


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of given tokens under the raw logits (before temperature)."""

    logprobs: torch.Tensor  # [N] float64
    top_tokens: torch.Tensor  # [N, A] int64, the most likely tokens in their place, most likely first
    top_logprobs: torch.Tensor  # [N, A] float64

    @classmethod
    def joined(cls, parts: list[Scores]) -> Scores:
        """Return the scores of all parts, concatenated."""
        return cls(
            torch.cat([part.logprobs for part in parts]),
            torch.cat([part.top_tokens for part in parts]),
            torch.cat([part.top_logprobs for part in parts]),
        )


def score(
    logits_of: Callable[[slice], torch.Tensor],
    first: int,
    tokens_N: torch.Tensor,
    num_alternatives: int,
    ops: LogitOps,
) -> Scores:
    """Score tokens, with at most ROWS rows of logits at a time.

    Args:
        logits_of: [n, V] float32, the logits of these rows.
        first: row under whose logits the first token is scored; the others follow.
        tokens_N: [N] int64.
        num_alternatives: A, at most V.
    """
    num_tokens, device = len(tokens_N), tokens_N.device
    # made first: what is kept of each part would lie between the freed logits, which could then not be used again
    scores = Scores(
        torch.empty(num_tokens, dtype=torch.float64, device=device),
        torch.empty(num_tokens, num_alternatives, dtype=torch.int64, device=device),
        torch.empty(num_tokens, num_alternatives, dtype=torch.float64, device=device),
    )
    for start in range(0, num_tokens, ROWS):
        part = slice(start, start + ROWS)
        logits_NV = logits_of(slice(first + part.start, first + min(part.stop, num_tokens)))
        total_N = ops.log_sum_exp(logits_NV)
        scores.logprobs[part] = logits_NV.gather(1, tokens_N[part, None])[:, 0].double() - total_N
        scores.top_tokens[part], top_logits_NA = ops.most_likely(logits_NV, num_alternatives)
        scores.top_logprobs[part] = top_logits_NA.double() - total_N[:, None]
        del logits_NV
    return scores
