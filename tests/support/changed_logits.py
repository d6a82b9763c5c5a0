"""Logits of one row after a request's rules, as a step changes them."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import torch

from batchinfer.rank.logit_rules import LogitRules, StepRules
from batchinfer_kernels.reference import rows as reference_rows


def apply_rules(rules: LogitRules, logits: torch.Tensor, mask: np.ndarray | None = None) -> None:
    """Change the logits [V] in place.

    Args:
        mask: [ceil(V / 32)] uint32, tokens that the grammar allows; needed if the rules have one.
    """
    masks: Future[np.ndarray] = Future()
    if mask is not None:
        masks.set_result(mask[None].copy())
    step = StepRules([(0, rules)], None if mask is None else masks, len(logits))
    step.changes().apply(logits[None], reference_rows.apply_token_bitmask)
