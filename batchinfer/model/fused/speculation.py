"""Decode steps with drafted tokens in one C++ call: guesses, the step that tries them, and the accepted tokens.

The same bits as step by step (csrc/speculation.h): a guess is a row of its own, and a draw depends on its place alone.
"""

# S requests, W most new tokens of one, C places that are kept of a request, P pages of the one that has most

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from batchinfer.model.transformer import Transformer


class KeptTensors(NamedTuple):
    """States of requests by slot, for the layer that drafts (rank/draft_states.py)."""

    states: torch.Tensor  # [slots * C, D]
    tokens: torch.Tensor  # [slots * C] int64
    marks: torch.Tensor  # [4, slots] int64: first, end, base, filled
    pages: torch.Tensor  # [slots * pages of a slot, 64, row]


@dataclass(frozen=True, slots=True)
class RequestTensors:
    """The running requests of a rank; `rows` shares the memory of its table, with the fields of RequestRow."""

    rows: torch.Tensor  # [bytes] uint8
    page_table: torch.Tensor  # [S, P] int64
    settings: list[torch.Tensor]  # [S] each: temperature, top_k, top_p, min_p, key
    ends: list[torch.Tensor]  # the model's end tokens, tokens that may end some requests
    num_positions: int  # largest length that their texts may reach


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one call."""

    num_guesses: int  # per request and step, at most
    num_steps: int
    microseconds: int  # time after which no step begins
    least_running: int  # no step begins if fewer requests go on


@dataclass(frozen=True, slots=True)
class Speculated:
    """Results of one call of `speculate`, which may run several decode steps; counts and times are summed over them."""

    outcome: list[list[int]]  # S: number of new tokens, whether to ask if it goes on, whether logits are finite, tokens
    expert_counts: torch.Tensor  # [num_moe_layers, E]
    num_steps: int
    num_rows: int
    num_drafted: int
    tried: list[int]  # numbers of first, second, ... guesses that were checked
    right: list[int]  # numbers of right guesses among them
    draft_s: float
    step_s: float


def speculate(
    stack: Any, model: Transformer, requests: RequestTensors, kept: KeptTensors, pages: torch.Tensor, limits: Limits
) -> Speculated:
    """Run decode steps with guesses; the rows of `requests`, `kept` and `pages` are changed in place.

    Args:
        stack: of FusedDecode, with the layer for multi-token prediction.
        pages: [L, pages, 64, row] of the requests.
    """
    outcome, counts, totals, seconds = stack.speculate(
        *(requests.rows, requests.page_table, list(kept), requests.settings, requests.ends),
        *(model.angles.table(requests.num_positions), pages),
        [limits.num_guesses, limits.num_steps, limits.microseconds, limits.least_running],
    )
    num_steps, num_rows, num_drafted, *looked_at = totals
    for mlp in model.moe_mlps:
        mlp.num_local_rows += num_rows * model.config.num_experts_per_tok
    return Speculated(
        outcome.tolist(),
        counts if len(counts) else torch.zeros(0, model.config.n_routed_experts, dtype=torch.int64),
        *(num_steps, num_rows, num_drafted, looked_at[: limits.num_guesses], looked_at[limits.num_guesses :]),
        *seconds,
    )


def bytes_of(rows: np.ndarray) -> torch.Tensor:
    """Return the memory of an array of records."""
    return torch.from_numpy(rows.view(np.uint8).reshape(-1))
