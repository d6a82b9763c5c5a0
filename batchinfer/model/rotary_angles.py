"""Angles of rotary embedding by position, and the factor on queries by position."""

# T tokens, R rotary width

import functools
import math
from collections.abc import Callable
from decimal import Decimal
from typing import NamedTuple

import torch

from batchinfer.model.rope_config import QueryScale, RopeConfig

_FIRST_POSITIONS = 1024  # whose angles are computed at once


@functools.cache  # layers may have angles of their own
def rope_frequencies(rope: RopeConfig, rope_dim: int) -> torch.Tensor:
    """Return the angle per position of each rotary pair, [R / 2] float32, by the kind of scaling.

    YaRN (arXiv 2309.00071 section 3.2) leaves pairs that turn often within the original window as they are, slows those
    that turn rarely by `factor`, and goes from one to the other linearly in between.
    """
    steps = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    # powers rounded once: those of a library differ in their last bits between processors
    periods = torch.tensor([float(Decimal(rope.theta) ** Decimal(step)) for step in steps.tolist()])
    if rope.rope_type == "linear":
        return 1.0 / (rope.factor * periods)
    if rope.rope_type == "longrope":
        return 1.0 / (torch.tensor(rope.pair_factors) * periods)
    if rope.rope_type == "llama3":
        return _llama3_frequencies(rope, 1.0 / periods)
    if rope.rope_type != "yarn":
        return 1.0 / periods
    first, last = (
        rope_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    slowed = ((torch.arange(rope_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return (1.0 / (rope.factor * periods)) * slowed + (1.0 / periods) * (1 - slowed)


def _llama3_frequencies(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Return the slowed angles of Llama 3.1: the turns of a pair in the original window decide how much."""
    turns = rope.original_max_positions * plain / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * plain / rope.factor + kept * plain


def rope_cos_sin(
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    rope: RopeConfig,
    cos_sin: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of each position's angles, each [T, R / 2] float32; angles in float32 as in training."""
    return cos_sin(positions.float()[:, None] * frequencies, rope.cos_sin_scale)


def query_scales(scale: QueryScale) -> torch.Tensor:
    """Return the factor on the queries of each window of positions, float32; the first is 1.

    Logarithms rounded once: those of a library differ in their last bits between processors.
    """
    beta = Decimal(scale.beta)
    return torch.tensor([float(1 + beta * Decimal(1 + number).ln()) for number in range(scale.num_windows)])


class Angles(NamedTuple):
    """Factors of attention at some positions: cos and sin of their angles, each [T, R / 2] float32.

    query_scale: [T] float32, factor of queries; None: 1.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    query_scale: torch.Tensor | None


class RotaryAngles:
    """Angles of a model's positions; on a CPU the angles of each position are computed once and kept."""

    def __init__(
        self,
        rope: RopeConfig,
        rope_dim: int,
        device: torch.device,
        cos_sin: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self._rope = rope
        self._cos_sin = cos_sin
        self._frequencies = rope_frequencies(rope, rope_dim).to(device)
        self._cos, self._sin = self._of(torch.arange(0, device=device))
        self._query_scales = None if rope.query_scale is None else query_scales(rope.query_scale).to(device)

    def at(self, positions_T: torch.Tensor) -> Angles:
        """Return the factors of these positions, see Angles."""
        query_scale_T = self._query_scale(positions_T)
        if not positions_T.is_cpu:  # how far the table must reach is not known on the host
            return Angles(*self._of(positions_T), query_scale_T)
        cos, sin = self.table(int(positions_T.max()) + 1 if len(positions_T) else 0)
        return Angles(cos.index_select(0, positions_T), sin.index_select(0, positions_T), query_scale_T)

    def _query_scale(self, positions_T: torch.Tensor) -> torch.Tensor | None:
        if self._rope.query_scale is None or self._query_scales is None:
            return None
        # guesses may lie behind the model's window, by less than one more
        return self._query_scales.index_select(0, positions_T // self._rope.query_scale.window)

    def table(self, num_positions: int) -> list[torch.Tensor]:
        """Return cos and sin of positions 0 .. N - 1 on a CPU, each [N, R / 2] float32, N at least `num_positions`."""
        if num_positions > len(self._cos):
            known = torch.arange(max(2 * len(self._cos), num_positions, _FIRST_POSITIONS))
            self._cos, self._sin = self._of(known)
        return [self._cos, self._sin]

    def _of(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rope_cos_sin(positions, self._frequencies, self._rope, self._cos_sin)
