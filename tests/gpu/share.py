"""One GPU's share of DeepSeek-V3 in a deployment unit, with random weights in FP8; built and run by slice.py.

Every layer has weights of its own, so that no layer finds another one's in a cache. What is in FP8 and what is not is
as model/weight_loading.py loads a checkpoint of DeepSeek-V3.
"""

# D hidden, F intermediate, E experts, H heads, N query/key width without position, V value width, C latent width

from __future__ import annotations

import functools
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from candidates import NAMES, PLAIN, function, has, why_not
from copies import CopyDispatcher

from batchinfer.model.config import ModelConfig, load_model_config
from batchinfer.model.mla_config import MlaConfig
from batchinfer.model.ops import Ops, op_names
from batchinfer.model.transformer import Transformer
from batchinfer.model.weights import LayerWeights, MlaWeights, MlpWeights, ModelWeights, MoeWeights, Projection
from batchinfer_kernels.reference.block_scaled import BlockScaled

# config.json of the release; rope_scaling without keys that change nothing here
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "eos_token_id": 1,
}
TINY = DEEPSEEK_V3 | {
    "vocab_size": 200,
    "hidden_size": 256,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}


@dataclass(frozen=True)
class Unit:
    """A deployment unit as published: ranks, and routed experts (redundant ones among them) of each rank."""

    name: str
    num_ranks: int
    num_slots: int


DECODE, PREFILL = Unit("decode EP144", 144, 2), Unit("prefill EP32", 32, 9)


