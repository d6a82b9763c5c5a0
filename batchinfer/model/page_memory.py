"""Memory of KV pages, copies between their rows, and rounding to FP8."""

import math
import mmap
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from batchinfer.config import PAGE_TOKENS
from batchinfer.model.config import ModelConfig
from batchinfer.model.ops import Ops
from batchinfer.model.page_format import FP8, PageFormat
from batchinfer.model.step import AttentionStep
from batchinfer.records import ConfigError
from batchinfer.sanitize import size_text
from batchinfer_kernels.reference.fp8_pages import narrow
from batchinfer_kernels.reference.mla import PagedKeys

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, FP8: torch.uint8}


def zeroed(num_bytes: int) -> mmap.mmap:
    """Return zeros that take no memory until their pages are touched; in large pages if the system has them.

    Raises:
        OSError: the address space does not suffice.
    """
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # a system without large pages, or without the choice
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def empty_pages(
    config: ModelConfig, num_pages: int, form: PageFormat, device: torch.device, *, one_layer: bool = False
) -> torch.Tensor:
    """Return empty KV pages [L, num_pages, 64, row]; on a CPU they take memory when they are used.

    A row is values, or bytes in FP8.

    Args:
        one_layer: all layers have the same pages.

    Raises:
        ConfigError: the address space does not suffice.
    """
    dtype = _DTYPES[form.dtype]
    num_layers = config.num_hidden_layers
    shape = (1 if one_layer else num_layers, num_pages, PAGE_TOKENS, form.row_width(config))
    return zeros(shape, dtype, device).expand(num_layers, -1, -1, -1)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU they take memory when they are used.

    Raises:
        ConfigError: the address space does not suffice.
    """
    num_values = math.prod(shape)
    if device.type != "cpu" or num_values == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        memory = zeroed(num_values * dtype.itemsize)
    except OSError as error:
        size = size_text(num_values * dtype.itemsize)
        raise ConfigError(f"no memory for KV pages of {size}: {error.strerror}; lower cluster.page_bytes") from error
    return torch.frombuffer(memory, dtype=dtype, count=num_values).view(shape)


def copy_in_pages(ops: Ops, step: AttentionStep, pages: torch.Tensor) -> None:
    """Make a step's copies between slots of one layer's pages."""
    if step.copy_from is not None and step.copy_to is not None and len(step.copy_to):
        ops.copy_rows(pages.view(-1, pages.shape[-1]), step.copy_from, step.copy_to)


def over_fp8_pages(op: Callable[..., torch.Tensor], held_dim: int) -> Callable[..., torch.Tensor]:
    """Return an operation on bfloat16 pages that rounds them to FP8 pages and calls `op`, attention over FP8 pages.

    Args:
        held_dim: first values of a row, which are held in FP8.
    """

    def run(q: torch.Tensor, keys: PagedKeys, *rest: Any, **options: Any) -> torch.Tensor:
        pages = narrow(keys.pages.flatten(0, 1), held_dim).view(*keys.pages.shape[:2], -1)
        return op(q, keys._replace(pages=pages), *rest, **options)

    return run
