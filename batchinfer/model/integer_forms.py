"""The tensors that stand for one weight of 4-bit integers, in the three forms that checkpoints are published in.

compressed-tensors' pack-quantized (Kimi-K2-Thinking), AutoAWQ's "gemm", and GPTQ's. Each packs eight integers into
one of 32 bits; value = (integer - zero point) * scale, one scale and zero point for `group` inputs of one output.
"""

# N outputs and M inputs of a weight, G = M / group

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from batchinfer.model.headers import TensorHeaders

PER_WORD = 8  # integers of 4 bits in one of 32
_INTEGERS = ("I32",)
_SCALES = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One tensor of a stored weight: its shape and the formats it may have, as safetensors names them."""

    shape: tuple[int, ...]
    formats: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class IntegerForm:
    """The storage form of a checkpoint's 4-bit integer weights, by its quantization_config."""

    method: Literal["compressed-tensors", "awq", "gptq"]
    group: int  # inputs that share a scale
    zero_shift: int = 0  # added to stored zero points: 1 in GPTQ's first format
    in_any_order: bool = False  # each input's group is listed (GPTQ's desc_act); else the list may be missing

    def part(self, name: str, kind: str) -> str:
        """Return the name of a weight's tensor of `kind`: "values" (packed), "scales", "zeros", "shape", "groups"."""
        return name.removesuffix(_REPLACED[self.method]) + _SUFFIXES[self.method][kind]

    def is_stored(self, name: str, tensors: TensorHeaders) -> bool:
        """Return whether this weight, ….weight, is stored as integers."""
        return self.part(name, "values") in tensors

    def parts(self, name: str, shape: tuple[int, int], tensors: TensorHeaders) -> dict[str, StoredPart]:
        """Return the stored tensors of a weight [N, M]; `group` divides M, in AWQ and GPTQ PER_WORD divides both."""
        num_out, num_in = shape
        num_groups, words_out, words_in = num_in // self.group, -(-num_out // PER_WORD), -(-num_in // PER_WORD)
        if self.method == "compressed-tensors":
            shapes = {"values": (num_out, words_in), "scales": (num_out, num_groups), "shape": (2,)}
        else:
            values = (num_in, words_out) if self.method == "awq" else (words_in, num_out)
            shapes = {"values": values, "scales": (num_groups, num_out), "zeros": (num_groups, words_out)}
            if self.method == "gptq" and (self.in_any_order or self.part(name, "groups") in tensors):
                shapes["groups"] = (num_in,)
        return {self.part(name, kind): StoredPart(size, _FORMATS[kind]) for kind, size in shapes.items()}


_REPLACED = {"compressed-tensors": "", "awq": ".weight", "gptq": ".weight"}
_SUFFIXES = {
    "compressed-tensors": {"values": "_packed", "scales": "_scale", "shape": "_shape"},
    "awq": {"values": ".qweight", "scales": ".scales", "zeros": ".qzeros"},
    "gptq": {"values": ".qweight", "scales": ".scales", "zeros": ".qzeros", "groups": ".g_idx"},
}
_FORMATS = {"values": _INTEGERS, "scales": _SCALES, "zeros": _INTEGERS, "shape": ("I64", "I32"), "groups": _INTEGERS}
