"""Probes of whether the Triton operations can run here, without waking up a GPU."""

import functools
import importlib.util
import os
from importlib.metadata import version as installed_version

import torch

_MIN_CAPABILITY = (8, 0)
_MIN_SHARED_BYTES = 145 * 1024  # decode attention at DeepSeek-V3's widths; datacenter GPUs have 164 KB and more
_MIN_FP8_CAPABILITY = (8, 9)
# Up to Triton 3.6 the interpreter reads the bounds of a kernel's loops in a way that numpy 2.4 has ended.
_OLD_INTERPRETER, _NEW_NUMPY = (3, 6), (2, 4)


def interprets() -> bool:
    """Return whether the environment asks for Triton's interpreter, which runs everything on the CPU, slowly."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on", "yes", "y"}


def device_types() -> tuple[str, ...]:
    """Return the types of devices whose tensors the operations take."""
    return ("cpu", "cuda") if interprets() else ("cuda",)


@functools.cache
def why_not() -> str | None:
    """Return the reason why the operations cannot run in this process, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if interprets():
        return _why_no_interpreter()
    if not torch.cuda.is_available():
        return "no CUDA GPU that this torch can use"
    capability = torch.cuda.get_device_capability()
    if capability < _MIN_CAPABILITY:
        return f"the GPU's compute capability is {capability[0]}.{capability[1]}, bfloat16 needs 8.0"
    shared_bytes = torch.cuda.get_device_properties().shared_memory_per_multiprocessor
    if shared_bytes < _MIN_SHARED_BYTES:
        return f"the GPU has {shared_bytes >> 10} KB of shared memory, the tiles need {_MIN_SHARED_BYTES >> 10}"
    return None


def _why_no_interpreter() -> str | None:
    """Return the reason why the interpreter cannot run with the installed numpy, or None."""
    triton, numpy = installed_version("triton"), installed_version("numpy")
    if _release(triton) > _OLD_INTERPRETER or _release(numpy) < _NEW_NUMPY:
        return None
    return f"the interpreter of Triton {triton} needs numpy before 2.4, here is {numpy} (pip install 'numpy<2.4')"


def _release(version: str) -> tuple[int, int]:
    """Parse the release of a version: 3 and 6 of "3.6.0"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def why_no_fp8() -> str | None:
    """Return the reason why products in FP8 cannot run although the others can, or None."""
    if interprets() or not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability()
    if capability < _MIN_FP8_CAPABILITY:
        return f"the GPU's compute capability is {capability[0]}.{capability[1]}, E4M3 needs 8.9; use bfloat16"
    return None


def why_not_auto() -> str | None:
    """Return the reason why "auto" passes these operations over although they can run, or None."""
    return "runs in Triton's interpreter (TRITON_INTERPRET), so only by name" if interprets() else None


def version() -> str:
    """Return the library's version and the runner of the kernels: code of another one may round differently."""
    return installed_version("triton") + ("-interpreted" if interprets() else "")
