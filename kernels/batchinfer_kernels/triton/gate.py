"""The choice of experts in Triton, one program per token; methods, ties and rounding as in `reference.gate`.

Scores are float64 until they are rounded to float32 once, so that the choice is the reference's.
"""

# T tokens, E experts, G groups of S experts, K experts per token

from __future__ import annotations

import torch
import triton
import triton.language as tl


def gate(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    *,
    method: str,
    topk: int,
    num_groups: int,
    topk_groups: int,
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each token [T, K] int64 and their weights [T, K] float32; see `reference.gate`."""
    num_tokens, num_experts = logits_TE.shape
    is_v3 = method == "noaux_tc"
    is_limited = topk_groups < num_groups and method != "greedy"
    # one group is as good as several that all may be used
    num_groups = num_groups if is_limited else 1
    ids_TK = torch.empty(num_tokens, topk, dtype=torch.int64, device=logits_TE.device)
    weights_TK = torch.empty(num_tokens, topk, dtype=torch.float32, device=logits_TE.device)
    if ids_TK.numel():
        group_size = num_experts // num_groups
        _gate[(num_tokens,)](
            logits_TE.contiguous(),
            bias_E if is_v3 else None,
            ids_TK,
            weights_TK,
            scale if is_v3 or not normalize else 1.0,
            num_groups,
            group_size,
            TOPK=topk,
            TOPK_GROUPS=topk_groups if is_limited else 1,
            IS_V3=is_v3,
            IS_LIMITED=is_limited,
            HAS_SECOND=group_size > 1,
            NORMALIZE=normalize,
            GROUPS=triton.next_power_of_2(num_groups),
            SIZE=triton.next_power_of_2(group_size),
            num_warps=1,
        )
    return ids_TK, weights_TK


@triton.jit
def _gate(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, scale, num_groups, group_size,
    TOPK: tl.constexpr, TOPK_GROUPS: tl.constexpr, IS_V3: tl.constexpr, IS_LIMITED: tl.constexpr,
    HAS_SECOND: tl.constexpr, NORMALIZE: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    groups, places = tl.arange(0, GROUPS), tl.arange(0, SIZE)
    ids = groups[:, None] * group_size + places[None, :]
    is_expert = (groups < num_groups)[:, None] & (places < group_size)[None, :]
    low = -float("inf")
    far: tl.constexpr = 2**30

    logits = tl.load(logits_ptr + token * num_groups * group_size + ids, mask=is_expert, other=low).to(tl.float64)
    if IS_V3:
        scores = (1.0 / (1.0 + tl.exp(-logits))).to(tl.float32)
    else:
        raised = tl.where(is_expert, tl.exp(logits - tl.max(tl.max(logits, 1), 0)), 0.0)
        scores = (raised / tl.sum(tl.sum(raised, 1), 0)).to(tl.float32)
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + ids, mask=is_expert, other=0.0)
    choice = tl.where(is_expert & (choice == choice), choice, low)  # nonsense is chosen last

    if IS_LIMITED:
        best = tl.max(choice, 1)
        if IS_V3 and HAS_SECOND:
            first = tl.min(tl.where(choice == best[:, None], places[None, :], far), 1)
            best += tl.max(tl.where(places[None, :] == first[:, None], low, choice), 1)
        is_left, is_allowed = groups < num_groups, groups < 0
        for _ in range(TOPK_GROUPS):
            top = tl.max(tl.where(is_left, best, low), 0)
            group = tl.min(tl.where(is_left & (best == top), groups, far), 0)
            is_allowed = is_allowed | (groups == group)
            is_left = is_left & (groups != group)
        choice = tl.where(is_allowed[:, None] | ~is_expert, choice, low if IS_V3 else 0.0)

    is_left = is_expert
    slots = tl.arange(0, triton.next_power_of_2(TOPK))
    chosen, weights = tl.zeros_like(slots), tl.zeros_like(slots).to(tl.float64)
    for k in range(TOPK):
        top = tl.max(tl.max(tl.where(is_left, choice, low), 1), 0)
        expert = tl.min(tl.min(tl.where(is_left & (choice == top), ids, far), 1), 0)
        is_it = ids == expert
        score = tl.sum(tl.sum(tl.where(is_it & is_expert, scores, 0.0), 1), 0)
        chosen = tl.where(slots == k, expert, chosen)
        weights = tl.where(slots == k, score.to(tl.float64), weights)
        is_left = is_left & ~is_it
    if NORMALIZE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    at = token * TOPK + slots
    tl.store(ids_ptr + at, chosen.to(tl.int64), mask=slots < TOPK)
    tl.store(weights_ptr + at, (weights * scale).to(tl.float32), mask=slots < TOPK)
