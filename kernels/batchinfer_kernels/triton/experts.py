"""SwiGLU of experts in Triton, contiguous and masked layout, with weights in bfloat16, FP8 blocks or 4 bits.

The device assigns rows to experts from the counts, so the host never waits and a captured graph stays valid when counts
change. Both layouts give a row the same bits.
"""

# E experts, C rows of room per expert, M rows, D hidden, F intermediate

import torch
import triton

from batchinfer_kernels.reference.block_scaled import BlockScaled
from batchinfer_kernels.reference.experts import ExpertBiases
from batchinfer_kernels.reference.pointwise import SWIGLU, Activation
from batchinfer_kernels.triton.gemm import Weight, product, values_of
from batchinfer_kernels.triton.layout import dense
from batchinfer_kernels.triton.quantize import ROW_BLOCK, dequantize_fp8_block, new_scales, quantize_rows
from batchinfer_kernels.triton.silu import silu_mul_tiles
from batchinfer_kernels.triton.tiles import RowTiles, contiguous_tiles, masked_tiles


def grouped_mlp(
    x: torch.Tensor,
    num_rows_E: torch.Tensor,
    gate_up_EFD: Weight,
    down_EDF: Weight,
    tokens_M: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    *,
    tile_rows: int = 1,
    activation: Activation = SWIGLU,
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """Return [rows, D] bfloat16 without reading anything on the host."""
    num_rows = len(x) if tokens_M is None else len(tokens_M)
    out = torch.empty(num_rows, x.shape[-1], dtype=torch.bfloat16, device=x.device)
    if num_rows == 0:
        return out
    tiles = contiguous_tiles(num_rows_E, num_rows, tile_rows)
    return _swiglu(dense(x), scales, gate_up_EFD, down_EDF, tiles, tokens_M, out, activation, biases)


def masked_mlp(
    x_ECD: torch.Tensor,
    num_rows_E: torch.Tensor,
    gate_up_EFD: Weight,
    down_EDF: Weight,
    scales: torch.Tensor | None = None,
    *,
    expected_rows: int | None = None,
    activation: Activation = SWIGLU,
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """Return [E, C, D] bfloat16; take scales in any memory order.

    The rows beyond an expert's count are not written: filling a decode step's mostly empty blocks would only take time.
    """
    x_ECD = x_ECD.contiguous()
    num_experts, room, hidden = x_ECD.shape
    out = torch.empty(num_experts * room, hidden, dtype=torch.bfloat16, device=x_ECD.device)
    if out.numel():
        if scales is None and isinstance(gate_up_EFD, BlockScaled):
            x_ECD, scales = quantize_rows(x_ECD, num_rows_E, by_column=True)
        tiles = masked_tiles(num_rows_E, room)
        _swiglu(x_ECD.flatten(0, 1), scales, gate_up_EFD, down_EDF, tiles, None, out, activation, biases)
    return out.view(num_experts, room, hidden)


def _swiglu(
    x: torch.Tensor,
    scales: torch.Tensor | None,
    gate_up_EFD: Weight,
    down_EDF: Weight,
    tiles: RowTiles,
    rows: torch.Tensor | None,
    out: torch.Tensor,
    activation: Activation,
    biases: ExpertBiases | None,
) -> torch.Tensor:
    gate_up_bias, down_bias = (None, None) if biases is None else (bias.contiguous() for bias in biases)
    if not isinstance(gate_up_EFD, BlockScaled):
        assert not isinstance(down_EDF, BlockScaled), "both weights of an expert are in FP8, or none"
        if scales is not None:
            rows_of_scales = scales if scales.dim() == 2 else scales.flatten(0, 1)
            x = dequantize_fp8_block(x, rows_of_scales, torch.bfloat16, (1, ROW_BLOCK))
        width = values_of(gate_up_EFD).shape[1]
        gate_up = _between(out, width)
        product(x, gate_up_EFD, out=gate_up, tiles=tiles, rows=rows, bias=gate_up_bias)
        active = _between(out, width // 2)
        silu_mul_tiles(gate_up, active, None, tiles, activation)
        return product(active, down_EDF, out=out, tiles=tiles, bias=down_bias)
    if scales is None:
        x, scales = quantize_rows(x, by_column=True)
    gate_up = _between(out, gate_up_EFD.values.shape[1])
    product(x, gate_up_EFD, scales, out=gate_up, tiles=tiles, rows=rows, bias=gate_up_bias)
    width = gate_up.shape[1] // 2
    active = _between(out, width, torch.float8_e4m3fn)
    active_scales = new_scales(len(out), triton.cdiv(width, ROW_BLOCK), device=out.device, by_column=True)
    silu_mul_tiles(gate_up, active, active_scales, tiles, activation)
    return product(active, down_EDF, active_scales, out=out, tiles=tiles, bias=down_bias)


def _between(out: torch.Tensor, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Allocate a row of `width` values per row of `out`; only the experts' rows will be written."""
    return torch.empty(len(out), width, dtype=dtype, device=out.device)
