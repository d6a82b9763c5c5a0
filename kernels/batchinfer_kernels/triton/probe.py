"""Whether the Triton operations can run here; asked by backend.py. Looks at nothing that wakes a GPU up."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

_MIN_CAPABILITY = (8, 0)


def interprets() -> bool:
    """Whether the environment asks for Triton's interpreter, which runs everything on the CPU, slowly."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on", "yes", "y"}


@functools.cache
def why_not() -> str | None:
    """The reason why the operations cannot run in this process, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if interprets():
        return None
    if not torch.cuda.is_available():
        return "no CUDA GPU that this torch can use"
    capability = torch.cuda.get_device_capability()
    if capability < _MIN_CAPABILITY:
        return f"the GPU's compute capability is {capability[0]}.{capability[1]}, bfloat16 needs 8.0"
    return None


def why_not_auto() -> str | None:
    """The reason why "auto" passes them over although they can run, or None."""
    return "runs in Triton's interpreter (TRITON_INTERPRET), so only by name" if interprets() else None
