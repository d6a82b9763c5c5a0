"""Places of tensors in files, and the conversion of foreign names to the names of tensor_names.py.

    Mistral's own code      layers.3.attention.wq_a.weight          model.layers.3.self_attn.q_a_proj.weight
                            layers.3.attention.wq_a.qscale_weight   … q_a_proj.weight_scale_inv
    compressed-tensors      … q_a_proj.weight_scale (of 8 bits)     … q_a_proj.weight_scale_inv
    MiniMax-M2              … block_sparse_moe.gate.weight          … mlp.gate.weight
                            … block_sparse_moe.experts.7.w1.weight  … mlp.experts.7.gate_proj.weight
    Qwen2 with experts      … mlp.shared_expert.gate_proj.weight    … mlp.shared_experts.gate_proj.weight
    DeepSeek-V4             layers.3.attn.wq_a.weight (names kept)  model.layers.3.self_attn.wq_a.weight
                            layers.3.ffn.experts.7.w1.weight        … mlp.experts.7.gate_proj.weight
                            … .scale of FP8 and of FP4              … .weight_scale_inv, .weight_scales
    transformers, stacked   … mlp.experts.gate_up_proj [E, 2F, D]   … mlp.experts.7.gate_proj.weight [F, D], then up

    gpt-oss                 … mlp.router.weight                     … mlp.gate.weight
                            … mlp.experts.gate_up_proj [E, D, 2F]   … mlp.experts.7.gate_proj.weight, up_proj in turn
                            … gate_up_proj_blocks [E, 2F, D/32, 16] … mlp.experts.7.gate_proj.weight_blocks

A stacked tensor is read part by part, without a copy of the whole.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from batchinfer.model.moe_config import MAX_EXPERTS

_EIGHT_BITS = "F8_E4M3", "I8"
_BLOCK_ROWS = 128  # of one FP8 scale


class _Stacked(NamedTuple):
    """A stacked tensor of gpt-oss: its name in one expert, and its dims."""

    name: str
    num_dims: int


_OUTSIDE = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_IN_LAYERS = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.wo": "self_attn.o_proj",
    "gate": "mlp.gate",
}
_MLPS = {"feed_forward": "mlp", "shared_experts": "mlp.shared_experts", "experts": "mlp.experts"}
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_VALUES = {"qscale_weight": "weight_scale_inv", "qscale_act": "activation_scale"}
_OF_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(\w+)")
_OF_MLP = re.compile(r"(feed_forward|shared_experts|experts)((?:\.\d+)?)\.(w[123])")
_SPARSE_MOE = re.compile(
    r"\.block_sparse_moe\.(?:(?P<bias>e_score_correction_bias$)|(?P<gate>gate\.)|"
    r"(?P<expert>experts\.\d+\.)(?P<projection>w[123])\.)"
)
_INTERLEAVED = re.compile(
    r"(?P<experts>.+\.mlp\.experts\.)(?P<projection>gate_up_proj|down_proj)(?P<kind>|_bias|_blocks|_scales)"
)
_OF_BOTH = "gate_up_proj_bias"  # no other family has it
_EXPERT_VALUES = {
    "": _Stacked("weight", 3),
    "_bias": _Stacked("bias", 2),
    "_blocks": _Stacked("weight_blocks", 4),
    "_scales": _Stacked("weight_scales", 3),
}
_OF_STREAMS = "hc_head_fn"  # no other family has it
_IN_V4_LAYERS = (
    ("attn_norm.", "input_layernorm."),
    ("ffn_norm.", "post_attention_layernorm."),
    ("attn.", "self_attn."),
    ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
    ("ffn.", "mlp."),
)
_OUTSIDE_V4 = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
_OF_V4_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_V4_EXPERT = re.compile(r"(mlp\.(?:experts\.\d+|shared_experts)\.)(w[123])\.")
_STACKED = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)(_scale_inv)?")


class Part(NamedTuple):
    """Rows of one matrix in a stacked tensor: from `first` to `end`, every `step`-th, of its transpose if it is one."""

    matrix: int
    first: int
    end: int
    step: int = 1
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Place, shape and format of a tensor; `dtype` is the format's name in the file, such as BF16 or F8_E4M3."""

    path: Path
    stored_name: str
    shape: tuple[int, ...]
    dtype: str
    part: Part | None = None  # of a stacked tensor

    @property
    def num_bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)  # all formats that are read say them: BF16, F8_E4M3
        return math.prod(self.shape) * int(bits[0]) // 8 if bits else 0


