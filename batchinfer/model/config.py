"""The model's config.json, checked once; read by the planner (no torch here) and by model loading.

The families of families.py are understood, each as written by the original release (`rope_theta`, `rope_scaling`,
`first_k_dense_replace`) and by newer libraries (`rope_parameters`, `num_mtp_layers`, `mlp_layer_types`).
"""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from batchinfer.config.model_folder import MISTRAL, config_file
from batchinfer.model.config_keys import judge_unread_keys
from batchinfer.model.config_reader import ConfigReader, read_json_object
from batchinfer.model.families import CARRIERS, FAMILIES, NOT_IMPLEMENTED, Carrier, Family
from batchinfer.model.indexer_config import IndexerConfig, read_indexer
from batchinfer.model.integer_forms import IntegerForm
from batchinfer.model.mistral_format import CARRIER_OF_PARAMS, read_params
from batchinfer.model.moe_config import read_moe
from batchinfer.model.quantization import read_quantization
from batchinfer.model.rope_config import RopeConfig, read_rope
from batchinfer.records import ModelError

_MAX_LAYERS = 1000  # as MAX_EXPERTS
# Of more tokens draws could not add up the weights exactly: MAX_TOKENS of the kernels. Published models have 163,840.
MAX_VOCABULARY = 2**18


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and numerics of one model, with the key names of config.json where it has them."""

    family: str  # a row of FAMILIES
    carrier: Carrier | None  # the model around it
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    indexer: IndexerConfig | None  # None: a query attends to all keys before it
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    rope_interleave: bool
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    # mixture of experts; n_routed_experts is 0 exactly where all layers are dense
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    first_k_dense_replace: int
    moe_layer_freq: int
    topk_method: str
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    # layers after the last one that predict further tokens; their weights are not read
    num_mtp_layers: int
    fp8_block: tuple[int, int] | None  # rows and columns of one FP8 scale, None when no weights are stored in FP8
    integers: IntegerForm | None  # how weights of 4-bit integers are stored, None when there are none
    fp8_per_tensor: bool  # a weight in FP8 may have one scale, for all of its blocks
    # keys of config.json that nothing here knows
    unknown_keys: tuple[str, ...] = field(default=(), compare=False)

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key: the part without position, then the rotary part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values that attention reads per token: the compressed key-value latent and the rotary key of all heads."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def kv_dim(self) -> int:
        """Values kept per token and layer: those that attention reads, then the key of the indexer, if there is one.

        Layers that share an indexer keep room for the key, too: all pages have one shape.
        """
        return self.latent_dim + (self.indexer.head_dim if self.indexer is not None else 0)

    @property
    def softmax_scale(self) -> float:
        """Factor on query · key, with YaRN's correction."""
        return self.qk_head_dim**-0.5 * self.rope.softmax_factor

    @property
    def num_router_groups(self) -> int:
        """Number of expert groups, of which a token uses only some; 1: a token may use any expert."""
        return self.n_group if self.topk_group < self.n_group else 1

    @property
    def max_positions(self) -> int:
        """The window: most tokens, prompt and output together, that one request may have."""
        return self.max_position_embeddings

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether this layer routes to experts (otherwise it has one dense MLP)."""
        return self.n_routed_experts > 0 and layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def moe_layers(self) -> list[int]:
        """The layers that route to experts, in order."""
        return [layer for layer in range(self.num_hidden_layers) if self.is_moe_layer(layer)]

    @property
    def num_moe_layers(self) -> int:
        """Number of layers that route to experts."""
        return len(self.moe_layers)

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Return the page bytes of one token over all layers (70,272 for the 671B model at 2 bytes per value)."""
        return self.num_hidden_layers * self.kv_dim * bytes_per_value

    @property
    def num_indexers(self) -> int:
        """Number of layers with an indexer; layers that share an earlier layer's indexer do not count."""
        return self.num_hidden_layers - len(self.indexer.sharing_layers) if self.indexer is not None else 0

    @property
    def attention_weights(self) -> int:
        """Mean number of weights of a layer's attention without norms; a token is multiplied with each once."""
        hidden, heads = self.hidden_size, self.num_attention_heads
        query = heads * self.qk_head_dim
        queries = hidden * query if self.q_lora_rank is None else self.q_lora_rank * (hidden + query)
        latents = hidden * self.latent_dim + self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        return queries + latents + heads * self.v_head_dim * hidden + self.indexer_weights // self.num_hidden_layers

    @property
    def indexer_weights(self) -> int:
        """Weights of all indexers without norms."""
        if self.indexer is None or self.q_lora_rank is None:
            return 0
        return self.num_indexers * self.indexer.num_weights(self.hidden_size, self.q_lora_rank)

    @property
    def row_cost_in_kv_tokens(self) -> float:
        """Cost of a decode row apart from its attention: the weights it runs through, in KV tokens attended to.

        Both are counted in multiplications; attention in its absorbed form, weights with the output head.
        """
        hidden, heads = self.hidden_size, self.num_attention_heads
        expert = 3 * hidden * self.moe_intermediate_size
        moe = expert * (self.num_experts_per_tok + self.n_shared_experts) + hidden * self.n_routed_experts
        num_dense = self.num_hidden_layers - self.num_moe_layers
        mlps = self.num_moe_layers * moe + num_dense * 3 * hidden * self.intermediate_size
        per_row = self.num_hidden_layers * self.attention_weights + mlps + self.vocab_size * hidden
        per_kv_token = self.num_hidden_layers * heads * (self.latent_dim + self.kv_lora_rank)
        return per_row / per_kv_token

    @property
    def decode_loads(self) -> tuple[float, float, float]:
        """Costs of a decode row, in KV tokens attended to.

        The cost apart from attention; the largest number of keys that the row attends to; the cost of each key that
        the indexers score if the row sees more.
        """
        if self.indexer is None:
            return self.row_cost_in_kv_tokens, math.inf, 0.0
        per_kv_token = self.num_hidden_layers * self.num_attention_heads * (self.latent_dim + self.kv_lora_rank)
        scored = self.num_indexers * self.indexer.num_heads * self.indexer.head_dim / per_kv_token
        return self.row_cost_in_kv_tokens, float(self.indexer.topk), scored


