"""The weights of a GPU, and the KV that fits next to them."""

from batchinfer.model.config import ModelConfig
from batchinfer.model.page_format import PageFormat
from batchinfer.records import ConfigError
from batchinfer.sim.hardware import Accelerator
from batchinfer.sim.steps import Unit, layer_expert_bytes

FP8, BF16 = 1, 2
GATHERED_LAYERS = 2  # whose experts are on every GPU: of this layer, and of the next one


def weight_bytes(model: ModelConfig, unit: Unit) -> float:
    """Return the bytes of weights on each GPU: its experts and all other weights, FP8; embedding and head in BF16."""
    hidden = model.hidden_size
    expert = 3 * hidden * model.moe_intermediate_size
    moe_layer = (unit.slots_per_gpu(model) + model.n_shared_experts) * expert * FP8
    moe_layer += hidden * model.n_routed_experts * BF16
    num_dense = model.num_hidden_layers - model.num_moe_layers
    layers = model.num_hidden_layers * model.attention_weights * FP8 + model.num_moe_layers * moe_layer
    layers += num_dense * 3 * hidden * model.intermediate_size * FP8
    if unit.gathered:
        layers += GATHERED_LAYERS * layer_expert_bytes(model)
    return layers + (1 if model.tie_word_embeddings else 2) * model.vocab_size * hidden * BF16


def state_tokens(model: ModelConfig, pages: PageFormat) -> float:
    """Return how many tokens of KV take as much memory as the state of a request; 0 if requests have none."""
    return model.attention.state_bytes(BF16) / pages.bytes_per_token(model)


def kv_tokens_per_gpu(model: ModelConfig, unit: Unit, gpu: Accelerator, reserve: float) -> float:
    """Return the tokens whose KV fits next to the weights and a reserved share of the memory.

    Raises:
        ConfigError: the weights alone do not fit.
    """
    free = gpu.hbm_bytes * (1 - reserve) - weight_bytes(model, unit)
    if free <= 0:
        raise ConfigError(
            f"{weight_bytes(model, unit) / 1e9:,.0f} GB of weights per GPU at EP size {unit.ep_size} do not fit into "
            f"the {gpu.hbm_bytes / 1e9:,.0f} GB of an {gpu.name}; use a larger ep_size"
        )
    return free / unit.pages.bytes_per_token(model)
