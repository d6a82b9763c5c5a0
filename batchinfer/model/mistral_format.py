"""params.json of Mistral's code (Mistral Large 3), read as a config.json of `mistral4`.

The tensors beside it have names of their own, too (stored_names.py). What a key means is as vLLM
(transformers_utils.configs.mistral) and SGLang (srt.utils.mistral_utils) read it: weights of experts are always normed,
and `yarn.apply_scale` says whether the softmax is scaled by YaRN's factor.
"""

from pathlib import Path
from typing import Any

from batchinfer.model.config_reader import ConfigReader, show
from batchinfer.model.families import Carrier
from batchinfer.records import ModelError

_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "qk_head_dim",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
    "moe.num_experts": "n_routed_experts",
    "moe.num_experts_per_tok": "num_experts_per_tok",
    "moe.expert_hidden_dim": "moe_intermediate_size",
    "moe.num_shared_experts": "n_shared_experts",
    "moe.first_k_dense_replace": "first_k_dense_replace",
    "moe.route_every_n": "moe_layer_freq",
    "moe.routed_scale": "routed_scaling_factor",
    "moe.num_expert_groups": "n_group",
    "moe.num_expert_groups_per_tok": "topk_group",
    "yarn.factor": "rope_parameters.factor",
    "yarn.original_max_position_embeddings": "rope_parameters.original_max_position_embeddings",
    "yarn.beta": "rope_parameters.beta_fast",
    "yarn.alpha": "rope_parameters.beta_slow",
    "llama_4_scaling.beta": "rope_parameters.llama_4_scaling_beta",
    "rope_theta": "rope_parameters.rope_theta",
}
_PARTS = ("moe", "yarn", "llama_4_scaling", "quantization")
_PASSED = ("moe.expert_parallel", "moe.expert_model_parallel", "vision_encoder", "max_seq_len")  # say nothing here
_FIXED: dict[str, tuple[object, ...]] = {
    "moe.renorm_strategy": ("WEIGHTS",),
    "moe.use_load_balancing_bias": (False,),
    "quantization.qformat_weight": ("fp8_e4m3",),
    "quantization.qscheme_act": ("TENSOR", "NO_SCALES"),
    "yarn.apply_scale": (True, False),
}
_SAME_WINDOW = "llama_4_scaling.original_max_position_embeddings"
_END_OF_TEXT = 2  # of all of Mistral's vocabularies
_NAMES = {theirs: own for own, theirs in _KEYS.items()} | {"rope_parameters": "yarn"}
CARRIER_OF_PARAMS = Carrier(
    architectures=(),
    part="",
    prefix="",
    skipped=("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm."),
    image_keys=frozenset(),
)


def read_params(path: Path, values: dict[str, Any]) -> ConfigReader:
    """Return the values of a params.json under the names of config.json, their own names in messages.

    Raises:
        ModelError: the file is of another architecture, or has a key without a counterpart in config.json.
    """
    if "kv_lora_rank" not in values or "moe" not in values:
        raise ModelError(
            f"{path} has no kv_lora_rank or no moe; of models with a params.json only those with latent attention and "
            "routed experts are supported (Mistral Large 3)."
        )
    flat = _flat(ConfigReader(path, values), values)
    rope: dict[str, Any] = {"rope_type": "yarn"}
    # YaRN's factor on cos and sin is 1 in both cases
    rope |= (
        {"attention_factor": 1.0} if flat.get("yarn.apply_scale") is False else {"mscale": 1.0, "mscale_all_dim": 1.0}
    )
    read: dict[str, Any] = {"model_type": "mistral4", "eos_token_id": _END_OF_TEXT, "rope_parameters": rope}
    read["max_position_embeddings"] = flat.get("max_seq_len")
    if flat.get("quantization.qformat_weight") is not None:
        read["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}
    for key, value in flat.items():
        part, _, name = _KEYS.get(key, key).rpartition(".")
        if value is None or key in _PASSED or key in _FIXED or key == _SAME_WINDOW:
            continue
        if part in ("rope_parameters", "yarn", "llama_4_scaling"):
            rope[name] = value
        else:
            read[_KEYS.get(key, key)] = value
    return _ParamsReader(path, read)


class _ParamsReader(ConfigReader):
    """Reader of values by the names of config.json; errors use the names in params.json."""

    def __init__(self, path: Path, values: dict[str, Any], way: str = ""):
        super().__init__(path, values)
        self._way = way  # from the top, in config.json's names

    def name(self, key: str) -> str:
        way = _NAMES.get(self._way[:-1], self._way[:-1])
        return _NAMES.get(self._way + key) or (f"{way}.{key}" if way else key)

    def section(self, key: str, *, inherits: tuple[str, ...] = ()) -> ConfigReader | None:
        inside = super().section(key, inherits=inherits)
        return None if inside is None else _ParamsReader(self.path, inside.unread(), f"{self._way}{key}.")


def _flat(reader: ConfigReader, values: dict[str, Any]) -> dict[str, Any]:
    """Return all keys by their full names; check the keys that can have only a few values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key not in _PARTS or value is None:
            flat[key] = value
        elif isinstance(value, dict):
            flat |= {f"{key}.{name}": inside for name, inside in value.items()}
        else:
            raise reader.unsupported(key, value, "a JSON object")
    supported = _FIXED | {_SAME_WINDOW: (flat.get("yarn.original_max_position_embeddings"),)}
    for key, wanted in supported.items():
        if flat.get(key) is not None and not any(flat[key] == one and type(flat[key]) is type(one) for one in wanted):
            raise reader.unsupported(key, flat[key], " or ".join(map(show, wanted)))
    return flat
