"""A survey of whether rows have the same bits alone and among others on this CPU, per dtype.

It measures the chosen operations, C++ or plain PyTorch, at typical shapes and at odd ones.
"""

# T rows, N columns of the result (out), M depth of the sum (in), E experts, D hidden, F intermediate
# H heads, Z key (without rotary) and value width, C latent width

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from batchinfer_kernels import registry, row_check
from batchinfer_kernels.cpu import build as cpu_build
from batchinfer_kernels.reference.block_scaled import BlockScaled
from batchinfer_kernels.reference.gqa import GqaForm
from batchinfer_kernels.row_check import AttentionShape, RowComputation

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.bfloat16}
_PRODUCTS = ((512, 2048), (2048, 512), (384, 192), (1024, 128), (16, 256), (96, 100), (33, 41))  # N, M
_EXPERTS = ((4, 256, 128), (3, 96, 41))  # E, D, F
_GROUPED = ((16, 4, 32), (16, 1, 80))  # query heads, key heads, head width
_ATTENTION = AttentionShape(num_heads=16, nope_dim=32, rotary_dim=16, value_dim=32, latent_dim=128)


@dataclass(frozen=True, slots=True)
class Surveyed:
    """The survey's result for one dtype: the implementation in use, and why rows are not equal (None: they are)."""

    dtype: str
    implementation: str
    why_unequal: str | None


def survey_rows(choice: str = registry.AUTO) -> list[Surveyed]:
    """Survey every dtype of DTYPES at the number of threads in use; takes about a second.

    Args:
        choice: of the operations, as for `registry.select`.
    """
    return [
        Surveyed(dtype, _implementation(dtype, choice), row_check.why_rows_differ(_computations(dtype, choice)))
        for dtype in DTYPES
    ]


def _implementation(dtype: str, choice: str) -> str:
    pack = registry.select("pack", choice, DTYPES[dtype])
    name = f"C++ for {cpu_build.instructions().name}" if pack.name == registry.CPU else "plain PyTorch"
    if dtype != "fp8":
        return name
    is_emulated = isinstance(pack(torch.zeros(1, 1, dtype=DTYPES[dtype]), eight_bit=True), BlockScaled)
    return f"{name}, {'E4M3 by emulation, slow' if is_emulated else '8-bit integers'}"


def _computations(dtype: str, choice: str) -> Iterator[RowComputation]:
    kind = DTYPES[dtype]
    pack, linear, grouped_mlp, mla_decode, mla_prefill = (
        registry.select(op, choice, kind) for op in ("pack", "linear", "grouped_mlp", "mla_decode", "mla_prefill")
    )
    pack_projection = partial(pack, eight_bit=dtype == "fp8")
    for shape in _PRODUCTS:
        weight_NM = _random(*shape, dtype=kind)
        yield row_check.product(weight_NM, _with_weight(linear, pack_projection(weight_NM)))
    for num_experts, hidden, width in _EXPERTS:
        gate_up = pack_projection(_random(num_experts, 2 * width, hidden, dtype=kind), is_paired=True)
        down = pack_projection(_random(num_experts, hidden, width, dtype=kind))
        x_TD = _random(row_check.MANY_ROWS, hidden, dtype=kind)
        yield RowComputation(
            f"a layer of {num_experts} experts of {width} x {hidden}",
            partial(_experts, x_TD, num_experts, _with_experts(grouped_mlp, gate_up, down)),
            3 * hidden * width,
        )
    yield row_check.decode_attention(_ATTENTION, kind, mla_decode)
    kv_b_HZC = _random(_ATTENTION.num_heads, 2 * _ATTENTION.value_dim, _ATTENTION.latent_dim, dtype=kind)
    kv_b = pack(kv_b_HZC)
    yield row_check.prefill_attention(
        _ATTENTION, kv_b_HZC, lambda q, keys, _, *rest, **options: mla_prefill(q, keys, kv_b, *rest, **options)
    )
    gqa_prefill, gqa_decode = (registry.select(op, choice, kind) for op in ("gqa_prefill", "gqa_decode"))
    for num_heads, num_kv_heads, head_dim in _GROUPED:
        form = GqaForm(num_kv_heads, head_dim**-0.5)
        yield from row_check.grouped_attention(num_heads, head_dim, form, kind, gqa_decode, gqa_prefill)


def _with_weight(linear: Callable[..., torch.Tensor], packed: Any) -> Callable[..., torch.Tensor]:
    return lambda x, _: linear(x, packed)


def _with_experts(grouped_mlp: Callable[..., torch.Tensor], gate_up: Any, down: Any) -> Callable[..., torch.Tensor]:
    return lambda x, num_rows_E: grouped_mlp(x, num_rows_E, gate_up, down)


def _experts(
    x_TD: torch.Tensor, num_experts: int, mlp: Callable[..., torch.Tensor], start: int, stop: int
) -> torch.Tensor:
    """Compute rows that go to the experts in turn, so that each expert has few or many of them."""
    ids_T = torch.arange(start, stop) % num_experts
    order_T = ids_T.argsort(stable=True)
    y_TD = mlp(x_TD[start:stop][order_T], torch.bincount(ids_T, minlength=num_experts))
    return y_TD[order_T.argsort()]


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)
