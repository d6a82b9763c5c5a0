"""Every operation in plain PyTorch: the oracle for faster versions, and what runs where there is no faster one.

In float32 a row's result is bit-identical whatever other rows are beside it, so that an output never depends on how
requests were batched or prompts cut. Three habits give that, and every reference operation keeps them:

- a matrix product gets its rows in multiples of 8, each starting at an aligned address, and so does its result (the
  CPU library uses other summation orders for fewer rows, and in narrow products for unaligned ones);
- exp and whatever is built on it, and all sums that are not matrix products, run in float64 and are rounded once
  (float32 exp differs between the vectorised body of a tensor and its tail);
- attention (reference_mla.py) sums over keys page by page, in ascending order.

Whether that is enough depends on the processor and its library: row_check.py asks it. The number of threads has to stay
the same, unless every matrix has a multiple of 16 rows: the CPU library may give each thread some columns of a product,
and few columns are summed in another order.
"""

# T tokens (rows), D hidden, F intermediate, E experts, K experts per token, G expert groups, C rows of room per expert
# B batches, R rotary width

from __future__ import annotations

import torch
import torch.nn.functional as F

from batchinfer_kernels.block_scaled import BlockScaled, to_blocks
from batchinfer_kernels.reference_fp8 import (
    ROW_BLOCK,
    block_product,
    dequantize_fp8_block,
    dequantize_fp8_rows,
    quantize_fp8_block,
    quantize_fp8_rows,
)

__all__ = [
    "ROW_MULTIPLE",
    "batched_linear",
    "batched_matmul",
    "dequantize_fp8_block",
    "gate",
    "grouped_mlp",
    "linear",
    "masked_mlp",
    "pack",
    "pack_router",
    "quantize_fp8_block",
    "quantize_fp8_rows",
    "rms_norm",
    "rope",
    "router",
    "silu_mul",
    "silu_mul_blocks",
]

ROW_MULTIPLE = 8
_COLUMN_MULTIPLE = 4  # 16 bytes of float32
_ALIGNMENT_BYTES = 64


def pack(weight: torch.Tensor, *, eight_bit: bool = False, is_paired: bool = False) -> torch.Tensor | BlockScaled:
    """The form in which the products here take a weight [N, M], or several [B, N, M]: as it is, or in FP8 blocks.

    Args:
        eight_bit: round the weight to 8 bits, so that products with it round their rows, too.
        is_paired: the weight holds a gate projection above an up projection.
    """
    return to_blocks(weight) if eight_bit else weight


def pack_router(weight_ED: torch.Tensor) -> torch.Tensor:
    """The form in which `router` takes its float32 weight: as it is."""
    return weight_ED


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | BlockScaled,
    bias: torch.Tensor | None = None,
    *,
    wide: bool = False,
    stream: torch.Tensor | None = None,
) -> torch.Tensor:
    """x · weightᵀ + bias.

    Args:
        x: [T, in], any T.
        weight: [out, in], same dtype; or in FP8 blocks, for which x is rounded to FP8 with a scale per 128 values.
        bias: [out] or None.
        wide: give float32.
        stream: [T, out], to which the rounded result is added.

    Returns:
        [T, out] in the dtype of x.
    """
    if isinstance(weight, BlockScaled):
        values, scales = quantize_fp8_block(x, ROW_BLOCK)
        y = block_product(values, scales, weight.values, weight.scales).to(x.dtype)
    else:
        y = F.linear(_aligned(x), weight)[: x.shape[0]]
    y = y if bias is None else y + bias
    y = y if stream is None else stream + y
    return y.float() if wide else y


def batched_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x · weightᵀ for every batch: [B, T, M] and [B, N, M] to [B, T, N], any T."""
    return batched_matmul(x, weight.transpose(1, 2))


def router(x: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    """Logits of the experts, in float32 for any x: [T, D] and [E, D] to [T, E]."""
    return linear(x.float(), weight_ED)


def batched_matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x · y for every batch: [B, T, M] and [B, M, N] to [B, T, N], any T."""
    num_columns = y.shape[-1]
    if num_columns % _COLUMN_MULTIPLE:
        y = F.pad(y, (0, -num_columns % _COLUMN_MULTIPLE))
    return torch.bmm(_aligned(x), y)[:, : x.shape[1], :num_columns]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x ÷ root mean square over the last dim × weight; [..., D] and [D] to [..., D] in the dtype of x."""
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) × up, the SwiGLU activation (arXiv 2002.05202); both [T, F], result in their dtype."""
    wide = gate.double()
    return (wide * _sigmoid(wide)).to(gate.dtype) * up


