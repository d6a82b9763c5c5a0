"""Rounding and products that give the same in compiled kernels and in Triton's interpreter.

The interpreter truncates bfloat16 instead of rounding, does not round to even in E4M3, and reads bfloat16 in products
as whole numbers. So these steps are written out for it; compiled, each is one instruction of the hardware.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

FP8_MAX = tl.constexpr(448.0)
FP8_MIN_AMAX = tl.constexpr(1e-4)


@triton.jit
def dot(a, b, total):
    """Return total + a · b with a float32 total."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total)


@triton.jit
def to_bfloat16(x):
    """Round float32 to the nearest bfloat16, ties to even."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(tl.bfloat16)


@triton.jit
def to_e4m3(x):
    """Round float32 of at most 448 (or NaN) to the nearest E4M3, ties to even."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        size = tl.abs(x)
        size_bits = bits & 0x7FFFFFFF
        normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
        # below 2**-6 steps are 2**-9 wide; adding 1.5 * 2**23 leaves no bits for less than a step
        small = ((size * 512.0 + 12582912.0) - 12582912.0).to(tl.uint32)
        code = tl.where(size < 0.015625, small, normal) | ((bits >> 31) << 7)
        return tl.where(x == x, code, 0x7F).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return x.to(tl.float8e4nv)


@triton.jit
def scale_of(amax, is_number):
    """Return the scale of a block whose largest size is `amax`; NaN if one of its values is NaN."""
    scale = tl.div_rn(tl.maximum(amax, FP8_MIN_AMAX), FP8_MAX)
    return tl.where(is_number, scale, float("nan"))


@triton.jit
def scaled(x, scale):
    """Return x ÷ scale within ±448, NaN where x ÷ scale is NaN.

    Compiled, a block's inverse is divided once, and each quotient corrected by its remainder: the result is then the
    nearest float32 (Markstein, IBM J. Res. Dev. 34, 1990), as long as nothing underflows; below that E4M3 has only
    zero.
    """
    if INTERPRETED:  # its fma rounds twice
        y = tl.div_rn(x, scale)
    else:
        inverse = tl.div_rn(1.0, scale)
        y = x * inverse
        left = tl.fma(-y, scale, x)
        y = tl.where(scale < float("inf"), tl.fma(left, inverse, y), y)
    return tl.where(y == y, tl.minimum(tl.maximum(y, -FP8_MAX), FP8_MAX), y)


@triton.jit
def load_columns(pointers, is_column, IS_WHOLE: tl.constexpr):
    """Load the values, 0 outside the columns; without a mask if all columns are inside."""
    if IS_WHOLE:
        return tl.load(pointers)
    else:  # noqa: RET505  (a kernel has one type per return only where the branches are constant)
        return tl.load(pointers, mask=is_column, other=0.0)
