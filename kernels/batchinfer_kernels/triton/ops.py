"""The operations that have a Triton version; the `reference` functions of the same names document them.

bfloat16 runs in Triton, also with weights in FP8 blocks and in 4 bits. A row has the same bits in any batch. The
modules with the kernels import Triton, so they are imported by the first call of an operation.
"""

# T tokens (rows), D hidden, F intermediate, E experts, M (token, expert) entries

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from batchinfer_kernels.implementation import Implementation, accepts_all, implementation, on_args
from batchinfer_kernels.reference.block_scaled import BlockScaled, to_blocks
from batchinfer_kernels.reference.compressed import EntryKeys, KeyRows, NewEntries
from batchinfer_kernels.reference.fp4 import Fp4Scaled
from batchinfer_kernels.reference.fp8 import ScaledRows
from batchinfer_kernels.reference.gating import GATE_METHODS, GateRule
from batchinfer_kernels.reference.gqa import NewHeads
from batchinfer_kernels.reference.group_scaled import GroupScaled, to_groups
from batchinfer_kernels.reference.mla import PagedKeys
from batchinfer_kernels.reference.places import ExpertRows, PlacedRows
from batchinfer_kernels.reference.rows import NewKeys
from batchinfer_kernels.reference.sparse import IndexedKeys, IndexQueries, NewIndexKeys
from batchinfer_kernels.triton import probe

Weight = torch.Tensor | BlockScaled | GroupScaled


# ---- rejected arguments


def _foreign(x: torch.Tensor, *_: Any, **__: Any) -> str | None:
    """Reject tensors on the CPU, unless Triton's interpreter is on."""
    return None if _runs_on(x) else "tensors are on the CPU"


def _gated(logits_TE: torch.Tensor, _: Any, rule: GateRule, *__: Any, **___: Any) -> str | None:
    """Reject tensors on the CPU, or a method without a kernel."""
    if rule.method not in GATE_METHODS:
        return f"the gate's method {rule.method} is computed in plain PyTorch"
    return _foreign(logits_TE)


def _grouped(
    x: torch.Tensor, _: Any, gate_up: Any, down: Any, tokens_M: Any = None, scales: Any = None, **options: Any
) -> str | None:
    """Reject weights that are not in bfloat16, FP8 blocks or 4 bits on a GPU; rows that are not in bfloat16 or FP8."""
    others = gate_up, down, *(options.get("biases") or ())
    return _mismatch(*others) if scales is not None else _mismatch(x, *others)


def _masked(x: torch.Tensor, _: Any, gate_up: Any, down: Any, scales: Any = None, **options: Any) -> str | None:
    """Reject weights that are not in bfloat16, FP8 blocks or 4 bits on a GPU; rows that are not in bfloat16 or FP8."""
    return _grouped(x, _, gate_up, down, None, scales, **options)


def _summed(rows: ExpertRows) -> str | None:
    """Reject rows that are not in bfloat16 on a GPU, unless Triton's interpreter is on."""
    return _mismatch(rows.values_SD if isinstance(rows, PlacedRows) else rows)


def _rotation(q_THA: torch.Tensor, new: NewKeys) -> str | None:
    """Reject operands that are not in bfloat16 (weights: or FP8 blocks) on a GPU, unless Triton's interpreter is on."""
    return _mismatch(q_THA, new.latents_TW, new.pages) or _uneven(new.pages)


def _attention(q: torch.Tensor, keys: PagedKeys, *kv_b_and_more: Any, **_: Any) -> str | None:
    """Reject operands that are not in bfloat16 (weights: or FP8 blocks) on a GPU, unless Triton's interpreter is on."""
    return _mismatch(q, keys.pages, *kv_b_and_more[:1]) or _uneven(keys.pages)


def _new_heads(qkv_TW: torch.Tensor, new: NewHeads) -> str | None:
    """Reject operands that are not in bfloat16 (norms: or float32) on a GPU, unless Triton's interpreter is on."""
    norms = (norm for norm in (new.norm_q, new.norm_k) if norm is not None)
    return _mismatch(qkv_TW, new.pages, *_narrow(*norms)) or _uneven(new.pages)


