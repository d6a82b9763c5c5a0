"""From logits to tokens: greedy or drawn, keyed so that a draw depends on its row alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from batchinfer.model.logit_changes import Bitmask, LogitChanges
from batchinfer.records import Sampling
from batchinfer_kernels.reference import rows as reference_rows
from batchinfer_kernels.transfer import to_device, to_host

# S rows of logits, V vocabulary

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class LogitOps:
    """Operations on logits; shapes as in batchinfer_kernels.reference."""

    argmax: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = reference_rows.argmax
    draw: Callable[..., torch.Tensor] = reference_rows.draw
    log_sum_exp: Callable[[torch.Tensor], torch.Tensor] = reference_rows.log_sum_exp
    most_likely: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]] = reference_rows.most_likely
    apply_token_bitmask: Bitmask = reference_rows.apply_token_bitmask


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of S requests, column by column."""

    temperature: np.ndarray  # [S] float64; 0: greedy
    top_k: np.ndarray  # [S] int64; 0: off
    top_p: np.ndarray  # [S] float64
    min_p: np.ndarray  # [S] float64
    key: np.ndarray  # [S] uint64
    num_logprobs: np.ndarray  # [S] int64, alternatives that the row wants; -1: it wants no logprobs

    @classmethod
    def of(cls, samplings: list[Sampling], keys: list[int]) -> SamplingRows:
        wanted = [-1 if sampling.logprobs is None else sampling.logprobs for sampling in samplings]
        return cls(
            temperature=np.array([sampling.temperature for sampling in samplings], dtype=np.float64),
            top_k=np.array([sampling.top_k for sampling in samplings], dtype=np.int64),
            top_p=np.array([sampling.top_p for sampling in samplings], dtype=np.float64),
            min_p=np.array([sampling.min_p for sampling in samplings], dtype=np.float64),
            key=np.array(keys, dtype=np.uint64),
            num_logprobs=np.array(wanted, dtype=np.int64),
        )

    def take(self, rows: np.ndarray) -> SamplingRows:
        """Return these rows in this order."""
        return SamplingRows(*(column[rows] for column in self._columns()))

    def and_also(self, others: SamplingRows) -> SamplingRows:
        """Return these rows, followed by the others."""
        pairs = zip(self._columns(), others._columns(), strict=True)
        return SamplingRows(*(np.concatenate(pair) for pair in pairs))

    def _columns(self) -> tuple[np.ndarray, ...]:
        return self.temperature, self.top_k, self.top_p, self.min_p, self.key, self.num_logprobs


_PLAIN_OPS = LogitOps()
_NO_CHANGES = LogitChanges()


@dataclass(frozen=True, slots=True)
class Sampled:
    """One new token per row; log-probabilities under the raw logits (before temperature) when asked for."""

    tokens: np.ndarray  # [S] int64
    is_finite: np.ndarray  # [S] bool, False: the logits of the row hold NaN or infinity and the token means nothing
    logprobs: np.ndarray | None = None  # [S] float64
    top_tokens: np.ndarray | None = None  # [S, A] integers, most likely first; A: most alternatives that a row wants
    top_logprobs: np.ndarray | None = None  # [S, A] float64

    def take(self, rows: np.ndarray) -> Sampled:
        """Return these rows in this order."""
        optional = self.logprobs, self.top_tokens, self.top_logprobs
        taken = (None if column is None else column[rows] for column in optional)
        return Sampled(self.tokens[rows], self.is_finite[rows], *taken)

    @classmethod
    def joined(cls, parts: Sequence[Sampled]) -> Sampled:
        """Return the rows of all parts; rows of parts without log-probabilities have none that mean anything."""
        tokens, is_finite = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "is_finite")
        )
        most = max((part.top_tokens.shape[1] for part in parts if part.top_tokens is not None), default=-1)
        if most < 0:
            return cls(tokens, is_finite)
        logprobs = np.zeros(len(tokens))
        top_tokens, top_logprobs = np.zeros((len(tokens), most), dtype=np.int64), np.zeros((len(tokens), most))
        first = 0
        for part in parts:
            rows = slice(first, first + len(part.tokens))
            first = rows.stop
            if part.logprobs is not None and part.top_tokens is not None:
                logprobs[rows], num_top = part.logprobs, part.top_tokens.shape[1]
                top_tokens[rows, :num_top], top_logprobs[rows, :num_top] = part.top_tokens, part.top_logprobs
        return cls(tokens, is_finite, logprobs, top_tokens, top_logprobs)


