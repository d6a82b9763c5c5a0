"""Experts by config.json: their number, their layers, and the choice of a token's experts."""

from typing import Any, NamedTuple

from batchinfer.model.config_reader import ConfigReader
from batchinfer.model.families import FAMILIES, Family
from batchinfer.model.mla_config import read_flag

# The tensors of a checkpoint are listed before they are read: this keeps that list finite for any config.json.
MAX_EXPERTS = 4096

SQRT_SOFTPLUS = "sqrtsoftplus"  # a method of the gate: noaux_tc with other scores

# They say nothing where all layers are dense.
_MOE_KEYS = (
    "n_shared_experts",
    "shared_expert_intermediate_size",
    "moe_intermediate_size",
    "routed_scaling_factor",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
)


class Clamp(NamedTuple):
    """Clamped SwiGLU (Activation of the kernels): values are at most `limit`, up values have `shift` added."""

    limit: float
    alpha: float = 1.0
    shift: float = 0.0


def read_moe(reader: ConfigReader, family_name: str, num_layers: int) -> dict[str, Any]:
    """Return the MoE fields of ModelConfig; zeros if all layers are dense.

    All layers are dense if there are no experts (0, or null as in the original release), or if no layer follows the
    dense ones. The other MoE keys have no effect then.
    """
    family = FAMILIES[family_name]
    dense_layers = reader.size(
        "first_k_dense_replace", default=_first_sparse_layer(reader, family.num_dense_layers), minimum=0
    )
    if dense_layers > num_layers:
        raise reader.unsupported("first_k_dense_replace", dense_layers, f"at most num_hidden_layers = {num_layers}")
    frequency = reader.size("moe_layer_freq", default=1)
    can_mix = family.has_experts and any(layer % frequency == 0 for layer in range(dense_layers, num_layers))
    num_experts = reader.size(
        "n_routed_experts",
        "num_local_experts",
        "num_experts",
        default=None if can_mix else 0,
        minimum=0,
        maximum=MAX_EXPERTS if family.has_experts else 0,
        null=0,
    )
    topk_method = _read_gate(reader, family_name)
    fields = {
        "n_routed_experts": num_experts if can_mix else 0,
        "n_shared_experts": 0,
        "num_experts_per_tok": 0,
        "moe_intermediate_size": 0,
        "first_k_dense_replace": dense_layers,
        "moe_layer_freq": frequency,
        "topk_method": topk_method,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": read_flag(reader, family, "norm_topk_prob", default=family.norm_topk_prob),
        "routed_scaling_factor": 1.0,
        "expert_clamp": None,
        "has_expert_biases": family.has_expert_biases,
        "num_hash_layers": reader.size("num_hash_layers", minimum=0, maximum=num_layers) if family.compressed else 0,
    }
    if family.has_plain_gate:
        for key in ("n_group", "topk_group", "routed_scaling_factor"):
            reader.expect(key, 1, 1.0, supported="1 for this model_type")
    if family.compressed:
        fields["expert_clamp"] = Clamp(reader.number("swiglu_limit", above=0.0))
        reader.expect("norm_topk_prob", True, supported="true")
    if family.has_expert_biases:
        limit = reader.number("swiglu_limit", 7.0, above=0.0)
        fields["expert_clamp"] = Clamp(limit, reader.number("swiglu_alpha", 1.702, above=0.0), shift=1.0)
    if fields["n_routed_experts"]:
        width = reader.size(family.expert_width)
        fields |= {
            "n_shared_experts": _read_shared(reader, family, width),
            "moe_intermediate_size": width,
            "routed_scaling_factor": reader.number("routed_scaling_factor", family.routed_scaling_factor, above=0.0),
        }
        fields |= _read_groups(reader, num_experts, topk_method, family.num_groups)
    else:
        reader.pass_over(*_MOE_KEYS)
    return fields


def _read_shared(reader: ConfigReader, family: Family, expert_width: int) -> int:
    """Return the number of shared experts; one with a gate counts as several, by its width."""
    if not family.has_shared_gate:
        return reader.size("n_shared_experts", default=0, minimum=0, maximum=MAX_EXPERTS)
    width = reader.size("shared_expert_intermediate_size")
    if width % expert_width:
        supported = f"a multiple of {family.expert_width} = {expert_width}"
        raise reader.unsupported("shared_expert_intermediate_size", width, supported)
    return width // expert_width


def _first_sparse_layer(reader: ConfigReader, default: int) -> int:
    """Return the number of layers without experts at the start of the list of layer kinds."""
    kinds = reader.texts("mlp_layer_types")
    return next((layer for layer, kind in enumerate(kinds) if kind == "sparse"), len(kinds)) if kinds else default


def _read_gate(reader: ConfigReader, family_name: str) -> str:
    """Return the method of choosing experts, and check that the scoring function belongs to it, as in V2 or V3."""
    family = FAMILIES[family_name]
    topk_method = reader.text("topk_method", default=family.topk_methods[0])
    if topk_method not in family.topk_methods:
        raise reader.unsupported("topk_method", topk_method, f"{' or '.join(family.topk_methods)} for {family_name}")
    scoring_func = reader.text("scoring_func", default=family.scoring_func)
    if scoring_func != family.scoring_func:
        supported = f"{family.scoring_func} for {family_name} with topk_method {topk_method}"
        raise reader.unsupported("scoring_func", scoring_func, supported)
    return scoring_func if scoring_func == SQRT_SOFTPLUS else topk_method


def _read_groups(reader: ConfigReader, num_experts: int, topk_method: str, default: int | None) -> dict[str, int]:
    """Read expert groups and top-k, and check that the gate always finds enough experts.

    Args:
        default: `n_group` and `topk_group` where config.json has none; None: they must be there.
    """
    group_default = None if topk_method == "group_limited_greedy" else default
    num_groups = reader.size("n_group", default=group_default, maximum=MAX_EXPERTS)
    topk_group = reader.size("topk_group", default=group_default, maximum=MAX_EXPERTS)
    topk = reader.size("num_experts_per_tok", "experts_per_token", maximum=MAX_EXPERTS)
    if num_experts % num_groups:
        raise reader.unsupported("n_group", num_groups, f"a divisor of n_routed_experts = {num_experts}")
    if topk_group > num_groups:
        raise reader.unsupported("topk_group", topk_group, f"at most n_group = {num_groups}")
    group_size = num_experts // num_groups
    if topk_method in ("noaux_tc", "group_top2") and num_groups > 1 and group_size < 2:
        supported = f"groups of at least 2 of the {num_experts} experts, since a group scores by its best two"
        raise reader.unsupported("n_group", num_groups, supported)
    choosable = num_experts if topk_method in ("greedy", "topk_softmax", SQRT_SOFTPLUS) else topk_group * group_size
    if topk > choosable:
        supported = f"at most the {choosable} experts that can be chosen from"
        raise reader.unsupported("num_experts_per_tok", topk, supported)
    return {"n_group": num_groups, "topk_group": topk_group, "num_experts_per_tok": topk}
