"""Common parts of tests of the operations for Hopper GPUs: stand-ins by their names, values, closeness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from batchinfer_kernels import registry
from batchinfer_kernels.hopper import invariant, libraries
from batchinfer_kernels.reference.mla import PagedKeys
from support import hopper_stand_ins as stand_ins
from support.random_tensors import random

TOLERANCE = {"bfloat16": 2**-7}  # of the largest value
DEEP_GEMM = {"upstream": stand_ins.deep_gemm_upstream, "sgl": stand_ins.deep_gemm_sgl}
FLASH_MLA = {
    "first": stand_ins.flash_mla_first,
    "later": stand_ins.flash_mla_later,
    "sgl": stand_ins.flash_mla_sgl,
}
SPARSE_FLASH_MLA = {name: FLASH_MLA[name] for name in ("later", "sgl")}
OPS = ("linear", "grouped_mlp", "masked_mlp", "mla_decode")


def with_reference(op: str) -> Callable[..., Any]:
    """The operation with plain PyTorch behind it."""
    return registry.bind(op, ["hopper", "reference"])


def close(y: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether these differ by what bfloat16 explains."""
    off = (y.float() - expected.float()).abs().max()
    return bool(off <= TOLERANCE["bfloat16"] * expected.float().abs().max())


def forget() -> None:
    """Have probes ask again."""
    for function in (
        libraries.why_not_deep_gemm,
        libraries.why_not_flash_mla,
        libraries.decode_parameters,
        libraries.makes_own_metadata,
        libraries.sparse_parameters,
        invariant.why_not,
    ):
        function.cache_clear()


def decode_case(
    num_queries: int = 1, heads: int = 16, kv_tokens: tuple[int, ...] = (1, 64, 150, 200, 7), seed: int = 0
) -> tuple[torch.Tensor, PagedKeys, dict[str, Any]]:
    """Queries, keys and options of decode attention; `kv_tokens` are what each request's first query sees."""
    num_requests = len(kv_tokens)
    pages = random(20, 64, 576, seed=seed)
    table = torch.randperm(20, generator=torch.Generator().manual_seed(seed))[: 4 * num_requests].view(num_requests, 4)
    lengths = torch.tensor(kv_tokens) + num_queries - 1
    positions = (lengths[:, None] - num_queries + torch.arange(num_queries)).flatten()
    q = random(num_requests * num_queries, heads, 576, seed=seed + 1)
    return q, PagedKeys(pages, table, lengths, positions), {"latent_dim": 512, "scale": 0.1352}
