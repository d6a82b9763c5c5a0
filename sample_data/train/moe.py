"""The second half of a layer: one dense MLP, or a mixture of experts whose load a bias keeps even.

DeepSeek-V3 report section 2.1.2.
"""

# T tokens, K experts per token, E experts, D hidden, G groups of experts, S experts per group

from __future__ import annotations

from typing import Any

import torch
from shape import ModelShape, linear
from torch import nn
from torch.nn import functional as F


class Mlp(nn.Module):
    """down(silu(gate(x)) × up(x))."""

    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, inner), linear(hidden, inner)
        self.down_proj = linear(inner, hidden)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))


class Router(nn.Module):
    """Chooses experts by score plus bias, and weighs them by score alone; `load_E` collects tokens per expert."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.randn(shape.n_routed_experts, shape.hidden_size) * shape.hidden_size**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.n_routed_experts))
        self.register_buffer("load_E", torch.zeros(shape.n_routed_experts), persistent=False)

    def forward(self, x_TD: torch.Tensor, counted_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights, both [T, K]; only tokens that are `counted_T` add to the load."""
        shape = self.shape
        scores_TE = torch.sigmoid(F.linear(x_TD.float(), self.weight.float()))
        with torch.no_grad():
            choice_TE = scores_TE + self.e_score_correction_bias
            choice_TGS = choice_TE.unflatten(1, (shape.n_group, -1))
            groups = choice_TGS.topk(2, dim=-1).values.sum(-1).topk(shape.topk_group, dim=-1).indices
            allowed_TG = torch.zeros_like(choice_TGS[..., 0], dtype=torch.bool).scatter_(1, groups, True)
            choice_TE = choice_TGS.masked_fill(~allowed_TG[..., None], -torch.inf).flatten(1)
            ids_TK = choice_TE.topk(shape.num_experts_per_tok, dim=-1).indices
            self.load_E += torch.bincount(ids_TK[counted_T].flatten(), minlength=shape.n_routed_experts)
        weights_TK = scores_TE.gather(1, ids_TK)
        return ids_TK, weights_TK / weights_TK.sum(-1, keepdim=True) * shape.routed_scaling_factor

    @torch.no_grad()
    def balance(self, speed: float) -> None:
        """Move the bias one step against the load seen since the last call (V3 report section 2.1.2)."""
        self.e_score_correction_bias += speed * torch.sign(self.load_E.mean() - self.load_E)
        self.load_E.zero_()


class Experts(nn.Module):
    """All routed experts of a layer: rows are sorted by expert, so each expert is two plain products."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        experts, hidden, inner = shape.n_routed_experts, shape.hidden_size, shape.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, hidden) * hidden**-0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, inner) * inner**-0.5)

    def forward(self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        order = ids_TK.flatten().argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        counts = torch.bincount(ids_TK.flatten(), minlength=len(self.down_proj)).tolist()
        rows = _ToExperts.apply(x_TD, order, inverse, ids_TK.shape[1])
        outputs = []
        for part, gate_up, down in zip(rows.split(counts), self.gate_up_proj, self.down_proj, strict=True):
            gate, up = F.linear(part, gate_up).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up, down))
        y_TKD = _FromExperts.apply(torch.cat(outputs), order, inverse, ids_TK.shape[1])
        return torch.einsum("tkd,tk->td", y_TKD, weights_TK.to(y_TKD.dtype))


class Moe(nn.Module):
    """Routed experts and one expert that sees every token."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.gate = Router(shape)
        self.experts = Experts(shape)
        self.shared_experts = Mlp(shape.hidden_size, shape.moe_intermediate_size * shape.n_shared_experts)

    def forward(self, x_TD: torch.Tensor, counted_T: torch.Tensor) -> torch.Tensor:
        ids_TK, weights_TK = self.gate(x_TD, counted_T)
        return self.experts(x_TD, ids_TK, weights_TK) + self.shared_experts(x_TD)


class _ToExperts(torch.autograd.Function):
    """Each token's row K times, sorted by expert: [T, D] to [T * K, D]; the gradient is summed without scattering."""

    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, topk: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.topk = topk
        return x_TD.index_select(0, order // topk)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse).unflatten(0, (-1, ctx.topk)).sum(1), None, None, None


class _FromExperts(torch.autograd.Function):
    """The way back: [T * K, D] sorted by expert to [T, K, D]."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, topk: int) -> torch.Tensor:
        ctx.save_for_backward(order)
        return y.index_select(0, inverse).unflatten(0, (-1, topk))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return grad.flatten(0, 1).index_select(0, order), None, None, None
