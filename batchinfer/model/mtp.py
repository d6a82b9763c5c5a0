"""Drafts by the layer for multi-token prediction (DeepSeek-V3 report section 2.2).

The layer takes the model's normed state at a place and the embedding of the next token, and predicts the token after
that one. From there on it goes by its own guesses and states. A guess is picked as the token itself will be, with the
same settings and the same draw, which makes both the same more often; it is no more than a guess.
"""

# N rows with a state of the model, B requests, J guesses in a row, M = N + (J - 1) * B rows, P pages, D hidden

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from batchinfer.model.config import ModelConfig
from batchinfer.model.layer import DecoderLayer
from batchinfer.model.ops import Ops
from batchinfer.model.rotary_angles import RotaryAngles
from batchinfer.model.sampling import LogitOps, SamplingRows, sample
from batchinfer.model.step import AttentionStep
from batchinfer.model.weights import ModelWeights, MtpWeights
from batchinfer.parallel.overlap import run_to_end
from batchinfer.parallel.spans import MicroBatchSpans, SpanLog


class DraftModel(Protocol):
    """The parts of a model that drafting uses."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def weights(self) -> ModelWeights: ...
    @property
    def ops(self) -> Ops: ...
    @property
    def logit_ops(self) -> LogitOps: ...
    @property
    def angles(self) -> RotaryAngles: ...


@dataclass(frozen=True, slots=True)
class DraftInput:
    """Input of the drafting layer: rows of states by request, then one row per request for each further guess."""

    states: torch.Tensor  # [N, D] normed, of the model
    tokens: torch.Tensor  # [N] int64, the token after each state
    last_rows: torch.Tensor  # [B] int64, the newest state of each request
    positions: torch.Tensor  # [M] int64, in the text
    places: torch.Tensor  # [M] int64, in the pages of the layer, which begin anywhere in the text
    slots: torch.Tensor  # [M] int64
    page_table: torch.Tensor  # [M, P] int64
    sampling: SamplingRows  # of the B requests
    num_new: np.ndarray  # [B] index of the first guess in the request's output
    num_guesses: int  # J

    def rows(self, first: int, count: int, model: DraftModel) -> AttentionStep:
        """Return some of these rows as a decode step."""
        some = slice(first, first + count)
        cos, sin, query_scale = model.angles.at(self.positions[some])
        return AttentionStep(
            tokens=self.tokens,
            positions=self.places[some],
            slots=self.slots[some],
            logit_rows=self.last_rows,
            page_table=self.page_table[some],
            kv_tokens=self.places[some] + 1,
            cos=cos,
            sin=sin,
            query_scale=query_scale,
        )


Draft = Callable[[Any, DraftInput, torch.Tensor], torch.Tensor]  # model, rows, pages to guesses [J, B]


@dataclass(frozen=True, slots=True)
class Mtp:
    """The layer for multi-token prediction with its projections; holds no state between steps."""

    weights: MtpWeights
    layer: DecoderLayer

    def __call__(self, model: DraftModel, given: DraftInput, pages: torch.Tensor) -> torch.Tensor:
        """Return [J, B] int64 guesses, computed operation by operation.

        Args:
            pages: [num_pages, 64, row] of this layer.
        """
        ops, eps, weights = model.ops, model.config.rms_norm_eps, self.weights
        counts_E = torch.zeros(model.config.n_routed_experts, dtype=torch.int64)
        states, tokens, guesses, first = given.states, given.tokens, [], 0
        for guess in range(given.num_guesses):
            embedded = ops.rms_norm(model.weights.embedding[tokens], weights.token_norm, eps)
            both = torch.cat([embedded, ops.rms_norm(states, weights.hidden_norm, eps)], dim=-1)
            step = given.rows(first, len(tokens), model)
            spans = MicroBatchSpans(SpanLog())
            states = run_to_end(self.layer.points(ops.linear(both, *weights.joined), step, pages, counts_E, spans))
            first += len(tokens)
            if guess == 0:
                states = states[given.last_rows]
            logits = ops.linear(ops.rms_norm(states, weights.norm, eps), model.weights.lm_head, float32_out=True)
            tokens = torch.from_numpy(sample(logits, given.sampling, given.num_new + guess, model.logit_ops).tokens)
            guesses.append(tokens)
        return torch.stack(guesses)
