"""The choice of experts in Triton, a few tokens per program; methods, ties and rounding as in `reference.gate`.

Scores are float64 until they are rounded to float32 once, so that the choice is the reference's.
"""

# T tokens, E experts, G groups of S experts, K experts per token

import torch
import triton
import triton.language as tl

from batchinfer_kernels.reference.gating import GateRule

_PROGRAM_VALUES = 1024


def gate(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    rule: GateRule,
    counts_E: torch.Tensor | None = None,
    is_counted_T: torch.Tensor | None = None,
    chosen_TK: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts in one kernel."""
    assert chosen_TK is None, "only methods without a kernel have chosen experts"
    num_tokens, num_experts = logits_TE.shape
    is_v3, is_chosen = rule.method == "noaux_tc", rule.method == "topk_softmax"
    is_limited = rule.topk_groups < rule.num_groups and rule.method not in ("greedy", "topk_softmax")
    # one group is as good as several that all may be used
    num_groups = rule.num_groups if is_limited else 1
    ids_TK = torch.empty(num_tokens, rule.topk, dtype=torch.int64, device=logits_TE.device)
    weights_TK = torch.empty(num_tokens, rule.topk, dtype=torch.float32, device=logits_TE.device)
    if ids_TK.numel():
        group_size = num_experts // num_groups
        groups, size = triton.next_power_of_2(num_groups), triton.next_power_of_2(group_size)
        rows = max(1, _PROGRAM_VALUES // (groups * size))
        _gate[(triton.cdiv(num_tokens, rows),)](
            logits_TE.contiguous(),
            bias_E if is_v3 or is_chosen else None,
            ids_TK,
            weights_TK,
            counts_E,
            is_counted_T,
            rule.scale if rule.always_scales or not rule.normalize else 1.0,
            num_tokens,
            num_groups,
            group_size,
            TOPK=rule.topk,
            TOPK_GROUPS=rule.topk_groups if is_limited else 1,
            IS_SIGMOID=is_v3,
            IS_CHOSEN=is_chosen,
            IS_LIMITED=is_limited,
            SUMS_TWO=rule.method != "group_limited_greedy" and group_size > 1,
            NORMALIZE=rule.normalize,
            ROWS=rows,
            GROUPS=groups,
            SIZE=size,
        )
    return ids_TK, weights_TK


@triton.jit
def _allowed(choice, is_group, groups, places, token, TOPK_GROUPS: tl.constexpr, SUMS_TWO: tl.constexpr):
    """Mark the groups that a token may use, by their best score or the sum of their best two."""
    low = -float("inf")
    far: tl.constexpr = 2**30
    best = tl.max(choice, 2)
    if SUMS_TWO:
        first = tl.min(tl.where(choice == best[:, :, None], places, far), 2)
        best += tl.max(tl.where(places == first[:, :, None], low, choice), 2)
    is_left, is_allowed = is_group & (token >= 0)[:, None], is_group & (token < 0)[:, None]  # all, none
    for _ in range(TOPK_GROUPS):
        top = tl.max(tl.where(is_left, best, low), 1)
        group = tl.min(tl.where(is_left & (best == top[:, None]), groups, far), 1)
        is_allowed = is_allowed | (groups == group[:, None])
        is_left = is_left & (groups != group[:, None])
    return is_allowed


@triton.jit
def _gate(  # noqa: PLR0915  (one kernel for all methods)
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, counts_ptr, is_counted_ptr, scale, num_tokens, num_groups, group_size,
    TOPK: tl.constexpr, TOPK_GROUPS: tl.constexpr, IS_SIGMOID: tl.constexpr, IS_CHOSEN: tl.constexpr,
    IS_LIMITED: tl.constexpr, SUMS_TWO: tl.constexpr, NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Choose TOPK experts and their weights for ROWS tokens; tensors are [tokens, groups, experts of a group]."""
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_token = token < num_tokens
    groups, places = tl.arange(0, GROUPS)[None, :], tl.arange(0, SIZE)[None, None, :]
    is_group = groups < num_groups
    ids = groups[:, :, None] * group_size + places
    is_expert = is_group[:, :, None] & (places < group_size)
    low = -float("inf")
    far: tl.constexpr = 2**30

    logits_at = logits_ptr + token[:, None, None] * num_groups * group_size + ids
    choice = tl.load(logits_at, mask=is_token[:, None, None] & is_expert, other=0.0)
    if IS_CHOSEN and bias_ptr is not None:
        choice += tl.load(bias_ptr + ids, mask=is_expert, other=0.0)
    logits = choice.to(tl.float64)
    if IS_CHOSEN:
        peak = tl.max(tl.max(tl.where(is_expert, logits, low), 2), 1)
        scores = tl.exp(logits - peak[:, None, None])
    elif IS_SIGMOID:
        scores = (1.0 / (1.0 + tl.exp(-logits))).to(tl.float32)
    else:
        peak = tl.max(tl.max(tl.where(is_expert, logits, low), 2), 1)
        raised = tl.where(is_expert, tl.exp(logits - peak[:, None, None]), 0.0)
        scores = (raised / tl.sum(tl.sum(raised, 2), 1)[:, None, None]).to(tl.float32)
    if not IS_CHOSEN:
        choice = scores
    if bias_ptr is not None and not IS_CHOSEN:
        choice += tl.load(bias_ptr + ids, mask=is_expert, other=0.0)
    is_sound = tl.min(tl.min(tl.where(tl.abs(choice) < float("inf"), 1, 0), 2), 1)
    if IS_CHOSEN:  # an expert may be ruled out by its bias
        is_sound = tl.min(tl.min(tl.where(choice < float("inf"), 1, 0), 2), 1)
    choice = tl.where(is_expert & (choice == choice), choice, low)  # nonsense is chosen last

    if IS_LIMITED:
        is_allowed = _allowed(choice, is_group, groups, places, token, TOPK_GROUPS, SUMS_TWO)
        choice = tl.where(is_allowed[:, :, None] | ~is_expert, choice, low if IS_SIGMOID else 0.0)

    is_left = is_expert & (token >= 0)[:, None, None]
    slots = tl.arange(0, triton.next_power_of_2(TOPK))[None, :]
    chosen = tl.zeros((ROWS, triton.next_power_of_2(TOPK)), tl.int32)
    weights = tl.zeros((ROWS, triton.next_power_of_2(TOPK)), tl.float64)
    for k in range(TOPK):
        top = tl.max(tl.max(tl.where(is_left, choice, low), 2), 1)[:, None, None]
        expert = tl.min(tl.min(tl.where(is_left & (choice == top), ids, far), 2), 1)
        is_it = ids == expert[:, None, None]
        score = tl.sum(tl.sum(tl.where(is_it & is_expert, scores, 0.0), 2), 1)
        chosen = tl.where(slots == k, expert[:, None], chosen)
        weights = tl.where(slots == k, score.to(tl.float64)[:, None], weights)
        is_left = is_left & ~is_it
    if NORMALIZE:
        weights = weights / (tl.sum(weights, 1) + 1e-20)[:, None]
    weights = tl.where(is_sound[:, None] > 0, weights, float("nan"))
    at = token[:, None] * TOPK + slots
    is_stored = is_token[:, None] & (slots < TOPK)
    tl.store(ids_ptr + at, chosen.to(tl.int64), mask=is_stored)
    tl.store(weights_ptr + at, (weights * scale).to(tl.float32), mask=is_stored)
    if counts_ptr is not None:  # whole numbers are added up in any order
        counted = tl.full((ROWS,), 1, tl.int64)
        if is_counted_ptr is not None:
            counted = tl.load(is_counted_ptr + token, mask=is_token, other=0)
        tl.atomic_add(counts_ptr + chosen, counted[:, None] + tl.zeros_like(at), mask=is_stored, sem="relaxed")