def sample(
    logits_SV: torch.Tensor,
    rows: SamplingRows,
    positions: np.ndarray,
    ops: LogitOps = _PLAIN_OPS,
    changes: LogitChanges = _NO_CHANGES,
) -> Sampled:
    """Pick one token per row.

    Greedy rows take the largest logit, the lowest token id among equals. Other rows are filtered in the order
    temperature, top_k, top_p, min_p (as in transformers; vLLM has min_p before top_k), and drawn by inverting the
    cumulative distribution in vocabulary order at a uniform number made from (key, position) only.

    Args:
        logits_SV: [S, V] float32; rows with changes are changed in place unless log-probabilities are wanted.
        positions: [S] index of the new token in its output, from 0.
    """
    num_logprobs = int(rows.num_logprobs.max(initial=-1))
    changed_SV = logits_SV.clone() if num_logprobs >= 0 and not changes.are_none else logits_SV
    changes.apply(changed_SV, ops.apply_token_bitmask)
    tokens, is_finite = _picked(changed_SV, rows, np.asarray(positions), ops)
    if num_logprobs < 0:
        return Sampled(tokens, is_finite)
    total_S = ops.log_sum_exp(logits_SV)
    top_tokens, top_logits = ops.most_likely(logits_SV, num_logprobs)
    of_tokens = logits_SV.gather(1, _on(tokens, logits_SV)[:, None])[:, 0].double() - total_S
    columns = to_host(of_tokens, top_tokens, top_logits.double() - total_S[:, None])
    return Sampled(tokens, is_finite, *(values.numpy() for values in columns))


def _picked(
    logits_SV: torch.Tensor, rows: SamplingRows, positions: np.ndarray, ops: LogitOps
) -> tuple[np.ndarray, np.ndarray]:
    """Return the token of each row, and whether its logits are finite; both read from the device in one copy."""
    largest_S, is_finite_S = ops.argmax(logits_SV)
    drawn = np.flatnonzero(rows.temperature > 0)
    if logits_SV.is_cpu:
        drawn = drawn[is_finite_S.numpy()[drawn]]
    if not len(drawn):
        tokens, is_finite = (values.numpy() for values in to_host(largest_S, is_finite_S))
        return tokens, is_finite
    logits = logits_SV if len(drawn) == len(logits_SV) else logits_SV[_on(drawn, logits_SV)]
    drawn_S = _draw(logits, rows.take(drawn), positions[drawn], ops)
    tokens, is_finite, of_drawn = (values.numpy() for values in to_host(largest_S, is_finite_S, drawn_S))
    tokens[drawn] = of_drawn  # what is drawn from a row that is not finite is some token, too
    return tokens, is_finite


def _draw(logits_SV: torch.Tensor, rows: SamplingRows, positions: np.ndarray, ops: LogitOps) -> torch.Tensor:
    shares = np.stack([rows.temperature, rows.top_p, rows.min_p, uniforms(rows.key, positions)])
    temperature_S, top_p_S, min_p_S, uniform_S = _on(shares, logits_SV)
    top_k_S = _on(rows.top_k, logits_SV)
    return ops.draw(logits_SV, temperature_S, top_k_S, top_p_S, min_p_S, uniform_S)


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return [S] float64 in [0, 1): the SplitMix64 finaliser (Steele, Lea, Flood 2014) over key and position."""
    with np.errstate(over="ignore"):  # wrapping is the point
        state = keys.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * _MIX_1
        state = (state ^ (state >> np.uint64(27))) * _MIX_2
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _on(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Return the values on the device of `like`; on the CPU they share the array's memory."""
    return to_device(torch.from_numpy(values), like.device)
