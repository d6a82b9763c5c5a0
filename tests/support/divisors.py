"""Divisors of tensors: a plain number is another divisor on a GPU than on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Divisors(TorchDispatchMode):
    """Collects the divisors of all divisions while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.divisors: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket is torch.ops.aten.div:
            self.divisors.append(args[1])
        return function(*args, **kwargs or {})