def silu_mul_blocks(
    gate_up_ECF: torch.Tensor, num_rows_E: torch.Tensor | None = None, *, fp8: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """silu(gate) × up of the first rows of each expert's block: what stands between the two products of `masked_mlp`.

    Args:
        gate_up_ECF: [E, C, 2 * F], gate beside up, C rows of room per expert.
        num_rows_E: [E] integer, rows of each expert; None: all. What stands behind them may be anything in the result;
            faster versions neither read nor write it.
        fp8: round the result as `quantize_fp8_rows` does.

    Returns:
        [E, C, F] in the dtype of the rows, or in float8_e4m3fn and then with scales [E, C, ceil(F / 128)].
    """
    active_ECF = silu_mul(*gate_up_ECF.flatten(0, 1).chunk(2, dim=-1)).unflatten(0, gate_up_ECF.shape[:2])
    return quantize_fp8_rows(active_ECF, num_rows_E) if fp8 else (active_ECF, None)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate pairs of values by the angle of their position (arXiv 2104.09864).

    Args:
        x: [T, ..., R].
        cos, sin: [T, R / 2] float32.
        interleaved: pairs are (0, 1), (2, 3), …; otherwise (0, R / 2), (1, R / 2 + 1), …

    Returns:
        [T, ..., R] in the dtype of x and the same order of values.
    """
    shape = (x.shape[0], *[1] * (x.dim() - 2), cos.shape[-1])
    cos, sin = cos.view(shape), sin.view(shape)
    wide = x.float()
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    out = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return out.to(x.dtype)


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
    """Choose the experts of each token and their weights. Equal scores: the lower index goes first.

    "noaux_tc" (DeepSeek-V3 report section 2.1.2): sigmoid scores; the bias is added for choosing only; groups rank by
    the sum of their best two; weights are the plain scores, divided by their sum when `normalize`, times `scale`.
    "greedy" and "group_limited_greedy" (DeepSeek-V2 report section 2.1.2): softmax scores; groups rank by their best
    one. Here weights are either normalised or scaled, never both, as in the models' own code (other libraries scale
    always, which differs only where `normalize` is on; no published V2 model turns it on).

    Args:
        logits_TE: [T, E] float32.
        bias_E: [E] float32, for "noaux_tc".
        topk: experts per token.
        num_groups, topk_groups: groups of consecutive experts, and how many of them a token may use.

    Returns:
        ids [T, topk] int64 by descending score, weights [T, topk] float32.
    """
    wide = logits_TE.double()
    if method == "noaux_tc":
        scores_TE = _sigmoid(wide).float()
        choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
        allowed_TE = _groups_allowed(choice_TE, num_groups, topk_groups, best=2)
        choice_TE = choice_TE.masked_fill(~allowed_TE, -torch.inf)
    else:
        scores_TE = torch.softmax(wide, dim=-1).float()
        choice_TE = scores_TE
        if method == "group_limited_greedy":
            choice_TE = choice_TE.masked_fill(~_groups_allowed(choice_TE, num_groups, topk_groups, best=1), 0.0)
    ids_TK = _top_indices(choice_TE, topk)
    weights_TK = scores_TE.gather(1, ids_TK).double()
    if normalize:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    if method == "noaux_tc" or not normalize:
        weights_TK = weights_TK * scale
    return ids_TK, weights_TK.float()


def grouped_mlp(
    x: torch.Tensor,
    num_rows_E: torch.Tensor,
    gate_up_EFD: torch.Tensor | BlockScaled,
    down_EDF: torch.Tensor | BlockScaled,
    tokens_M: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """SwiGLU of several experts over rows sorted by expert (contiguous layout).

    Reads the counts on the host, so it cannot be part of a captured graph.

    Args:
        x: [rows, D], expert 0's rows first; with `tokens_M` the rows to take them from, [T, D].
        num_rows_E: [E] int64, rows of each expert, adding up to `rows`.
        gate_up_EFD: [E, 2 * F, D], the gate projection above the up projection.
        down_EDF: [E, D, F].
        tokens_M: [rows] int64, the row of x behind each row.
        scales: [rows or T, ceil(D / 128)] float32 when x is float8_e4m3fn. Weights in FP8 blocks meet these rows as
            they are, with the result of the same rows rounded here; for others they are multiplied out.

    Returns:
        [rows, D] in the dtype of x, for rows in FP8 in that of the weights (bfloat16 for weights in FP8).
    """
    x, scales = _rows_for(gate_up_EFD, x, scales)
    if tokens_M is not None:
        x, scales = x[tokens_M], None if scales is None else scales[tokens_M]
    out = torch.empty_like(x, dtype=x.dtype if scales is None else torch.bfloat16)
    start = 0
    for expert, num_rows in enumerate(num_rows_E.tolist()):
        if num_rows:
            rows = slice(start, start + num_rows)
            row_scales = None if scales is None else scales[rows]
            out[rows] = _swiglu(x[rows], row_scales, gate_up_EFD[expert], down_EDF[expert])
            start += num_rows
    return out


def masked_mlp(
    x_ECD: torch.Tensor,
    num_rows_E: torch.Tensor,
    gate_up_EFD: torch.Tensor | BlockScaled,
    down_EDF: torch.Tensor | BlockScaled,
    scales: torch.Tensor | None = None,
    *,
    expected_rows: int | None = None,
) -> torch.Tensor:
    """SwiGLU of several experts, each over the first rows of a block of its own (masked layout).

    The same as grouped_mlp on these rows, bit for bit. Faster versions read no count on the host, which is what the
    layout is for; this one does.

    Args:
        x_ECD: [E, C, D], C rows of room per expert; the rows beyond an expert's count may hold anything.
        num_rows_E: [E] integer, rows of each expert, at most C.
        gate_up_EFD, down_EDF: as in grouped_mlp.
        scales: [E, C, ceil(D / 128)] float32 when x is float8_e4m3fn, as in grouped_mlp.
        expected_rows: how many rows an expert is likely to have, for versions that choose their tiles by it; changes no
            result.

    Returns:
        [E, C, D] in the dtype that grouped_mlp gives; the rows beyond an expert's count are zero here and may be
        anything in faster versions.
    """
    x_ECD, scales = _rows_for(gate_up_EFD, x_ECD, scales)
    out = torch.zeros(x_ECD.shape, dtype=x_ECD.dtype if scales is None else torch.bfloat16, device=x_ECD.device)
    for expert, num_rows in enumerate(num_rows_E.tolist()):
        if num_rows:
            row_scales = None if scales is None else scales[expert, :num_rows]
            out[expert, :num_rows] = _swiglu(
                x_ECD[expert, :num_rows], row_scales, gate_up_EFD[expert], down_EDF[expert]
            )
    return out


def _rows_for(
    weight: torch.Tensor | BlockScaled, x: torch.Tensor, scales: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows in the form in which they meet this weight: FP8 ones are multiplied out unless it is in FP8, too."""
    if scales is None or isinstance(weight, BlockScaled):
        return x, scales
    return dequantize_fp8_rows(x, scales, weight.dtype), None


