"""Measured speed of this controller's ranks."""

import time
from dataclasses import dataclass, field

import numpy as np

from batchinfer.config import ClusterConfig
from batchinfer.protocol.messages import StepRecord
from batchinfer.records import PHASES

SPEED_S = 5.0  # window of the displayed speed


@dataclass(slots=True)
class Pace:
    """Seconds per prompt token in prefill, seconds per output token in decode, and recent tokens per second."""

    cluster: ClusterConfig
    tokens_per_s: float = 0.0
    _busy_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))  # mean over the ranks
    _tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    _recent_tokens: int = 0
    _recent_since_s: float | None = None  # None: no step since the ranks' start
    _has_measured: bool = False  # over a whole window

    def add(self, record: StepRecord) -> None:
        """Add a step of a rank."""
        is_prefill, now_s = record.kind == "prefill", time.monotonic()
        num_ranks = self.cluster.num_prefill_ranks if is_prefill else self.cluster.num_decode_ranks
        self._busy_s[record.kind] += record.duration_s / num_ranks
        self._tokens[record.kind] += record.new_tokens if is_prefill else record.output_tokens
        if self._recent_since_s is None:
            self._recent_tokens, self._recent_since_s = 0, now_s - record.duration_s
        self._recent_tokens += record.new_tokens
        seconds = now_s - self._recent_since_s
        is_enough = seconds >= SPEED_S
        if is_enough or not self._has_measured:
            self.tokens_per_s = self._recent_tokens / max(seconds, 1e-3)
        if is_enough:
            self._recent_tokens, self._recent_since_s, self._has_measured = 0, now_s, True

    def ranks_ended(self) -> None:
        """Reset the recent speed until the ranks have started again."""
        self._recent_since_s = None

    def seconds(self, left: np.ndarray) -> float | None:
        """Return the seconds for [2] prompt and output tokens; None: a needed phase has not been measured yet."""
        parts = []
        for phase, tokens in zip(PHASES, left.tolist(), strict=True):
            if tokens and not self._tokens[phase]:
                return None
            parts.append(tokens * self._busy_s[phase] / max(self._tokens[phase], 1))
        return sum(parts) if self.cluster.mode == "colocated" else max(parts)
