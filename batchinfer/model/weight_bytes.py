"""Memory of a model's weights on a CPU, computed from its config before any weight is read."""

from dataclasses import replace

from batchinfer.config import VALUE_BYTES
from batchinfer.model.config import ModelConfig

_PROJECTED_FP8 = 1 + 6 / 128  # bytes of a weight in 8 bits: 128 have a sum in int32 and a scale in bfloat16
_EXPERTS_4_BITS = 18 / 32  # of one in 4 bits, where 32 share a scale
_COLUMNS = 64  # results of a packed weight are filled up to a multiple
_SLACK_BYTES = 1 << 20  # for the alignment of tensors
# Least memory of a rank's process without weights and KV pages (167-220 MB measured for 8 ranks of a tiny model).
PROCESS_BYTES = 150 << 20
_KEPT_SHARE = 1.5  # peak memory of a step ÷ values between its layers; 1.25 and 1.35 on two models


def rank_bytes(model: ModelConfig, dtype: str, *, num_experts: int | None = None) -> int:
    """Return the least number of bytes of a rank without its KV pages; arguments as of `weight_bytes`."""
    return weight_bytes(model, dtype, num_experts=num_experts) + PROCESS_BYTES


def weight_bytes(model: ModelConfig, dtype: str, *, num_experts: int | None = None) -> int:
    """Return the bytes of a rank's weights, packed for the C++ operations; plain tensors take no more.

    Args:
        dtype: model.dtype of the job.
        num_experts: routed experts that the rank holds of each layer; None: all.
    """
    hidden, layers = model.hidden_size, model.num_hidden_layers
    matrices = [model.attention.matrices(hidden, layer) for layer in range(layers)]
    attention = sum(num_in * _filled(num_out) for one in matrices for num_in, num_out in one.narrow)
    routed = model.n_routed_experts if num_experts is None else num_experts
    expert, dense = _mlp(hidden, model.moe_intermediate_size), layers - model.num_moe_layers
    mlps = model.num_moe_layers * model.n_shared_experts * expert + dense * _mlp(hidden, model.intermediate_size)

    maps = sum(num_in * _filled(num_out) for one in matrices for num_in, num_out in one.wide)
    norms = sum(one.num_others for one in matrices) + layers * len(model.family_row.norms) * hidden
    norms *= 1 + model.family_row.wide_norms  # in float32
    vocabulary = (1 + (not model.tie_word_embeddings)) * _filled(model.vocab_size) * hidden
    if model.hyper is not None:
        norms += model.hyper.num_values(hidden, layers)
    others = maps + norms + vocabulary + hidden
    value_bytes = VALUE_BYTES[dtype]
    projected_bytes = _projected_bytes(dtype)
    expert_bytes = _EXPERTS_4_BITS if dtype in ("int4", "fp4") else projected_bytes
    experts = model.num_moe_layers * routed * expert * expert_bytes
    return int(experts + (attention + mlps) * projected_bytes + others * value_bytes) + _SLACK_BYTES


def mtp_bytes(model: ModelConfig, dtype: str) -> int:
    """Return the bytes of the layer for multi-token prediction: one more layer, and the map that joins two states."""
    longer = replace(model, num_hidden_layers=model.num_hidden_layers + 1)
    joined = _filled(model.hidden_size) * 2 * model.hidden_size * _projected_bytes(dtype)
    return weight_bytes(longer, dtype) - weight_bytes(model, dtype) + int(joined)


def step_bytes(model: ModelConfig, num_tokens: int, item_bytes: int) -> int:
    """Return the rough bytes of a prefill step: residual, queries, attention and rows of the chosen experts."""
    heads = model.attention.query_width + model.attention.output_width
    per_expert = model.hidden_size + model.moe_intermediate_size
    values = 4 * model.hidden_size + heads + model.num_experts_per_tok * per_expert
    return int(_KEPT_SHARE * num_tokens * values * item_bytes)


def _projected_bytes(dtype: str) -> float:
    return _PROJECTED_FP8 if dtype in ("fp8", "int4", "fp4") else VALUE_BYTES[dtype]


def _mlp(hidden: int, intermediate: int) -> int:
    return hidden * _filled(2 * intermediate) + intermediate * _filled(hidden)


def _filled(num_columns: int) -> int:
    return -(-num_columns // _COLUMNS) * _COLUMNS
