"""SwiGLU of several experts in plain PyTorch, one expert after the other."""

# T tokens, D hidden, F intermediate, E experts, C rows of room per expert, M (token, expert) rows

from typing import NamedTuple

import torch

from batchinfer_kernels.reference.block_scaled import BlockScaled
from batchinfer_kernels.reference.fp8 import ScaledRows, dequantize_fp8_rows, quantize_fp8_rows
from batchinfer_kernels.reference.pointwise import SWIGLU, Activation, silu_mul
from batchinfer_kernels.reference.products import Weight, linear


class ExpertBiases(NamedTuple):
    """Biases of each expert's products, in the dtype of the rows."""

    gate_up_EF: torch.Tensor  # [E, 2 * F], the gate's values before the up values
    down_ED: torch.Tensor  # [E, D]


def other_form(activation: Activation = SWIGLU, biases: ExpertBiases | None = None, **_: object) -> str | None:
    """Return the reason why implementations without biases and with SwiGLU alone reject these arguments, or None."""
    return None if biases is None and activation == SWIGLU else "experts have biases or another activation"


def silu_mul_blocks(
    gate_up_ECF: torch.Tensor, num_rows_E: torch.Tensor | None = None, *, fp8: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute silu(gate) × up of the first rows of each expert's block, between the two products of `masked_mlp`.

    Args:
        gate_up_ECF: [E, C, 2 * F], gate before up, C rows of room per expert.
        num_rows_E: [E] integer, rows of each expert; None: all. Rows behind them may be anything in the result;
            faster versions neither read nor write it.
        fp8: round the result as `quantize_fp8_rows` does.

    Returns:
        [E, C, F] in the dtype of the rows, or in float8_e4m3fn and then with scales [E, C, ceil(F / 128)].
    """
    gate, up = gate_up_ECF.flatten(0, 1).chunk(2, dim=-1)
    active_ECF = silu_mul(gate, up).unflatten(0, gate_up_ECF.shape[:2])
    return quantize_fp8_rows(active_ECF, num_rows_E) if fp8 else (active_ECF, None)


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
    """Apply the SwiGLU of several experts to rows sorted by expert (contiguous layout).

    Reads the counts on the host, so it cannot be part of a captured graph.

    Args:
        x: [rows, D], expert 0's rows first; with `tokens_M` the rows to take them from, [T, D].
        num_rows_E: [E] int64, rows of each expert, adding up to `rows`.
        gate_up_EFD: [E, 2 * F, D], the gate projection above the up projection.
        down_EDF: [E, D, F].
        tokens_M: [rows] int64, the row of x behind each row.
        scales: [rows or T, ceil(D / 128)] float32 when x is float8_e4m3fn. Weights in FP8 blocks take these rows
            unchanged, with the same result as for rows rounded here; for other weights the rows are dequantized.
        tile_rows: without `tokens_M`: each expert's rows begin at a multiple of this, so that `rows` is more than their
            sum; rows in the gaps may be anything. 1: no gaps.
        activation: between the two products.
        biases: of the products; None: there are none.

    Returns:
        [rows, D] in the dtype of x, for rows in FP8 in that of the weights (bfloat16 for weights in FP8).
        Rows in gaps are zero here and may be anything in faster versions, which may also return PlacedRows for rows
        without gaps.
    """
    x, scales = _rows_for(gate_up_EFD, x, scales)
    if tokens_M is not None:
        x, scales = x[tokens_M], None if scales is None else scales[tokens_M]
    out = torch.zeros_like(x, dtype=x.dtype if scales is None else torch.bfloat16)
    start = 0
    for expert, num_rows in enumerate(num_rows_E.tolist()):
        if num_rows:
            start += -start % tile_rows
            rows = slice(start, start + num_rows)
            row_scales = None if scales is None else scales[rows]
            own = None if biases is None else (biases.gate_up_EF[expert], biases.down_ED[expert])
            out[rows] = _swiglu(x[rows], row_scales, gate_up_EFD[expert], down_EDF[expert], activation, own)
            start += num_rows
    return out


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
    """Apply the SwiGLU of several experts, each to the first rows of its block (masked layout).

    The result is that of grouped_mlp on these rows, bit for bit. The layout lets faster versions read no count on the
    host; this version reads them.

    Args:
        x_ECD: [E, C, D], C rows of room per expert; the rows beyond an expert's count may hold anything.
        num_rows_E: [E] integer, rows of each expert, at most C.
        gate_up_EFD, down_EDF: as in grouped_mlp.
        scales: [E, C, ceil(D / 128)] float32 when x is float8_e4m3fn, as in grouped_mlp.
        expected_rows: how many rows an expert is likely to have, for versions that choose their tiles by it; changes no
            result.
        activation, biases: as in grouped_mlp.

    Returns:
        [E, C, D] in the dtype that grouped_mlp gives; the rows beyond an expert's count are zero here and may be
        anything in faster versions.
    """
    x_ECD, scales = _rows_for(gate_up_EFD, x_ECD, scales)
    out = torch.zeros(x_ECD.shape, dtype=x_ECD.dtype if scales is None else torch.bfloat16, device=x_ECD.device)
    for expert, num_rows in enumerate(num_rows_E.tolist()):
        if num_rows:
            row_scales = None if scales is None else scales[expert, :num_rows]
            own = None if biases is None else (biases.gate_up_EF[expert], biases.down_ED[expert])
            out[expert, :num_rows] = _swiglu(
                x_ECD[expert, :num_rows], row_scales, gate_up_EFD[expert], down_EDF[expert], activation, own
            )
    return out


def _rows_for(weight: Weight, x: torch.Tensor, scales: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return rows in the form for this weight: FP8 rows are dequantized unless the weight is in FP8 blocks, too."""
    if scales is None or isinstance(weight, BlockScaled):
        return x, scales
    dtype = weight.dtype if isinstance(weight, torch.Tensor) else torch.bfloat16
    return dequantize_fp8_rows(x, scales, dtype), None


def _swiglu(
    x_TD: torch.Tensor,
    scales: torch.Tensor | None,
    gate_up_FD: Weight,
    down_DF: Weight,
    activation: Activation,
    biases: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Compute down(silu(gate(x)) × up(x)) of one expert, or with another activation; [T, D] to [T, D]."""
    gate_up_bias, down_bias = (None, None) if biases is None else biases
    if scales is None:
        gate_up_TF = linear(x_TD, gate_up_FD, gate_up_bias)
    else:
        assert isinstance(gate_up_FD, BlockScaled)
        gate_up_TF = linear(ScaledRows(x_TD, scales), gate_up_FD, gate_up_bias)
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    return linear(silu_mul(gate_TF, up_TF, activation), down_DF, down_bias)
