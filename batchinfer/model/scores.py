"""Log-probabilities of given tokens, a few rows of logits at a time: a prompt has as many rows as tokens."""

# N tokens to be scored, V vocabulary, A alternatives

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

ROWS = 64  # logits that are in memory at once; what they are has no effect on the result


@dataclass(frozen=True, slots=True)
class Scores:
    """What the raw logits (before temperature) say of given tokens."""

    logprobs: torch.Tensor  # [N] float64
    top_tokens: torch.Tensor  # [N, A] int64, the most likely tokens in their place, most likely first
    top_logprobs: torch.Tensor  # [N, A] float64

    @classmethod
    def joined(cls, parts: list[Scores]) -> Scores:
        """One after the other."""
        return cls(
            torch.cat([part.logprobs for part in parts]),
            torch.cat([part.top_tokens for part in parts]),
            torch.cat([part.top_logprobs for part in parts]),
        )


def score(
    logits_of: Callable[[slice], torch.Tensor],
    first: int,
    tokens_N: torch.Tensor,
    log_sum_exp: Callable[[torch.Tensor], torch.Tensor],
    num_alternatives: int,
) -> Scores:
    """Score tokens with never more than ROWS rows of logits.

    Args:
        logits_of: [n, V] float32, the logits of these rows.
        first: row under whose logits the first token is scored; the others follow.
        tokens_N: [N] int64.
        num_alternatives: A, at most V.
        log_sum_exp: as in batchinfer_kernels.reference.rows.
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
        total_N = log_sum_exp(logits_NV)
        scores.logprobs[part] = logits_NV.gather(1, tokens_N[part, None])[:, 0].double() - total_N
        scores.top_tokens[part], top_logits_NA = most_likely(logits_NV, num_alternatives)
        scores.top_logprobs[part] = top_logits_NA.double() - total_N[:, None]
        del logits_NV
    return scores


def most_likely(logits_NV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of the largest logits, largest first and the lowest id first among equals.

    So a row's first tokens do not depend on how many are asked for, which its company decides; torch.topk's may. The
    host waits for nothing on a device.

    Returns:
        ([N, A] int64 tokens, [N, A] their logits); A is `count`, or V if that is less.
    """
    if not logits_NV.is_cpu:
        return _largest_keys(logits_NV, min(count, logits_NV.shape[1]))
    values_NA, tokens_NA = torch.topk(logits_NV, min(count, logits_NV.shape[1]), dim=-1)
    if not values_NA.shape[1]:
        return tokens_NA, values_NA
    tokens_NA, order_NA = tokens_NA.sort(dim=1)
    values_NA, order_2_NA = values_NA.gather(1, order_NA).sort(dim=1, descending=True, stable=True)
    tokens_NA = tokens_NA.gather(1, order_2_NA)
    # more tokens than there is room for may be as likely as the last one
    is_cut_N = (logits_NV >= values_NA[:, -1:]).sum(dim=1) > values_NA.shape[1]
    for row in is_cut_N.nonzero()[:, 0].tolist():
        tokens = (logits_NV[row] >= values_NA[row, -1]).nonzero()[:, 0]
        first = logits_NV[row, tokens].sort(descending=True, stable=True).indices[: values_NA.shape[1]]
        tokens_NA[row] = tokens[first]
    return tokens_NA, values_NA


def _largest_keys(logits_NV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by keys of 64 bits that are all different; on a CPU many times slower.

    A key has the bits of a logit above, turned so that they are in the order of the logits, and below how many tokens
    come behind this one.
    """
    last = logits_NV.shape[1] - 1
    bits_NV = (logits_NV + 0.0).view(torch.int32)  # the two zeros are equals
    ordered_NV = (bits_NV ^ ((bits_NV >> 31) & 0x7FFFFFFF)).long()
    keys_NV = (ordered_NV << 32) + torch.arange(last, -1, -1, device=logits_NV.device)
    tokens_NA = last - (keys_NV.topk(count, dim=-1).values & 0xFFFFFFFF)
    return tokens_NA, logits_NV.gather(1, tokens_NA)
