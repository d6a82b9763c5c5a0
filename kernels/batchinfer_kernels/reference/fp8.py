"""FP8 E4M3 in plain PyTorch: rounding with one scale per block, and products of rounded rows and weights.

DeepSeek-V3 report section 3.3.2: rows have a scale per 128 values, weights one per 128 × 128, and the products of a
block of depth are added up before they are scaled. Here the sum of a block's 128 products is exact (float64 holds it
without rounding) and is rounded to float32 once; the blocks are added in ascending order in float32. So a row's result
depends on nothing but the row and the weight, on any processor.
"""

# T rows, N columns of the result (out), M depth of the sum (in), J blocks of depth

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

BLOCK = 128
ROW_BLOCK = (1, BLOCK)  # rows and columns that share a scale in rows
FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0
_FP8_MIN_AMAX = 1e-4
_SCALE_ROWS = 4  # 16 bytes of float32


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Rows already rounded to FP8, in place of bfloat16 rows: the input of several products is rounded once."""

    values: torch.Tensor  # [..., T, M] float8_e4m3fn
    scales: torch.Tensor  # [..., T, ceil(M / 128)] float32, as of `quantize_fp8_rows`

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def is_cpu(self) -> bool:
        """Whether the rows are on the CPU."""
        return self.values.is_cpu

    def __len__(self) -> int:
        return len(self.values)


def quantize_fp8_block(
    weight: torch.Tensor, block: tuple[int, int] = (BLOCK, BLOCK)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight to FP8 E4M3 with one scale per block (DeepSeek-V3 report section 3.3.2).

    Args:
        weight: [N, M] float; blocks at the right and lower edge may be smaller than `block`.
        block: rows and columns that share a scale.

    Returns:
        [N, M] float8_e4m3fn and scales [ceil(N / rows), ceil(M / columns)] float32: weight ≈ quantised × scale.
    """
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    scale = divided(blocks.abs().amax(dim=(1, 3)).clamp_min(_FP8_MIN_AMAX), _FP8_MAX)
    quantised = (weight.float() / _spread(scale, weight.shape, block)).clamp(-_FP8_MAX, _FP8_MAX)
    return quantised.to(FP8), scale


def divided(x: torch.Tensor, by: float) -> torch.Tensor:
    """Return x ÷ by, rounded once on any device.

    By a plain number PyTorch divides on a CPU, but on a GPU it multiplies with the number's rounded inverse.
    """
    return x / torch.full((), by, dtype=x.dtype, device=x.device)


def quantize_fp8_rows(x: torch.Tensor, num_rows_E: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows to FP8 E4M3 with a scale per 128 values, the scales in the order in which deep_gemm reads them.

    The order is column by column: the scales of a column of blocks follow each other, for a multiple of 4 rows (16
    bytes), so that the tensor memory accelerator can load them (DeepGEMM, get_mn_major_tma_aligned_tensor).

    Args:
        x: [T, M] float, or [E, C, M] with C rows of room per expert.
        num_rows_E: [E] integer, the rows to round of each expert; None: all. The others may be anything in the result.

    Returns:
        float8_e4m3fn in the shape of x, and scales [(E,) T, ceil(M / 128)] float32 with steps (…, 1, T rounded up).
    """
    values, scales = quantize_fp8_block(x.flatten(0, -2), ROW_BLOCK)
    by_column = empty_row_scales(*x.shape[:-1], scales.shape[-1], device=x.device)
    by_column.copy_(scales.view(by_column.shape))
    return values.view(x.shape), by_column


def empty_row_scales(*shape: int, device: torch.device) -> torch.Tensor:
    """Allocate scales [(E,) T, J] float32 of rows, column by column; see `quantize_fp8_rows`."""
    *experts, num_rows, num_blocks = shape
    room = -(-num_rows // _SCALE_ROWS) * _SCALE_ROWS
    return torch.empty(*experts, num_blocks, room, dtype=torch.float32, device=device).mT[..., :num_rows, :]


def dequantize_fp8_block(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, block: tuple[int, int] = (BLOCK, BLOCK)
) -> torch.Tensor:
    """Return weight × its block's scale, multiplied in float32 and rounded once; shapes as in quantize_fp8_block."""
    return (weight.float() * _spread(scale, weight.shape, block)).to(dtype)


def dequantize_fp8_rows(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize rows [..., M] with scales [..., ceil(M / 128)] to `dtype`."""
    flat = dequantize_fp8_block(values.flatten(0, -2), scales.flatten(0, -2), dtype, ROW_BLOCK)
    return flat.view(values.shape)


def block_product(
    values_TM: torch.Tensor, scales_TJ: torch.Tensor, weight_NM: torch.Tensor, weight_scales: torch.Tensor
) -> torch.Tensor:
    """Return rows · weightᵀ, [T, N] float32.

    Args:
        values_TM: [T, M] float8_e4m3fn, any T.
        scales_TJ: [T, ceil(M / 128)] float32.
        weight_NM: [N, M] float8_e4m3fn.
        weight_scales: [ceil(N / 128), ceil(M / 128)] float32.
    """
    num_columns = len(weight_NM)
    scales_NJ = weight_scales.repeat_interleave(BLOCK, dim=0)[:num_columns]
    total_TN = torch.zeros(len(values_TM), num_columns, dtype=torch.float32, device=values_TM.device)
    for block, (rows, columns) in enumerate(
        zip(values_TM.split(BLOCK, dim=1), weight_NM.split(BLOCK, dim=1), strict=True)
    ):
        # 128 products of values with 4 significant bits each, between 2**-18 and 2**18: 43 bits at most
        part_TN = (rows.double() @ columns.double().T).float()
        total_TN += part_TN * (scales_TJ[:, block, None] * scales_NJ[:, block])
    return total_TN


def _spread(scale: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """Repeat each block's scale for all its values, cut to the shape of the weight."""
    rows = scale.repeat_interleave(block[0], dim=0)[: shape[0]]
    return rows.repeat_interleave(block[1], dim=1)[:, : shape[1]]
