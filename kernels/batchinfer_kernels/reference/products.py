"""Matrix products in plain PyTorch.

Every product gets its rows in multiples of 8, each starting at an aligned address, and so does its result: the CPU
library uses other summation orders for fewer rows, and in narrow products for unaligned ones.
"""

# T tokens (rows), D hidden, E experts, B batches, N columns of the result (out), M depth of the sum (in)

import torch
import torch.nn.functional as F

from batchinfer_kernels.reference.block_scaled import BlockScaled, to_blocks
from batchinfer_kernels.reference.fp4 import Fp4Scaled
from batchinfer_kernels.reference.fp8 import ROW_BLOCK, ScaledRows, block_product, quantize_fp8_block
from batchinfer_kernels.reference.group_scaled import GroupScaled, to_groups

ROW_MULTIPLE = 8
_COLUMN_MULTIPLE = 4  # 16 bytes of float32
_ALIGNMENT_BYTES = 64
Weight = torch.Tensor | BlockScaled | GroupScaled | Fp4Scaled


def pack(
    weight: torch.Tensor, *, eight_bit: bool = False, four_bit: bool = False, is_paired: bool = False
) -> torch.Tensor | BlockScaled | GroupScaled:
    """Convert a weight [N, M], or several [B, N, M], for the products here: unchanged, or to 8 or 4 bits.

    Args:
        eight_bit: round the weight to 8 bits (FP8 blocks); products with it round their rows, too.
        four_bit: round the weight to 4 bits; products with it round their rows to 8.
        is_paired: the weight holds a gate projection above an up projection.
    """
    if four_bit:
        return to_groups(weight)
    return to_blocks(weight) if eight_bit else weight


def pack_router(weight_ED: torch.Tensor) -> torch.Tensor:
    """Return the router's float32 weight unchanged."""
    return weight_ED


def linear(
    x: torch.Tensor | ScaledRows,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    float32_out: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x · weightᵀ + bias.

    Args:
        x: [T, in], any T; for a weight in FP8 blocks also rows that are rounded already.
        weight: [out, in], same dtype; or in FP8 blocks, for which x is rounded to FP8 with a scale per 128 values; or
            in 4 bits, for which x is rounded to whole numbers of 8 bits with a scale per 128 values; or in E2M1, for
            which x is not rounded.
        bias: [out] or None.
        float32_out: return float32.
        residual: [T, out], to which the rounded result is added.

    Returns:
        [T, out] in the dtype of x, bfloat16 for rows in FP8.
    """
    if isinstance(x, ScaledRows):
        assert isinstance(weight, BlockScaled), "rows are rounded for weights in FP8 blocks alone"
        y = block_product(x.values, x.scales, weight.values, weight.scales).bfloat16()
    elif isinstance(weight, BlockScaled):
        values, scales = quantize_fp8_block(x, ROW_BLOCK)
        y = block_product(values, scales, weight.values, weight.scales).to(x.dtype)
    elif isinstance(weight, GroupScaled):
        y = weight.product(x).to(x.dtype)
    elif isinstance(weight, Fp4Scaled):
        y = F.linear(_aligned(x), weight.plain(x.dtype))[: x.shape[0]]
    else:
        y = F.linear(_aligned(x), weight)[: x.shape[0]]
    y = y if bias is None else y + bias
    y = y if residual is None else residual + y
    return y.float() if float32_out else y


def batched_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return x · weightᵀ for every batch: [B, T, M] and [B, N, M] to [B, T, N], any T.

    Args:
        out: [B, T, N] for the result, for example a part of wider rows; its last dim must have no gaps.
    """
    y = batched_matmul(x, weight.transpose(1, 2))
    return y if out is None else out.copy_(y)


def router(x: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    """Return the experts' logits, float32 for any x: [T, D] and [E, D] (or [P, E, D] that add up to it) to [T, E]."""
    return linear(x.float(), weight_ED if weight_ED.dim() == 2 else weight_ED.float().sum(0))


def batched_matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return x · y for every batch: [B, T, M] and [B, M, N] to [B, T, N], any T."""
    num_columns = y.shape[-1]
    if num_columns % _COLUMN_MULTIPLE:
        y = F.pad(y, (0, -num_columns % _COLUMN_MULTIPLE))
    return torch.bmm(_aligned(x), y)[:, : x.shape[1], :num_columns]


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Pad x with zero rows to a multiple of 8, every row at an aligned address; the last dim keeps its size."""
    rows, columns = x.shape[-2:]
    if rows % ROW_MULTIPLE or columns % _COLUMN_MULTIPLE:
        return F.pad(x, (0, -columns % _COLUMN_MULTIPLE, 0, -rows % ROW_MULTIPLE))[..., :columns]
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNMENT_BYTES else x
