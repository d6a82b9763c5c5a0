"""Weights in 4 bits on the way into a product: a tile of them, widened to bfloat16 in registers.

Values and scales lie as in reference/group_scaled.py and reference/fp4.py: two values in a byte, a scale per 32 values
of a row. An E2M1 value times its scale is a bfloat16; an integer times its scale is rounded to one. Rows are not
rounded, so a product has the bits of the product with the widened weight.
"""

import torch
import triton
import triton.language as tl

from batchinfer_kernels.reference.fp4 import Fp4Scaled
from batchinfer_kernels.reference.group_scaled import GROUP, GroupScaled
from batchinfer_kernels.triton.numbers import to_bfloat16

FourBits = GroupScaled | Fp4Scaled
GROUP_VALUES = tl.constexpr(GROUP)


def depth_of(weight: FourBits, width: int) -> int:
    """Return the depth of a weight that meets rows of this width: without the zeros that fill its last group.

    Raises:
        RuntimeError: the weight does not end in the group in which the rows end.
    """
    held = 2 * weight.values.shape[-1]
    return width if held == -(-width // GROUP) * GROUP else held


def widened(weight: FourBits) -> torch.Tensor:
    """Return the weight in bfloat16, as the kernels meet it."""
    return weight.plain().bfloat16()


@triton.jit
def widen(packed, scales, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Return values × scales in bfloat16, [ROWS, GROUPS * 32], of bytes [ROWS, GROUPS * 16]; scales [ROWS, GROUPS]."""
    groups = tl.reshape(tl.join(packed & 15, packed >> 4), (ROWS, GROUPS, GROUP_VALUES)).to(tl.int32)
    if scales.dtype == tl.bfloat16:
        # the last bits of 2**23 + value; subtracting is quicker than converting
        values = (groups | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
        factors = scales.to(tl.float32)
    else:
        size = groups & 7  # 0 and 0.5, then exponent and mantissa of 1 to 6 at the places of float32's
        bits = tl.where(size < 2, size * 0x3F000000, 0x3F000000 + (size << 22)) | ((groups & 8) << 28)
        values = bits.to(tl.float32, bitcast=True)
        exponent = scales.to(tl.int32)
        bits = tl.where(exponent == 0, 0x00400000, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
        factors = bits.to(tl.float32, bitcast=True)
    return tl.reshape(to_bfloat16(values * factors[:, :, None]), (ROWS, GROUPS * GROUP_VALUES))