def _norm(x: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> str | None:
    """Reject operands that are not in bfloat16 (the weight: or float32) on a GPU, unless the interpreter is on."""
    return _mismatch(x, *_narrow(weight))


def _narrow(*norms: torch.Tensor) -> list[torch.Tensor]:
    """Return the weights of norms that are not in float32 where kernels run."""
    return [norm for norm in norms if norm.dtype is not torch.float32 or not _runs_on(norm)]


def _grouped_heads(q: torch.Tensor, keys: PagedKeys, *_: Any) -> str | None:
    """Reject operands that are not in bfloat16 (weights: or FP8 blocks) on a GPU, unless Triton's interpreter is on."""
    return _mismatch(q, keys.pages) or _uneven(keys.pages)


def _fp8_rotation(q_THA: torch.Tensor, new: NewKeys) -> str | None:
    """Reject operands that are not in bfloat16 on a GPU, unless Triton's interpreter is on."""
    return _mismatch(q_THA, new.latents_TW)


def _fp8_attention(q: torch.Tensor, keys: PagedKeys, *kv_b_and_more: Any, **_: Any) -> str | None:
    """Reject operands that are not in bfloat16 on a GPU, unless Triton's interpreter is on."""
    return _mismatch(q, *kv_b_and_more[:1])


def _index_keys(new: NewIndexKeys) -> str | None:
    """Reject operands that are not in bfloat16 on a GPU, unless Triton's interpreter is on."""
    return _mismatch(new.keys_TI, new.norm_I, new.bias_I, new.pages) or _uneven(new.pages)


def _scored(queries: IndexQueries, keys: IndexedKeys, **_: Any) -> str | None:
    """Reject tensors (queries, keys) that are not in bfloat16 on a GPU, unless Triton's interpreter is on."""
    return _mismatch(queries.q_THI, keys.pages) or _uneven(keys.pages)


def _new_entries(new: NewEntries) -> str | None:
    """Reject pages that are not in bfloat16 on a GPU, unless Triton's interpreter is on."""
    return _mismatch(new.pages)


def _entry_keys(q_THI: torch.Tensor, _: torch.Tensor, keys: EntryKeys, **__: Any) -> str | None:
    """Reject tensors (queries, keys) that are not in bfloat16 on a GPU, unless Triton's interpreter is on."""
    return _mismatch(q_THI, keys.pages)


def _entries(q_THC: torch.Tensor, window: KeyRows, entries: KeyRows | None, *_: Any) -> str | None:
    """Reject tensors (queries, keys) that are not in bfloat16 on a GPU, unless Triton's interpreter is on."""
    return _mismatch(q_THC, window.values, *([] if entries is None else [entries.values]))


def _queries(queries: IndexQueries) -> str | None:
    """Reject tensors (queries) that are not in bfloat16 on a GPU, unless Triton's interpreter is on."""
    return _mismatch(queries.q_THI)


def _chosen(q: torch.Tensor, pages: torch.Tensor, *_: Any, **__: Any) -> str | None:
    """Reject tensors (queries, pages) that are not in bfloat16 on a GPU, unless Triton's interpreter is on."""
    return _mismatch(q, pages) or _uneven(pages)


def _uneven(pages: torch.Tensor) -> str | None:
    """Reject pages whose rows are at unequal distances."""
    step = pages.stride(1)
    is_even = pages.stride(2) == 1 and (pages.stride(0) == pages.shape[1] * step or len(pages) == 1)
    return None if is_even else "rows of pages are at unequal distances"


def _logits(logits_SV: torch.Tensor) -> str | None:
    """Reject logits that are not in float32 on a GPU."""
    is_taken = logits_SV.dtype is torch.float32 and _runs_on(logits_SV)
    return None if is_taken else "logits are not in float32 on a GPU"


def _rounded(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *_: Any) -> str | None:
    """Reject tensors on the CPU, unless Triton's interpreter is on; other results than bfloat16 and float32."""
    return _foreign(weight) or (None if dtype in (torch.bfloat16, torch.float32) else f"the result is to be {dtype}")


def _runs_on(x: torch.Tensor) -> bool:
    """Return whether kernels can be started on the tensor's device."""
    return not x.is_cpu or probe.interprets()


def _mismatch(*operands: Any) -> str | None:
    """Reject operands not in bfloat16 (weights: or FP8, or 4 bits) on a GPU, unless Triton's interpreter is on."""
    for operand in operands:
        is_scaled = isinstance(operand, BlockScaled | ScaledRows | GroupScaled | Fp4Scaled)
        tensor = operand.values if is_scaled else operand
        if not isinstance(tensor, torch.Tensor):
            return "a weight is packed for another candidate"
        if tensor is operand and tensor.dtype is not torch.bfloat16:
            return f"an operand is in {tensor.dtype}"
        if not _runs_on(tensor):
            return "tensors are on the CPU"
    return None


# ---- the operations


@implementation(rejects=accepts_all)
def pack(weight: torch.Tensor, *, eight_bit: bool = False, four_bit: bool = False, is_paired: bool = False) -> Weight:
    """Remove gaps between the weight's values, or round it to FP8 blocks or to 4 bits.

    Raises:
        RuntimeError: the GPU cannot multiply E4M3.
    """
    if four_bit:
        return to_groups(weight.contiguous())
    reason = probe.why_no_fp8() if eight_bit and _runs_on(weight) else None
    if reason is not None:
        raise RuntimeError(reason)
    return to_blocks(weight.contiguous()) if eight_bit else weight.contiguous()


class Kernel:
    """A function of a module that imports Triton; the first call imports the module."""

    def __init__(self, module: str, name: str):
        self._module, self._name = module, name

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        """The function, imported on first use."""
        return getattr(importlib.import_module(f"{__package__}.{self._module}"), self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _kernel(module: str, name: str, rejects: Callable[..., str | None]) -> Implementation[..., Any]:
    return Implementation(Kernel(module, name), rejects)


pack_router = _kernel("router", "pack_router", _foreign)
linear = _kernel("gemm", "linear", on_args(_mismatch, 0, 1))
batched_linear = _kernel("gemm", "batched_linear", on_args(_mismatch, 0, 1))
router = _kernel("router", "router", on_args(_mismatch, 0))
rms_norm = _kernel("rows", "rms_norm", _norm)
rms_norm_fp8 = _kernel("rows", "rms_norm_fp8", _norm)
silu_mul = _kernel("silu", "silu_mul", on_args(_mismatch, 0, 1))
silu_mul_blocks = _kernel("silu", "silu_mul_blocks", on_args(_mismatch, 0))
gate = _kernel("gate", "gate", _gated)
rope_and_cache = _kernel("rows", "rope_and_cache", _rotation)
grouped_mlp = _kernel("experts", "grouped_mlp", _grouped)
masked_mlp = _kernel("experts", "masked_mlp", _masked)
sort_by_expert = _kernel("sorting", "sort_by_expert", _foreign)
expert_places = _kernel("places", "expert_places", _foreign)
sum_per_token = _kernel("rows", "sum_per_token", on_args(_summed, 0))
add_sums = _kernel("rows", "add_sums", on_args(_mismatch, 0))
argmax = _kernel("argmax", "argmax", _logits)
draw = _kernel("draw", "draw", on_args(_logits, 0))
mla_prefill = _kernel("prefill", "mla_prefill", _attention)
mla_decode = _kernel("decode", "mla_decode", _attention)
gqa_rope_and_cache = _kernel("gqa", "gqa_rope_and_cache", _new_heads)
gqa_prefill = _kernel("gqa", "gqa_prefill", _grouped_heads)
gqa_decode = _kernel("gqa", "gqa_decode", _grouped_heads)
gqa_rope_and_cache_fp8 = _kernel("gqa", "gqa_rope_and_cache_fp8", on_args(_mismatch, 0))
gqa_prefill_fp8 = _kernel("gqa", "gqa_prefill_fp8", on_args(_mismatch, 0))
gqa_decode_fp8 = _kernel("gqa", "gqa_decode_fp8", on_args(_mismatch, 0))
spread_queries = _kernel("pieces", "spread_queries", _foreign)
merge_pieces = _kernel("pieces", "merge_pieces", _foreign)
rope_and_cache_fp8 = _kernel("rows", "rope_and_cache_fp8", _fp8_rotation)
mla_prefill_fp8 = _kernel("prefill", "mla_prefill_fp8", _fp8_attention)
mla_decode_fp8 = _kernel("decode", "mla_decode_fp8", _fp8_attention)
index_cache = _kernel("indexer", "index_cache", _index_keys)
choose_keys = _kernel("indexer", "choose_keys", _scored)
rotated_queries = _kernel("indexer", "rotated_queries", _queries)
hadamard_fp8 = _kernel("index_fp8", "hadamard_fp8", on_args(_mismatch, 0))
best_slots = _kernel("topk", "best_slots", _foreign)
mla_sparse = _kernel("decode", "mla_sparse", _chosen)
rotate_heads = _kernel("compressed", "rotate_heads", on_args(_mismatch, 0))
pool_entries = _kernel("compressed", "pool_entries", _new_entries)
choose_entries = _kernel("compressed", "choose_entries", _entry_keys)
attend_entries = _kernel("compressed", "attend_entries", _entries)
stream_products = _kernel("streams", "stream_products", on_args(_mismatch, 0))
stream_mix = _kernel("streams", "stream_mix", _foreign)
join_streams = _kernel("streams", "join_streams", on_args(_mismatch, 0))
leave_streams = _kernel("streams", "leave_streams", on_args(_mismatch, 0, 2))
quantize_fp8_block = _kernel("quantize", "quantize_fp8_block", _foreign)
quantize_fp8_rows = _kernel("quantize", "quantize_fp8_rows", _foreign)
dequantize_fp8_block = _kernel("quantize", "dequantize_fp8_block", _rounded)