def config_of(values: dict[str, Any]) -> ModelConfig:
    """Return the configuration as the model reads it from its folder."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values))
        return load_model_config(Path(folder))


def usable_ops(names: Sequence[str] = NAMES) -> tuple[Ops, str]:
    """Per operation the first of `names` that can run here, and which ones come from where."""
    chosen, origin = {}, {}
    for op in op_names():
        usable = (name for name in names if has(name, op) and why_not(name, op) is None)
        name = "plain" if op in PLAIN else next(usable)
        chosen[op], origin[op] = function(name, op), name
    from_hopper = [op for op, name in origin.items() if name.startswith("hopper")]
    words = f"{', '.join(from_hopper)} from hopper, the rest from triton" if from_hopper else "all from triton"
    return Ops(**chosen, eight_bit=True), words


class Share:
    """Weights of one rank of a unit; `model` computes with them.

    Args:
        unit: whose rank it is.
        config: of the model.
        device: where the weights are made.
        names: of implementations, the preferred one first.
    """

    def __init__(self, unit: Unit, config: ModelConfig, device: torch.device, names: Sequence[str] = NAMES):
        self.unit = unit
        self.config = config
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)
        self.ops, self.origin = usable_ops(names)
        self.title = unit.name if names == NAMES else f"{unit.name}, {' and '.join(names).title()} alone"
        layers = tuple(self._layer(layer) for layer in range(config.num_hidden_layers))
        self.weights = ModelWeights(
            embedding=self._normal(config.vocab_size, config.hidden_size, size=1.0),
            layers=layers,
            norm=self._ones(config.hidden_size),
            lm_head=self._normal(config.vocab_size, config.hidden_size),
            expert_ids=(tuple(range(unit.num_slots)),) * config.num_moe_layers,
        )
        self.dispatcher = CopyDispatcher(
            unit.num_ranks,
            unit.num_slots,
            is_masked=unit is not PREFILL,
            quantize=function("triton", "quantize_fp8_block"),
            sum_per_token=function("triton", "sum_per_token"),
        )
        self.model = Transformer(config, self.weights, [self.dispatcher] * config.num_moe_layers, self.ops)

    def gigabytes(self) -> dict[str, float]:
        """Return the memory held by part, in 10⁹ bytes: each tensor once, however many views it has."""
        total: Counter[str] = Counter()
        seen: set[int] = set()
        for part, tensor in self._tensors():
            if tensor.untyped_storage().data_ptr() not in seen:
                seen.add(tensor.untyped_storage().data_ptr())
                total[part] += tensor.untyped_storage().nbytes()
        return {part: num_bytes / 1e9 for part, num_bytes in total.items()}

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for tensor in (self.weights.embedding, self.weights.lm_head, self.weights.norm):
            yield "embedding and head", tensor
        for layer in self.weights.layers:
            yield from (("attention", tensor) for tensor in _leaves((layer.attention, layer.input_norm)))
            if isinstance(layer.mlp, MlpWeights):
                yield from (("dense MLPs", tensor) for tensor in _leaves(layer.mlp))
                continue
            yield from (("shared experts", tensor) for tensor in _leaves(layer.mlp.shared))
            yield from (("routed experts", tensor) for tensor in _leaves((layer.mlp.gate_up_EFD, layer.mlp.down_EDF)))
            yield from (("routers", tensor) for tensor in _leaves((layer.mlp.router_ED, layer.mlp.router_bias_E)))

    def _layer(self, layer: int) -> LayerWeights:
        config = self.config
        is_moe = config.is_moe_layer(layer)
        return LayerWeights(
            input_norm=self._ones(config.hidden_size),
            attention=self._attention(),
            mlp_norm=self._ones(config.hidden_size),
            mlp=self._mixture() if is_moe else self._mlp(config.intermediate_size),
        )

    def _attention(self) -> MlaWeights:
        config, hidden = self.config.attention, self.config.hidden_size
        heads = config.num_attention_heads
        assert isinstance(config, MlaConfig)
        assert config.q_lora_rank is not None
        kv_up_HZC = self._normal(heads, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank)
        key_up_HNC, value_up_HVC = kv_up_HZC.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        weights = MlaWeights(
            q_down=self._projection(config.q_lora_rank, hidden),
            q_norm=self._ones(config.q_lora_rank),
            q=self._projection(heads * config.qk_head_dim, config.q_lora_rank),
            kv_down=self._projection(config.latent_dim, hidden),
            kv_norm=self._ones(config.kv_lora_rank),
            kv_up_HZC=self.ops.pack(kv_up_HZC),
            key_up_HCN=self.ops.pack(key_up_HNC.transpose(1, 2)),
            value_up_HVC=self.ops.pack(value_up_HVC),
            out=self._projection(hidden, heads * config.v_head_dim),
        )
        return weights.joined()

    def _mlp(self, width: int) -> MlpWeights:
        hidden = self.config.hidden_size
        return MlpWeights(self._projection(2 * width, hidden), self._projection(hidden, width))

    def _mixture(self) -> MoeWeights:
        config, hidden, width = self.config, self.config.hidden_size, self.config.moe_intermediate_size
        router_ED = self._normal(config.n_routed_experts, hidden, dtype=torch.float32)
        return MoeWeights(
            router_ED=self.ops.pack_router(router_ED),
            router_bias_E=torch.zeros(config.n_routed_experts, device=self._device),
            gate_up_EFD=self._blocks(self.unit.num_slots, 2 * width, hidden),
            down_EDF=self._blocks(self.unit.num_slots, hidden, width),
            shared=self._mlp(config.n_shared_experts * width),
        )

    def _projection(self, num_rows: int, num_columns: int) -> Projection:
        return Projection(self._blocks(1, num_rows, num_columns)[0], None)

    def _blocks(self, count: int, num_rows: int, num_columns: int) -> BlockScaled:
        """Normal values that use most of E4M3's range, with scales that keep the size of what they multiply."""
        blocks = BlockScaled.empty(
            count, num_rows, num_columns, memory=functools.partial(torch.empty, device=self._device)
        )
        for values in blocks.values:
            values.copy_(self._normal(num_rows, num_columns, size=100.0).clamp_(-448, 448))
        blocks.scales.uniform_(0.5, 1.5, generator=self._generator).mul_(0.01 / num_columns**0.5)
        return blocks

    def _normal(self, *shape: int, size: float | None = None, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        values = torch.randn(*shape, generator=self._generator, device=self._device, dtype=dtype)
        return values.mul_(shape[-1] ** -0.5 if size is None else size)

    def _ones(self, width: int) -> torch.Tensor:
        return torch.ones(width, dtype=torch.bfloat16, device=self._device)


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in dataclasses and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _leaves(getattr(value, field.name))
    elif isinstance(value, tuple):
        for part in value:
            yield from _leaves(part)
