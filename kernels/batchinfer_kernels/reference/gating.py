"""The choice of each token's experts, in plain PyTorch; scores in float64, rounded once."""

# T tokens, E experts, K experts per token, G expert groups, S experts per group

from typing import NamedTuple

import torch

from batchinfer_kernels.reference.pointwise import sigmoid

# methods that kernels compute, numbered as in cpu/csrc/kernels.h; others are computed in plain PyTorch
GATE_METHODS = ("noaux_tc", "greedy", "group_limited_greedy", "group_top2", "topk_softmax")


class GateRule(NamedTuple):
    """The rule by which experts are chosen and weighed; `gate` documents the methods.

    topk: experts per token.
    num_groups, topk_groups: groups of consecutive experts, and how many of them a token may use.
    """

    method: str
    topk: int
    num_groups: int
    topk_groups: int
    normalize: bool
    scale: float

    @property
    def always_scales(self) -> bool:
        """Whether normalised weights are scaled, too."""
        return self.method in ("noaux_tc", "group_top2", "topk_softmax", "sqrtsoftplus")


def gate(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    rule: GateRule,
    counts_E: torch.Tensor | None = None,
    is_counted_T: torch.Tensor | None = None,
    chosen_TK: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token and their weights. Equal scores: the lower index goes first.

    "noaux_tc" (DeepSeek-V3 report section 2.1.2): sigmoid scores; the bias is added for choosing only; groups rank by
    the sum of their best two; weights are the plain scores, divided by their sum when `normalize`, times `scale`.
    "greedy" and "group_limited_greedy" (DeepSeek-V2 report section 2.1.2): softmax scores; groups rank by their best
    one. Here weights are either normalised or scaled, never both, as in the models' own code (other libraries scale
    always, which differs only where `normalize` is on; no published V2 model turns it on).
    "group_top2" (Mistral 4, transformers' modeling_mistral4): softmax scores; groups rank by the sum of their best two;
    weights are divided by their sum when `normalize`, times `scale`.
    "topk_softmax" (gpt-oss, transformers' modeling_gpt_oss): the bias is a part of the logits; the largest logits are
    chosen, without groups; weights are the softmax over the chosen logits alone, times `scale`. `normalize` is on.
    "sqrtsoftplus" (DeepSeek-V4): as "noaux_tc" without groups, with the root of softplus as score.

    Args:
        logits_TE: [T, E] float32.
        bias_E: [E] float32, for "noaux_tc" and "topk_softmax".
        counts_E: [E] int64, increased by the number of these tokens that each expert gets; None: no counting.
        is_counted_T: [T] int64, 0 for tokens that are not counted; None: all count.
        chosen_TK: [T, topk] int64, experts that are chosen already; only their weights are computed then.

    Returns:
        ids [T, topk] int64 by descending score, weights [T, topk] float32. All weights of a token are NaN if one of its
        experts was chosen by NaN.
    """
    logits64_TE = logits_TE.double()
    if rule.method == "noaux_tc":
        scores_TE = sigmoid(logits64_TE).float()
        choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
        scores_TE = scores_TE.masked_fill(~choice_TE.isfinite().all(-1, keepdim=True), torch.nan)
        allowed_TE = _groups_allowed(choice_TE, rule, best=2)
        choice_TE = choice_TE.masked_fill(~allowed_TE, -torch.inf)
    elif rule.method == "sqrtsoftplus":
        scores_TE = (logits64_TE.clamp(min=0) + torch.exp(-logits64_TE.abs()).log1p()).sqrt().float()
        choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
        scores_TE = scores_TE.masked_fill(~choice_TE.isfinite().all(-1, keepdim=True), torch.nan)
    elif rule.method == "topk_softmax":
        choice_TE = logits_TE if bias_E is None else logits_TE + bias_E
        scores_TE = torch.exp(choice_TE.double() - choice_TE.double().amax(-1, keepdim=True))
    else:
        scores_TE = torch.softmax(logits64_TE, dim=-1).float()
        choice_TE = scores_TE
        if rule.method != "greedy":
            best = 2 if rule.method == "group_top2" else 1
            choice_TE = choice_TE.masked_fill(~_groups_allowed(choice_TE, rule, best=best), 0.0)
    ids_TK = _top_indices(choice_TE, rule.topk) if chosen_TK is None else chosen_TK
    weights_TK = scores_TE.gather(1, ids_TK).double()
    if rule.normalize:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    if rule.always_scales or not rule.normalize:
        weights_TK = weights_TK * rule.scale
    if counts_E is not None:
        count_experts(ids_TK, counts_E, is_counted_T)
    return ids_TK, weights_TK.float()


def count_experts(ids_TK: torch.Tensor, counts_E: torch.Tensor, is_counted_T: torch.Tensor | None) -> None:
    """Add the chosen experts to the counts as `gate` does, without waiting for the device."""
    counted_TK = torch.ones_like(ids_TK) if is_counted_T is None else is_counted_T[:, None].expand_as(ids_TK)
    counts_E.scatter_add_(0, ids_TK.flatten(), counted_TK.flatten())


def _top_indices(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Return the indices of the k largest values of each row, largest first, ties by lowest index."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def _groups_allowed(choice_TE: torch.Tensor, rule: GateRule, *, best: int) -> torch.Tensor:
    """Mark the experts of the groups whose `best` largest scores add up to the most, [T, E] bool."""
    if rule.topk_groups == rule.num_groups:
        return torch.ones_like(choice_TE, dtype=torch.bool)
    grouped_TGS = choice_TE.unflatten(-1, (rule.num_groups, -1))
    best_TGB = grouped_TGS.topk(best, dim=-1).values
    # at most two values, so the sum has no order to depend on
    chosen_TG = torch.zeros_like(best_TGB[..., 0], dtype=torch.bool)
    chosen_TG.scatter_(1, _top_indices(best_TGB.sum(-1), rule.topk_groups), True)
    return chosen_TG[..., None].expand_as(grouped_TGS).flatten(-2)
