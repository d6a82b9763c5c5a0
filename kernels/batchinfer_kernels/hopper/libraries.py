"""DeepSeek's libraries for Hopper GPUs, deep_gemm and flash_mla: whether they can be used here, and their functions.

A probe first looks for what is cheaper than an import: a torch with CUDA, the library on disk, a Hopper GPU, and for
deep_gemm a CUDA toolkit, without which its import fails.

The libraries have changed names and signatures over time; all of these are known here:

    deep_gemm   2.x (github.com/deepseek-ai/DeepGEMM), sgl-deep-gemm 0.1.x.
                Not 1.0.0, which is what the package deep_gemm is: it imports, but cannot multiply.
    flash_mla   first version (metadata in two tensors), later ones (FlashMLASchedMeta), and sgl-flash-mla 1.0.0, which
                keeps the kernels for Hopper behind `use_legacy`; the release of 2026.09.30 itself has none.
"""

import functools
import importlib
import importlib.util
import inspect
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_HOPPER = (9, 0)
_INSTALL = "see docs/gpus.md"

FP8_GEMM = ("fp8_gemm_nt", "fp8_fp4_gemm_nt")
FP8_CONTIGUOUS = ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous")
FP8_MASKED = ("m_grouped_fp8_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked", "m_grouped_fp8_fp4_gemm_nt_masked")
MQA_LOGITS = ("fp8_mqa_logits",)
BF16_CONTIGUOUS = ("m_grouped_bf16_gemm_nt_contiguous",)
BF16_MASKED = ("m_grouped_bf16_gemm_nt_masked", "bf16_m_grouped_gemm_nt_masked")


@functools.cache
def why_not_deep_gemm() -> str | None:
    """Return why deep_gemm's FP8 products cannot be used here, or None."""
    reason = _why_no_gpu("deep_gemm") or _why_no_toolkit() or _why_no_import("deep_gemm")
    if reason is not None:
        return reason
    for names in (FP8_GEMM, FP8_CONTIGUOUS, FP8_MASKED):
        if deep_gemm(names) is None:
            return f"deep_gemm {version('deep_gemm')} has no {names[0]}; another version is needed, {_INSTALL}"
    return None


@functools.cache
def why_not_flash_mla() -> str | None:
    """Return why flash_mla's dense decode attention cannot be used here, or None."""
    reason = _why_no_gpu("flash_mla") or _why_no_import("flash_mla")
    if reason is not None:
        return reason
    library = flash_mla()
    for name in ("get_mla_metadata", "flash_mla_with_kvcache"):
        if not hasattr(library, name):
            return f"flash_mla {version('flash_mla')} has no {name}; another version is needed, {_INSTALL}"
    parameters = decode_parameters()
    # enable_batch_invariant came with the release that dropped Hopper
    has_legacy = library.has_legacy() if "use_legacy" in parameters else "enable_batch_invariant" not in parameters
    if not has_legacy:
        return f"flash_mla {version('flash_mla')} has no dense decode for Hopper GPUs; sgl-flash-mla has, {_INSTALL}"
    return None


def deep_gemm(names: tuple[str, ...]) -> Callable[..., Any] | None:
    """Return deep_gemm's function of the first of these names that this version has, or None."""
    library = importlib.import_module("deep_gemm")
    return next((getattr(library, name) for name in names if hasattr(library, name)), None)


def flash_mla() -> Any:
    """Import flash_mla."""
    return importlib.import_module("flash_mla")


@functools.cache
def decode_parameters() -> frozenset[str]:
    """Return the names of the parameters of flash_mla's decode."""
    return frozenset(inspect.signature(flash_mla().flash_mla_with_kvcache).parameters)


@functools.cache
def makes_own_metadata() -> bool:
    """Return whether decode itself splits its work, so that `get_mla_metadata` takes no arguments."""
    kinds = {parameter.kind for parameter in inspect.signature(flash_mla().get_mla_metadata).parameters.values()}
    return kinds <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


@functools.cache
def sparse_parameters() -> frozenset[str]:
    """Return the names of the parameters of flash_mla's sparse prefill."""
    return frozenset(inspect.signature(flash_mla().flash_mla_sparse_fwd).parameters)


def version(name: str) -> str:
    """Return the version of an imported library."""
    return str(getattr(importlib.import_module(name), "__version__", "of unknown version"))


def _why_no_gpu(library: str) -> str | None:
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if importlib.util.find_spec(library) is None:
        return f"{library} is not installed, {_INSTALL}"
    if not torch.cuda.is_available():
        return "no GPU that this torch can use"
    capability = torch.cuda.get_device_capability()
    if capability != _HOPPER:
        found = ".".join(map(str, capability))
        return f"{torch.cuda.get_device_name()} has compute capability {found}, Hopper GPUs have 9.0"
    return None


def _why_no_toolkit() -> str | None:
    """Return why there is no CUDA toolkit; deep_gemm compiles its kernels on first use and asserts this at import."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None:
        nvcc = shutil.which("nvcc")
        home = "/usr/local/cuda" if nvcc is None else str(Path(nvcc).parents[1])
    if not Path(home).is_dir():
        return f"no CUDA toolkit in {home}, with which deep_gemm compiles its kernels; set CUDA_HOME"
    compiler = os.environ.get("DG_JIT_NVCC_COMPILER", f"{home}/bin/nvcc")
    if os.environ.get("DG_JIT_USE_NVRTC", "0") == "0" and shutil.which(compiler) is None:
        return f"no compiler {compiler} for deep_gemm's kernels; set CUDA_HOME, or DG_JIT_USE_NVRTC = 1"
    return None


def _why_no_import(library: str) -> str | None:
    try:
        importlib.import_module(library)
    except Exception as error:  # these raise ImportError, OSError, RuntimeError and AssertionError
        message = " ".join(str(error).split()) or "no message"
        return f"{library} cannot be imported here ({type(error).__name__}: {message})"
    return None


def is_on_gpu(*tensors: torch.Tensor) -> bool:
    """Return whether all tensors are on a GPU."""
    return all(tensor.is_cuda for tensor in tensors)
