"""The operations a model was built with, chosen once; every layer calls them through this."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from batchinfer.model.page_format import FP8, PageFormat
from batchinfer.records import ModelError
from batchinfer_kernels import registry
from batchinfer_kernels.reference.block_scaled import BlockScaled
from batchinfer_kernels.reference.fp8 import ScaledRows
from batchinfer_kernels.registry import Operation
from batchinfer_kernels.weight_format import Weight, WeightFormat, format_of, fp4_format_beside

# of one attention kind alone
LATENT = ("rope_and_cache", "mla_prefill", "mla_decode", "index_cache", "choose_keys", "mla_sparse")
GROUPED = ("gqa_rope_and_cache", "gqa_prefill", "gqa_decode")
COMPRESSED = ("rotate_heads", "pool_entries", "choose_entries", "attend_entries")
STREAMS = ("stream_products", "stream_mix", "join_streams", "leave_streams")  # of hyper-connections
_OF_PAGES = (*LATENT[:3], *GROUPED)  # which have a version for pages in FP8
_OF_FP8 = ("rms_norm_fp8", "silu_mul_blocks")  # a plain operation and rounding in one, for weights in FP8 blocks


@dataclass(frozen=True, slots=True)
class Ops:
    """Every operation of a model, bound to its candidates; shapes as in `reference` of batchinfer_kernels."""

    pack: Operation
    pack_router: Operation
    linear: Operation
    batched_linear: Operation
    router: Operation
    rms_norm: Operation
    rms_norm_fp8: Operation
    silu_mul: Operation
    silu_mul_blocks: Operation
    rope_and_cache: Operation
    gate: Operation
    grouped_mlp: Operation
    masked_mlp: Operation
    add_sums: Operation
    gather_rows: Operation
    copy_rows: Operation
    mla_prefill: Operation
    mla_decode: Operation
    index_cache: Operation
    choose_keys: Operation
    mla_sparse: Operation
    gqa_rope_and_cache: Operation
    gqa_prefill: Operation
    gqa_decode: Operation
    rotate_heads: Operation
    pool_entries: Operation
    choose_entries: Operation
    attend_entries: Operation
    stream_products: Operation
    stream_mix: Operation
    join_streams: Operation
    leave_streams: Operation
    cos_sin: Operation
    argmax: Operation
    draw: Operation
    log_sum_exp: Operation
    most_likely: Operation
    apply_token_bitmask: Operation
    eight_bit: bool = False  # projections and experts are packed in 8 bits with a scale per block, and multiplied so
    four_bit: bool = False  # routed experts are packed in 4 bits with a scale per group instead
    fp4_experts: bool = False  # routed experts are held in FP4, as they are stored
    fp8_pages: bool = False  # pages hold latents in FP8, as reference/fp8_pages.py of the kernels lays them out
    unused: tuple[str, ...] = (*GROUPED, *COMPRESSED, *STREAMS)  # operations that the model's attention never calls

    @property
    def reads_on_host(self) -> bool:
        """Whether an operation of a decode step waits for values of the device: a CUDA graph cannot hold it then."""
        return registry.reads_on_host(self.grouped_mlp) or registry.reads_on_host(self.masked_mlp)

    @property
    def chooses_on_host(self) -> bool:
        """Whether the choice of keys waits for values of the device, as `reads_on_host`."""
        return registry.reads_on_host(self.choose_keys)

    def names(self, dtype: torch.dtype | None = None) -> str:
        """Return the origins of the implementations; implementations with equal bits in this dtype have equal names.

        Operations that also round their result are left out: their bits are those of the plain operation, rounded.
        """
        ops = (getattr(self, name) for name in self._names_of_bits)
        return " ".join(sorted({registry.origin(op, dtype) for op in ops}))

    @property
    def on_gpus(self) -> bool:
        """Whether products are a GPU's, so that weights are in the form of GPUs."""
        return self.linear.name in (registry.HOPPER, registry.TRITON)

    @property
    def bits(self) -> str:
        """Names of products and pages that are in fewer bits than the model's dtype."""
        held = {"8-bit products": self.eight_bit, "4-bit experts": self.four_bit, "FP4 experts": self.fp4_experts}
        held |= {"KV in FP8": self.fp8_pages}
        return "".join(f", {words}" for words, holds in held.items() if holds)

    @property
    def has_fixed_sums(self) -> bool:
        """Whether each sum has one order, fixed in the C++ sources, so that bits depend on nothing else."""
        return all(registry.has_fixed_sums(getattr(self, name)) for name in self._names_of_bits)

    @property
    def _names_of_bits(self) -> list[str]:
        return [name for name in op_names() if name not in (*_OF_FP8, *self.unused)]

    @classmethod
    def select(
        cls,
        choice: str = registry.AUTO,
        dtype: torch.dtype | None = None,
        *,
        eight_bit: bool = False,
        four_bit: bool = False,
        fp4_experts: bool = False,
        fp8_pages: bool = False,
        device: torch.device | str = "cpu",
        unused: tuple[str, ...] = (*GROUPED, *COMPRESSED, *STREAMS),
    ) -> Ops:
        """Return the best implementations for tensors of this device ("auto"), or the named one for all operations.

        Raises:
            ModelError: the named implementation does not exist or cannot run there, with its reason.
        """
        try:
            chosen = {
                name: registry.select(f"{name}_fp8" if fp8_pages and name in _OF_PAGES else name, choice, dtype, device)
                for name in op_names()
            }
        except registry.BackendError as error:
            raise ModelError(f"backend {choice!r}: {error}") from error
        return cls(
            **chosen,
            eight_bit=eight_bit,
            four_bit=four_bit,
            fp4_experts=fp4_experts,
            fp8_pages=fp8_pages,
            unused=unused,
        )

    def page_format(self, dtype: torch.dtype) -> PageFormat:
        """Return the format of pages of a model in this dtype."""
        return PageFormat(FP8 if self.fp8_pages else str(dtype).removeprefix("torch."))

    def weight_format(self, dtype: torch.dtype, device: torch.device | str, **bits: bool) -> WeightFormat:
        """Return the form of weights for products on this device; `bits`: `eight_bit` or `four_bit` weights."""
        one = torch.zeros(1, 1, dtype=torch.bfloat16 if any(bits.values()) else dtype, device=device)
        return format_of(self.pack(one, **bits))

    def expert_format(self, dtype: torch.dtype, device: torch.device | str) -> WeightFormat:
        """Return the form of routed experts' weights on this device."""
        if self.fp4_experts:
            return fp4_format_beside(self.pack(torch.zeros(1, 1, dtype=torch.bfloat16, device=device)))
        bits = {"four_bit": True} if self.four_bit else {"eight_bit": True} if self.eight_bit else {}
        return self.weight_format(dtype, device, **bits)

    def holds_fp8(self, device: torch.device | str) -> bool:
        """Return whether routed experts on this device are held in E4M3 blocks, as in FP8 checkpoints.

        Otherwise they are in 4 bits, or 8 bits are integers (the C++ products on a CPU), or they are not narrow at all.
        """
        return self.eight_bit and self.expert_format(torch.bfloat16, device).keeps_fp8


def normed(
    ops: Ops, x: torch.Tensor, norm: torch.Tensor | None, eps: float, weight: Weight
) -> torch.Tensor | ScaledRows:
    """Return the rows x, normed for a product with this weight: rounded to FP8 if the weight is in FP8 blocks.

    Without a norm they are x itself, which products round.
    """
    if norm is None:
        return x
    if meets_fp8(x, weight):
        return ops.rms_norm_fp8(x, norm, eps)[1]
    return ops.rms_norm(x, norm, eps)


def meets_fp8(x: torch.Tensor, weight: Weight) -> bool:
    """Return whether a product of x with this weight rounds x to FP8 and gives bfloat16."""
    return isinstance(weight, BlockScaled) and x.dtype is torch.bfloat16


_NO_OPS = ("eight_bit", "four_bit", "fp4_experts", "fp8_pages", "unused")


def op_names() -> list[str]:
    """Return the operations among the fields of Ops."""
    return [field.name for field in fields(Ops) if field.name not in _NO_OPS]