def _swiglu(
    x_TD: torch.Tensor,
    scales: torch.Tensor | None,
    gate_up_FD: torch.Tensor | BlockScaled,
    down_DF: torch.Tensor | BlockScaled,
) -> torch.Tensor:
    """down(silu(gate(x)) × up(x)) of one expert; [T, D] to [T, D]."""
    if scales is None:
        gate_up_TF = linear(x_TD, gate_up_FD)
    else:
        assert isinstance(gate_up_FD, BlockScaled)
        gate_up_TF = block_product(x_TD, scales, gate_up_FD.values, gate_up_FD.scales).bfloat16()
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    return linear(silu_mul(gate_TF, up_TF), down_DF)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x with zero rows added up to a multiple of 8, every row at an aligned address; the last dim keeps its size."""
    rows, columns = x.shape[-2:]
    if rows % ROW_MULTIPLE or columns % _COLUMN_MULTIPLE:
        return F.pad(x, (0, -columns % _COLUMN_MULTIPLE, 0, -rows % ROW_MULTIPLE))[..., :columns]
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNMENT_BYTES else x


def _sigmoid(wide: torch.Tensor) -> torch.Tensor:
    """Sigmoid of a float64 tensor from exp alone (the library's own differs between body and tail of a tensor)."""
    return 1.0 / (1.0 + torch.exp(-wide))


def _top_indices(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest values of each row, largest first, ties by lowest index."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def _groups_allowed(choice_TE: torch.Tensor, num_groups: int, topk_groups: int, *, best: int) -> torch.Tensor:
    """[T, E] bool: experts in the groups whose `best` largest scores add up to the most."""
    if topk_groups == num_groups:
        return torch.ones_like(choice_TE, dtype=torch.bool)
    grouped_TGS = choice_TE.unflatten(-1, (num_groups, -1))
    best_TGB = grouped_TGS.topk(best, dim=-1).values
    # at most two values, so the sum has no order to depend on
    chosen_TG = torch.zeros_like(best_TGB[..., 0], dtype=torch.bool)
    chosen_TG.scatter_(1, _top_indices(best_TGB.sum(-1), topk_groups), True)
    return chosen_TG[..., None].expand_as(grouped_TGS).flatten(-2)