def own_names(infos: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the same tensors by the names used here; unknown tensors keep their names."""
    if "tok_embeddings.weight" in infos:
        infos = {_of_mistral(name): info for name, info in infos.items()}
    if _OF_STREAMS in infos:
        infos = {_of_v4(name, infos): info for name, info in infos.items()}
    infos = {_SPARSE_MOE.sub(_of_sparse_moe, name): info for name, info in infos.items()}
    infos = {name.replace(".mlp.router.", ".mlp.gate."): info for name, info in infos.items()}
    infos = {name.replace(".mlp.shared_expert.", ".mlp.shared_experts."): info for name, info in infos.items()}
    interleaved = {name.removesuffix(_OF_BOTH) for name in infos if name.endswith(_OF_BOTH)}
    named: dict[str, TensorInfo] = {}
    for name, info in infos.items():
        weight = infos.get(name.removesuffix("_scale"))
        if (of_experts := _INTERLEAVED.fullmatch(name)) is not None and of_experts["experts"] in interleaved:
            named.update(_deinterleaved(of_experts, info))
        elif name.endswith(".weight_scale") and weight is not None and weight.dtype in _EIGHT_BITS:
            named[f"{name}_inv"] = info
        else:
            named.update(_taken_apart(name, info, infos))
    return named


def _of_sparse_moe(found: re.Match[str]) -> str:
    """Convert the part of a name behind `block_sparse_moe` to the names of DeepSeek's experts."""
    if found["bias"]:
        return ".mlp.gate.e_score_correction_bias"
    return f".mlp.{found['gate']}" if found["gate"] else f".mlp.{found['expert']}{_PROJECTIONS[found['projection']]}."


def _of_mistral(name: str) -> str:
    """Convert a name of Mistral's code to the name in transformers."""
    module, _, value = name.rpartition(".")
    if module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.{value}"
    of_layer = _OF_LAYER.fullmatch(name)
    if of_layer is None:
        return name
    layer, module, value = of_layer.groups()
    if (of_mlp := _OF_MLP.fullmatch(module)) is not None:
        kind, number, projection = of_mlp.groups()
        module = f"{_MLPS[kind]}{number}.{_PROJECTIONS[projection]}"
    elif module in _IN_LAYERS:
        module = _IN_LAYERS[module]
    else:
        return name
    return f"model.layers.{layer}.{module}.{_VALUES.get(value, value)}"


def _of_v4(name: str, infos: dict[str, TensorInfo]) -> str:
    """Convert a name of DeepSeek-V4's files; those of layers for multi-token prediction stay."""
    in_layer = _OF_V4_LAYER.fullmatch(name)
    if in_layer is not None:
        number, rest = in_layer.groups()
        for old, new in _IN_V4_LAYERS:
            if rest.startswith(old):
                rest = new + rest.removeprefix(old)
                break
        rest = _V4_EXPERT.sub(lambda found: f"{found[1]}{_PROJECTIONS[found[2]]}.", rest)
        own = f"model.layers.{number}.{rest}"
    elif name in _OUTSIDE_V4:
        own = _OUTSIDE_V4[name]
    elif name == "norm.weight" or name.startswith("hc_head_"):
        own = f"model.{name}"
    else:
        return name
    weight = infos.get(name.removesuffix("scale") + "weight") if name.endswith(".scale") else infos[name]
    is_fp4 = weight is not None and weight.dtype == "I8"
    if weight is not None and name.endswith(".scale"):
        return own.removesuffix("scale") + ("weight_scales" if is_fp4 else "weight_scale_inv")
    return f"{own}_blocks" if is_fp4 else own


def _taken_apart(name: str, info: TensorInfo, infos: dict[str, TensorInfo]) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the weights, or scales, of each expert in a stacked tensor of a layer."""
    stacked = _STACKED.fullmatch(name)
    if stacked is None or len(info.shape) != 3 or info.shape[0] > MAX_EXPERTS:
        yield name, info
        return
    experts, kind, scale = stacked[1], stacked[2], stacked[3] or ""
    projections = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    count, rows, columns = info.shape
    shares_scale = bool(scale) and rows == 1  # one for the whole expert, or one row of blocks
    if not shares_scale and not _can_be_cut(rows, len(projections), infos[name.removesuffix(scale)] if scale else None):
        yield name, info
        return
    each = rows if shares_scale else rows // len(projections)
    for expert in range(count):
        for place, projection in enumerate(projections):
            first = 0 if shares_scale else place * each
            part = replace(info, shape=(each, columns), part=Part(expert, first, first + each))
            yield f"{experts}.{expert}.{projection}.weight{scale}", part


def _deinterleaved(name: re.Match[str], info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the tensors of each expert of gpt-oss: rows of gate and up alternate, and plain weights are transposed."""
    kind = _EXPERT_VALUES[name["kind"]]
    is_plain = kind.name == "weight"
    if len(info.shape) != kind.num_dims or info.shape[0] > MAX_EXPERTS:
        yield name[0], info
        return
    count, rows, *rest = (info.shape[0], *info.shape[:0:-1]) if is_plain else info.shape
    projections = ("gate_proj", "up_proj") if name["projection"] == "gate_up_proj" else ("down_proj",)
    step = len(projections)
    for expert in range(count):
        for first, projection in enumerate(projections):
            part = Part(expert, first, rows, step, is_plain)
            own = replace(info, shape=(len(range(first, rows, step)), *rest), part=part)
            yield f"{name['experts']}{expert}.{projection}.{kind.name}", own


def _can_be_cut(rows: int, num_projections: int, scaled: TensorInfo | None) -> bool:
    """Return whether gate and up have equal numbers of rows, and no row of blocks of the scaled tensor is in both."""
    if num_projections == 1:
        return True
    return rows % 2 == 0 and (scaled is None or scaled.shape[1] % (2 * _BLOCK_ROWS) == 0)
