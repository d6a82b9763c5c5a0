"""The form of a token's row on its way between ranks; dispatchers pack rows with it, and all ranks unpack alike.

float32 and bfloat16 rows travel as they are. With FP8 a row is rounded to E4M3 with one float32 scale per 128 values
(DeepSeek-V3 report section 3.3.2):   | D values, 1 byte each | padding to 4 | ceil(D / 128) scales |
The experts' results travel back as bfloat16 then. gloo knows no FP8, so all rows are sent as bytes.
"""

# T or M rows, D values per row, B bytes per row

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from batchinfer_kernels import registry

SCALE_VALUES = 128  # values that share a scale


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The form of rows in one direction.

    Args:
        dtype: "float32", "bfloat16" or "fp8".
    """

    dtype: Literal["float32", "bfloat16", "fp8"]

    @classmethod
    def for_combine(cls, dispatch: RowFormat) -> RowFormat:
        """Return the form in which results go back: float32 for float32, bfloat16 for bfloat16 and FP8."""
        return cls("float32" if dispatch.dtype == "float32" else "bfloat16")

    def row_bytes(self, num_values: int) -> int:
        """Return B, the bytes of a row of `num_values` values."""
        if self.dtype == "fp8":
            return _scale_offset(num_values) + 4 * -(-num_values // SCALE_VALUES)
        return num_values * (4 if self.dtype == "float32" else 2)

    def rounded(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return rows that stay on this rank as `unpack` would return them: with scales in FP8."""
        if self.dtype != "fp8":
            return x_TD.to(torch.float32 if self.dtype == "float32" else torch.bfloat16), None
        quantize = registry.select("quantize_fp8_rows", device=x_TD.device)
        return quantize(x_TD)

    def pack(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the rows as [T, B] uint8."""
        if self.dtype != "fp8":
            plain = torch.float32 if self.dtype == "float32" else torch.bfloat16
            return x_TD.to(plain).contiguous().view(torch.uint8)
        num_values = x_TD.shape[1]
        quantize = registry.select("quantize_fp8_block", device=x_TD.device)
        values_TD, scales = quantize(x_TD, (1, SCALE_VALUES))
        rows = torch.zeros(len(x_TD), self.row_bytes(num_values), dtype=torch.uint8, device=x_TD.device)
        rows[:, :num_values] = values_TD.view(torch.uint8)
        rows[:, _scale_offset(num_values) :].view(torch.float32)[:] = scales
        return rows

    def unpack(self, rows_MB: torch.Tensor, num_values: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return [M, D] in the dtype that travelled, and for FP8 scales [M, ceil(D / 128)] float32, else None."""
        if self.dtype == "fp8":
            values_MD = rows_MB[:, :num_values].view(torch.float8_e4m3fn)
            return values_MD, rows_MB[:, _scale_offset(num_values) :].view(torch.float32)
        return rows_MB.view(torch.float32 if self.dtype == "float32" else torch.bfloat16), None


def _scale_offset(num_values: int) -> int:
    return -(-num_values // 4) * 4
