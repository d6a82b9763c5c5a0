"""The order of (token, expert) entries by expert, in Triton: a stable counting sort in two passes.

The first counts each block's entries per expert and how many of its own expert come before an entry in its block;
running sums over the blocks then give every entry its row. For few entries, as in decode, each block counts all others
itself, in one kernel. Nothing is read on the host.
"""

# M entries, E experts, B blocks of entries

import torch
import triton
import triton.language as tl

_BLOCK = 128
_FEW = 4096  # entries: 512 tokens with 8 experts each


def sort_by_expert(ids_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids_M, topk = ids_TK.contiguous().view(-1), ids_TK.shape[1]
    num_blocks = triton.cdiv(len(ids_M), _BLOCK)
    tokens_M, inverse_M = torch.empty_like(ids_M), torch.empty_like(ids_M)
    if 0 < len(ids_M) <= _FEW:
        counts_E = torch.empty(num_experts, dtype=torch.int64, device=ids_M.device)
        _sort_few[(num_blocks,)](
            ids_M, tokens_M, inverse_M, counts_E, len(ids_M), num_experts,
            TOPK=topk, BLOCK=_BLOCK, EXPERTS=triton.next_power_of_2(num_experts), num_warps=8,
        )  # fmt: skip
        return tokens_M, inverse_M, counts_E
    counts_EB = torch.zeros(num_experts, num_blocks, dtype=torch.int64, device=ids_M.device)
    if num_blocks:
        _count[(num_blocks,)](
            ids_M, inverse_M, counts_EB, len(ids_M), num_experts, num_blocks,
            BLOCK=_BLOCK, EXPERTS=triton.next_power_of_2(num_experts), num_warps=8,
        )  # fmt: skip
        behind = counts_EB.flatten().cumsum(0)
        starts = behind - counts_EB.flatten()
        _place[(num_blocks,)](ids_M, starts, inverse_M, tokens_M, len(ids_M), num_blocks, TOPK=topk, BLOCK=_BLOCK)
    return tokens_M, inverse_M, counts_EB.sum(1)


@triton.jit
def _count(
    ids_ptr, ranks_ptr, counts_ptr, num_entries, num_experts, num_blocks,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    here = tl.arange(0, BLOCK)
    entries = block * BLOCK + here
    is_entry = entries < num_entries
    ids = tl.load(ids_ptr + entries, mask=is_entry, other=0).to(tl.int32)
    others = tl.load(ids_ptr + entries, mask=is_entry, other=-1).to(tl.int32)
    is_before = (others[None, :] == ids[:, None]) & (here[None, :] < here[:, None])
    ranks = tl.sum(is_before.to(tl.int32), 1)
    tl.store(ranks_ptr + entries, ranks.to(tl.int64), mask=is_entry)
    experts = tl.arange(0, EXPERTS)
    counts = tl.histogram(ids, EXPERTS, is_entry)
    at = experts.to(tl.int64) * num_blocks + block
    tl.store(counts_ptr + at, counts.to(tl.int64), mask=experts < num_experts)


@triton.jit
def _place(
    ids_ptr, starts_ptr, ranks_ptr, tokens_ptr, num_entries, num_blocks, TOPK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Turn ranks within the block into rows, in place."""
    block = tl.program_id(0)
    entries = block * BLOCK + tl.arange(0, BLOCK)
    is_entry = entries < num_entries
    ids = tl.load(ids_ptr + entries, mask=is_entry, other=0)
    rows = tl.load(starts_ptr + ids * num_blocks + block, mask=is_entry, other=0)
    rows += tl.load(ranks_ptr + entries, mask=is_entry, other=0)
    tl.store(ranks_ptr + entries, rows, mask=is_entry)
    tl.store(tokens_ptr + rows, (entries // TOPK).to(tl.int64), mask=is_entry)


@triton.jit
def _sort_few(
    ids_ptr, tokens_ptr, inverse_ptr, counts_ptr, num_entries, num_experts,
    TOPK: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Place each entry after all entries of smaller experts and all earlier entries of the same expert."""
    first = tl.program_id(0) * BLOCK
    here, experts = tl.arange(0, BLOCK), tl.arange(0, EXPERTS)
    totals, before = tl.zeros((EXPERTS,), tl.int32), tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, num_entries, BLOCK):
        is_other = start + here < num_entries
        others = tl.load(ids_ptr + start + here, mask=is_other, other=0).to(tl.int32)
        counts = tl.histogram(others, EXPERTS, is_other)
        totals += counts
        before += tl.where(start < first, counts, 0)
    starts = tl.cumsum(totals, 0) - totals + before
    entries = first + here
    is_entry = entries < num_entries
    ids = tl.load(ids_ptr + entries, mask=is_entry, other=0).to(tl.int32)
    others = tl.load(ids_ptr + entries, mask=is_entry, other=-1).to(tl.int32)
    is_before = (others[None, :] == ids[:, None]) & (here[None, :] < here[:, None])
    rows = tl.gather(starts, ids, 0) + tl.sum(is_before.to(tl.int32), 1)
    tl.store(inverse_ptr + entries, rows.to(tl.int64), mask=is_entry)
    tl.store(tokens_ptr + rows, (entries // TOPK).to(tl.int64), mask=is_entry)
    if first == 0:
        tl.store(counts_ptr + experts, totals.to(tl.int64), mask=experts < num_experts)