def load_model_config(folder: Path) -> ModelConfig:
    """Read and check `folder`/config.json, or params.json (see mistral_format.py) where there is only that.

    Raises:
        ModelError: the file is missing, is no JSON object, lacks a needed key, or asks for something that is not
            supported or contradicts itself; the sentence names the file, the key, its value and what is supported.
            So it does for keys that are not read here and change what a model computes (config_keys.py).
    """
    if not Path(folder).exists():
        raise ModelError(_no_folder(Path(folder)))
    if not Path(folder).is_dir():
        raise ModelError(f"{folder} is a file; give the folder that holds config.json and *.safetensors")
    carrier, reader, outer = _read_file(config_file(Path(folder)))
    name = _read_family(reader)
    family = FAMILIES[name]
    heads = reader.size("num_attention_heads")
    as_heads = "equal to num_attention_heads, since MLA has no grouped heads"
    reader.expect("num_key_value_heads", heads, supported=as_heads)
    reader.expect("hidden_act", "silu", supported='"silu"')
    layers = reader.size("num_hidden_layers", maximum=_MAX_LAYERS)
    moe = read_moe(reader, name, layers)
    rope_dim = _read_rope_dim(reader)
    nope_dim = reader.size("qk_nope_head_dim")
    reader.expect("qk_head_dim", nope_dim + rope_dim, supported="qk_nope_head_dim + qk_rope_head_dim")
    vocab_size = reader.size("vocab_size", maximum=MAX_VOCABULARY)
    max_positions = reader.size("max_position_embeddings")
    quantization = reader.section("quantization_config")
    config = ModelConfig(
        family=name,
        carrier=carrier,
        vocab_size=vocab_size,
        hidden_size=reader.size("hidden_size"),
        intermediate_size=reader.size("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        q_lora_rank=reader.optional_size("q_lora_rank"),
        kv_lora_rank=reader.size("kv_lora_rank"),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=reader.size("v_head_dim"),
        indexer=read_indexer(reader, family.indexer, layers, rope_dim),
        max_position_embeddings=max_positions,
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6, above=0.0, at_most=1.0),
        rope=read_rope(reader, family, max_positions, rope_dim / (nope_dim + rope_dim)),
        rope_interleave=_read_flag(reader, family, "rope_interleave", default=True),
        attention_bias=reader.flag("attention_bias", default=False),
        mlp_bias=_read_flag(reader, family, "mlp_bias", default=False),
        tie_word_embeddings=reader.flag("tie_word_embeddings", default=family.ties_embeddings),
        eos_token_ids=reader.token_ids("eos_token_id", vocab_size),
        **moe,
        num_mtp_layers=reader.size(
            "num_nextn_predict_layers", "num_mtp_layers", default=0, minimum=0, maximum=_MAX_LAYERS
        ),
        **read_quantization(quantization),
    )
    _check_layer_types(reader, config)
    parts = [reader, *([outer] if outer is not reader else []), *([quantization] if quantization is not None else [])]
    return replace(config, unknown_keys=tuple(key for part in parts for key in judge_unread_keys(part)))


