"""Triton's interpreter with products whose rows do not depend on each other.

The interpreter multiplies tiles with numpy, whose matrix library adds up in another order for some rows of a tile on
some processors; a GPU's tensor cores do not. In float64 the order is far below what float32 can show.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime import interpreter


def multiply_in_float64() -> None:
    """From now on, in this process; asking twice changes nothing."""
    interpreter.InterpreterBuilder.create_dot = _create_dot


def _create_dot(builder: object, a: Any, b: Any, d: Any, input_precision: object, max_num_imprecise_acc: object) -> Any:
    """Return d + a · b as the interpreter does, rounded once before the sum."""
    parts = []
    for tile in (a, b):
        data = tile.data
        if tile.dtype.primitive_bitwidth == 8 and tile.dtype.is_floating():
            data = interpreter._convert_float(data, tile.dtype, interpreter.tl.float16, None).view(np.float16)
        parts.append(data.astype(np.float64))
    return interpreter.TensorHandle(np.matmul(*parts).astype(d.data.dtype) + d.data, d.dtype.scalar)
