"""Muon for the matrices inside the layers and Adam for everything else; used by train.py.

Muon (K. Jordan 2024; arXiv 2502.16982) keeps a running mean of the gradient and steps along the nearest matrix whose
singular values are all about one, so rare directions learn as fast as common ones. In short trials on these tasks it
was ahead of Adam alone after the same number of steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

MUON_RATE = 0.008
ADAM_RATE = 0.002
MOMENTUM = 0.95
WEIGHT_DECAY = 0.02
# x -> a x + b x^3 + c x^5 applied five times brings every singular value in (0, 1] near one
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class Optimizer:
    """Both update rules behind one step; a stack of expert matrices counts as many matrices."""

    def __init__(self, model: nn.Module):
        named = dict(model.named_parameters())
        self._matrices = {name: weight for name, weight in named.items() if is_inner_matrix(name, weight)}
        self._means = {name: torch.zeros_like(weight) for name, weight in self._matrices.items()}
        others = [weight for name, weight in named.items() if name not in self._matrices]
        self._adam = torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Update all weights from their gradients, with both learning rates times `factor`, and clear the gradients."""
        for group in self._adam.param_groups:
            group["lr"] = ADAM_RATE * factor
        self._adam.step()
        self._adam.zero_grad()
        for name, weight in self._matrices.items():
            assert weight.grad is not None, name
            mean = self._means[name].mul_(MOMENTUM).add_(weight.grad)
            direction = orthogonalize(weight.grad + MOMENTUM * mean)
            rate = MUON_RATE * factor
            tall = max(1.0, weight.shape[-2] / weight.shape[-1]) ** 0.5
            weight.mul_(1 - rate * WEIGHT_DECAY).sub_(direction, alpha=rate * tall)
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers, for a checkpoint."""
        return {"means": self._means, "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._means = state["means"]
        self._adam.load_state_dict(state["adam"])


def is_inner_matrix(name: str, weight: torch.Tensor) -> bool:
    """Whether Muon updates this weight: matrices between hidden states, not vectors, tables or routers."""
    return weight.dim() >= 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight", "gate.weight"))


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Return the nearest matrices with singular values near one, by Newton-Schulz iteration; [..., M, N] float32."""
    x = matrices.to(torch.bfloat16)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if is_tall else x).float()