def _no_folder(folder: Path) -> str:
    """Return the error sentence for a missing model folder; a path like owner/name may mean the Hugging Face hub."""
    sentence = f"there is no model folder {folder}; give the path of one with config.json and *.safetensors"
    if folder.parent.exists() or not folder.parent.parent.exists():
        return sentence
    name = f"{folder.parent.name}/{folder.name}"
    return (
        f"{sentence}; if {name} is a model of the Hugging Face hub, `hf download {name}` puts it into the cache, "
        "where it is found by this name"
    )


def _read_file(path: Path) -> tuple[Carrier | None, ConfigReader, ConfigReader]:
    """Return the carrier model, if there is one, the language model's part of the file, and the whole file."""
    values = read_json_object(path)
    if path.name == MISTRAL:
        reader = read_params(path, values)
        return CARRIER_OF_PARAMS if values.get("vision_encoder") else None, reader, reader
    outer = ConfigReader(path, values)
    return *_read_carrier(outer), outer


def _read_carrier(outer: ConfigReader) -> tuple[Carrier | None, ConfigReader]:
    """Return the model around the language model, if there is one, and the language model's part of config.json."""
    carrier = CARRIERS.get(outer.text("model_type", default=""))
    if carrier is None:
        return None, outer
    if not set(outer.texts("architectures")) <= set(carrier.architectures):
        raise outer.unsupported("architectures", outer.texts("architectures"), " or ".join(carrier.architectures))
    outer.pass_over(*carrier.image_keys)
    reader = outer.section(carrier.part, inherits=("quantization_config", "eos_token_id", "tie_word_embeddings"))
    if reader is None:
        raise outer.unsupported(carrier.part, None, "a JSON object, the language model's part")
    return carrier, reader


def _read_family(reader: ConfigReader) -> str:
    """Return the row of FAMILIES named by `model_type` or, when that is missing, by `architectures`."""
    model_type = reader.text("model_type", default="")
    architectures = reader.texts("architectures")
    known = {known for family in FAMILIES.values() for known in family.architectures}
    if not model_type:  # the first family of an architecture is whose the later ones took over
        by_name = (name for name, family in FAMILIES.items() if set(architectures) & set(family.architectures))
        model_type = next(by_name, "")
    if model_type not in FAMILIES:
        reason = f"; {NOT_IMPLEMENTED[model_type]}" if model_type in NOT_IMPLEMENTED else ""
        raise reader.unsupported(
            "model_type", model_type or None, f"one of {', '.join([*FAMILIES, *CARRIERS])}{reason}"
        )
    if not set(architectures) & known <= set(FAMILIES[model_type].architectures):
        raise reader.unsupported(
            "model_type", model_type, f"one that agrees with architectures, which is {architectures}"
        )
    return model_type


def _read_rope_dim(reader: ConfigReader) -> int:
    rope_dim = reader.size("qk_rope_head_dim")
    if rope_dim % 2:
        raise reader.unsupported("qk_rope_head_dim", rope_dim, "an even number, since rotary values come in pairs")
    return rope_dim


def _check_layer_types(reader: ConfigReader, config: ModelConfig) -> None:
    """Raise if the lists of layer kinds, which newer libraries write, contradict the other keys."""
    layers = range(config.num_hidden_layers)
    # the second name of the same is transformers' own from before it had the first
    kinds = ("full_attention",) if config.indexer is None else ("indexed_attention", "deepseek_sparse_attention")
    expected = [[kind] * len(layers) for kind in kinds]
    reader.expect("layer_types", *expected, supported=f'"{kinds[0]}" for every layer')
    mlps = ["sparse" if config.is_moe_layer(layer) else "dense" for layer in layers]
    as_layers = '"dense" for the layers without experts and "sparse" for the others'
    reader.expect("mlp_layer_types", mlps, supported=as_layers)


def _read_flag(reader: ConfigReader, family: Family, key: str, *, default: bool) -> bool:
    """Return a flag; families that do not support it must leave it at its fixed value."""
    if key in family.fixed:
        reader.expect(key, family.fixed[key], supported=f"{str(family.fixed[key]).lower()} for this model_type")
        return family.fixed[key]
    return reader.flag(key, default=default)
