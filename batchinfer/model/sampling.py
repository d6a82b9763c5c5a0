"""From logits to tokens: greedy or drawn, keyed so that a draw depends on its row alone. Called by the engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from batchinfer.records import Sampling

# S rows of logits, V vocabulary

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of S requests, column by column."""

    temperature: torch.Tensor  # [S] float64; 0: greedy
    top_k: torch.Tensor  # [S] int64; 0: off
    top_p: torch.Tensor  # [S] float64
    min_p: torch.Tensor  # [S] float64
    key: np.ndarray  # [S] uint64
    num_logprobs: int  # most alternatives that any row wants; -1: no row wants logprobs

    @classmethod
    def of(cls, samplings: list[Sampling], keys: list[int]) -> SamplingRows:
        wanted = [-1 if sampling.logprobs is None else sampling.logprobs for sampling in samplings]
        return cls(
            temperature=torch.tensor([sampling.temperature for sampling in samplings], dtype=torch.float64),
            top_k=torch.tensor([sampling.top_k for sampling in samplings], dtype=torch.int64),
            top_p=torch.tensor([sampling.top_p for sampling in samplings], dtype=torch.float64),
            min_p=torch.tensor([sampling.min_p for sampling in samplings], dtype=torch.float64),
            key=np.array(keys, dtype=np.uint64),
            num_logprobs=max(wanted, default=-1),
        )


@dataclass(frozen=True, slots=True)
class Sampled:
    """One new token per row; log-probabilities under the raw logits (before temperature) when asked for."""

    tokens: list[int]  # S
    is_finite: list[bool]  # S, False: the logits of the row hold NaN or infinity and the token means nothing
    logprobs: list[float] | None = None  # S
    top_tokens: list[list[int]] | None = None  # S x num_logprobs, most likely first
    top_logprobs: list[list[float]] | None = None


def sample(logits_SV: torch.Tensor, rows: SamplingRows, positions: np.ndarray) -> Sampled:
    """Pick one token per row.

    Greedy rows take the largest logit, the lowest token id among equals. Other rows are filtered in the order
    temperature, top_k, top_p, min_p (as in Hugging Face generation) and drawn by inverting the cumulative distribution
    in vocabulary order, in float64, at a uniform number made from (key, position) only.

    Args:
        logits_SV: [S, V] float32.
        positions: [S] index of the new token in its output, from 0.
    """
    is_finite = torch.isfinite(logits_SV).all(dim=-1)
    tokens = logits_SV.argmax(dim=-1)
    drawn = torch.nonzero((rows.temperature > 0) & is_finite).flatten()
    if len(drawn):
        at = drawn.numpy()
        probs = filtered_probs(
            logits_SV[drawn], rows.temperature[drawn], rows.top_k[drawn], rows.top_p[drawn], rows.min_p[drawn]
        )
        tokens[drawn] = _draw(probs, torch.from_numpy(uniforms(rows.key[at], np.asarray(positions)[at])))
    if rows.num_logprobs < 0:
        return Sampled(tokens.tolist(), is_finite.tolist())
    logprobs_SV = torch.log_softmax(logits_SV.double(), dim=-1)
    top = torch.topk(logprobs_SV, min(rows.num_logprobs, logprobs_SV.shape[-1]), dim=-1)
    chosen = logprobs_SV.gather(1, tokens[:, None])[:, 0]
    return Sampled(tokens.tolist(), is_finite.tolist(), chosen.tolist(), top.indices.tolist(), top.values.tolist())


def filtered_probs(
    logits_SV: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """[S, V] float64 probabilities after all filters, not normalised (the draw divides by their sum).

    Args:
        logits_SV: [S, V]; all parameters [S], temperature > 0.
    """
    # the largest logit is taken off first, so that no temperature, however small, makes infinity out of it
    below_best = logits_SV.double() - logits_SV.double().amax(dim=-1, keepdim=True)
    probs = torch.softmax(below_best / temperature[:, None], dim=-1)
    if bool((top_k > 0).any() or (top_p < 1).any()):
        ordered, order = torch.sort(probs, dim=-1, descending=True, stable=True)
        rank = torch.arange(probs.shape[-1])
        limit = torch.where(top_k > 0, top_k, probs.shape[-1])
        ordered = ordered * (rank < limit[:, None])
        before = torch.cumsum(ordered, dim=-1) - ordered
        # a token stays while the ones before it have not reached top_p of what top_k left; the first always stays
        inside = before < top_p[:, None] * ordered.sum(dim=-1, keepdim=True)
        keep = inside | (top_p >= 1)[:, None]
        probs = torch.zeros_like(probs).scatter_(1, order, ordered * keep)
    floor = min_p[:, None] * probs.max(dim=-1, keepdim=True).values
    return probs * (probs >= floor)


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[S] float64 in [0, 1): the SplitMix64 finaliser (Steele, Lea, Flood 2014) over key and position."""
    with np.errstate(over="ignore"):  # wrapping is the point
        state = keys.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * _MIX_1
        state = (state ^ (state >> np.uint64(27))) * _MIX_2
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _draw(probs_SV: torch.Tensor, uniform_S: torch.Tensor) -> torch.Tensor:
    cumulative = torch.cumsum(probs_SV, dim=-1)
    target = uniform_S[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # rounding may put the target at the very end: the last token with any probability takes it
    last = probs_SV.shape[-1] - 1 - torch.flip(probs_SV > 0, [1]).int().argmax(dim=-1)
    return torch.minimum(tokens, last)
