"""The model's config.json, checked once; read by the planner (no torch here) and by model loading.

The families of families.py are understood, each as written by the original release (`rope_theta`, `rope_scaling`,
`first_k_dense_replace`) and by newer libraries (`rope_parameters`, `num_mtp_layers`, `mlp_layer_types`).
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from batchinfer.config.model_folder import MISTRAL, cached_names, config_file
from batchinfer.config.spelling import did_you_mean
from batchinfer.model.attention_config import AttentionConfig
from batchinfer.model.compressed_config import read_compressed
from batchinfer.model.config_keys import judge_unread_keys
from batchinfer.model.config_reader import GGUF, ConfigReader, read_json_object
from batchinfer.model.families import CARRIERS, FAMILIES, NOT_IMPLEMENTED, Carrier, Family
from batchinfer.model.gqa_config import read_gqa
from batchinfer.model.hyper_config import HyperConnections, read_hyper
from batchinfer.model.integer_forms import IntegerForm
from batchinfer.model.mistral_format import CARRIER_OF_PARAMS, read_params
from batchinfer.model.mla_config import read_flag, read_mla
from batchinfer.model.moe_config import Clamp, read_moe
from batchinfer.model.quantization import read_quantization
from batchinfer.records import ConfigError, ModelError

_MAX_LAYERS = 1000  # as MAX_EXPERTS
# Of more tokens draws could not add up the weights exactly: MAX_TOKENS of the kernels. Published models have 262,208.
MAX_VOCABULARY = 2**19 - 1


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and numerics of one model, with the key names of config.json where it has them."""

    family: str  # a row of FAMILIES
    carrier: Carrier | None  # the model around it
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    attention: AttentionConfig
    max_position_embeddings: int
    rms_norm_eps: float
    embedding_scale: float
    logit_scale: float
    mlp_bias: bool
    hidden_act: str  # of dense MLPs: "silu" or "gelu_pytorch_tanh"
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
    expert_clamp: Clamp | None  # None: plain SwiGLU
    has_expert_biases: bool  # and those of their router
    num_hash_layers: int  # first layers, whose experts a table gives by token
    hyper: HyperConnections | None  # streams between sublayers; None: one, to which each adds its result
    # layers after the last one that predict further tokens; their weights are not read
    num_mtp_layers: int
    fp8_block: tuple[int, int] | None  # rows and columns of one FP8 scale, None when no weights are stored in FP8
    integers: IntegerForm | None  # how weights of 4-bit integers are stored, None when there are none
    fp8_per_tensor: bool  # a weight in FP8 may have one scale, for all of its blocks
    has_fp4_experts: bool  # routed experts may be stored in FP4 (MXFP4)
    # the format of weights in 8 bits, FP8 or INT8 of quantization.py; fp8_block and fp8_per_tensor are of either
    eight_bits: str
    # keys of config.json that nothing here knows
    unknown_keys: tuple[str, ...] = field(default=(), compare=False)

    @property
    def num_router_groups(self) -> int:
        """Number of expert groups, of which a token uses only some; 1: a token may use any expert."""
        return self.n_group if self.topk_group < self.n_group else 1

    @property
    def max_positions(self) -> int:
        """The window: most tokens, prompt and output together, that one request may have."""
        return self.max_position_embeddings

    @property
    def family_row(self) -> Family:
        """The family's row of FAMILIES."""
        return FAMILIES[self.family]

    @property
    def has_post_norms(self) -> bool:
        """Whether the results of attention and MLP are normed before they are added to the residual."""
        return "attention_post_norm" in self.family_row.norms

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether this layer routes to experts (otherwise it has one dense MLP)."""
        return self.n_routed_experts > 0 and layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def may_run_in(self, dtype: str) -> bool:
        """Return whether the stored weights can be held in a job's model.dtype."""
        return dtype != "fp4" or self.has_fp4_experts

    def check_dtype(self, dtype: str) -> None:
        """Raise if a job's model.dtype is FP4 and the routed experts are not stored so.

        Raises:
            ConfigError: names the dtypes to use instead.
        """
        if not self.may_run_in(dtype):
            raise ConfigError(
                'model.dtype is "fp4", but the routed experts of this model are not stored in FP4 (quant_method "mxfp4"'
                ' in config.json); use "fp8" or "int4"'
            )

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
        return self.attention.values_per_token(self.num_hidden_layers) * bytes_per_value

    @property
    def attention_weights(self) -> int:
        """Mean number of weights of a layer's attention without norms; a token is multiplied with each once."""
        return self.attention.num_weights(self.hidden_size, self.num_hidden_layers)

    @property
    def row_cost_in_kv_tokens(self) -> float:
        """Cost of a decode row apart from its attention: the weights it runs through, in KV tokens attended to.

        Both are counted in multiplications; weights with the output head.
        """
        hidden = self.hidden_size
        expert = 3 * hidden * self.moe_intermediate_size
        moe = expert * (self.num_experts_per_tok + self.n_shared_experts) + hidden * self.n_routed_experts
        num_dense = self.num_hidden_layers - self.num_moe_layers
        mlps = self.num_moe_layers * moe + num_dense * 3 * hidden * self.intermediate_size
        per_row = self.num_hidden_layers * self.attention_weights + mlps + self.vocab_size * hidden
        return per_row / self._products_per_key

    @property
    def decode_loads(self) -> tuple[float, float, float]:
        """Costs of a decode row, in KV tokens attended to.

        The cost apart from attention; the largest number of keys that the row attends to; the cost of each key that is
        scored if the row sees more.
        """
        scored = self.attention.products_per_scored_key(self.num_hidden_layers) / self._products_per_key
        return self.row_cost_in_kv_tokens, self.attention.most_keys, scored

    @property
    def _products_per_key(self) -> int:
        return self.num_hidden_layers * self.attention.products_per_key


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
        hint = f"; {GGUF}" if Path(folder).suffix == ".gguf" else ""
        raise ModelError(f"{folder} is a file; give the folder that holds config.json and *.safetensors{hint}")
    if (adapter := Path(folder) / "adapter_config.json").exists():
        raise ModelError(
            f"{adapter} is of an adapter (LoRA), and adapters are not applied; merge it into the weights (in PEFT "
            "merge_and_unload), or remove this file if they have it already."
        )
    carrier, reader, outer = _read_file(config_file(Path(folder)))
    name = _read_family(reader)
    family = FAMILIES[name]
    activation_key, activation = family.activation
    reader.expect(activation_key, activation, supported=f'"{activation}"')
    layers = reader.size("num_hidden_layers", maximum=_MAX_LAYERS)
    moe = read_moe(reader, name, layers)
    vocab_size = reader.size("vocab_size", default=family.defaults.get("vocab_size"), maximum=MAX_VOCABULARY)
    max_positions = reader.size("max_position_embeddings", default=family.defaults.get("max_position_embeddings"))
    quantization = reader.section("quantization_config")
    stored = read_quantization(quantization)
    if family.compressed and quantization is not None:
        reader.expect("expert_dtype", "fp4", "fp8", supported='"fp4" or "fp8"')
        stored["has_fp4_experts"] = True  # the headers of the files say which ones
    config = ModelConfig(
        family=name,
        carrier=carrier,
        vocab_size=vocab_size,
        hidden_size=reader.size("hidden_size"),
        intermediate_size=reader.size("intermediate_size", default=0 if family.compressed else None),
        num_hidden_layers=layers,
        attention=_read_attention(reader, family, layers, max_positions),
        max_position_embeddings=max_positions,
        **_read_scales(reader, family),
        mlp_bias=read_flag(reader, family, "mlp_bias", default=False),
        hidden_act=activation,
        tie_word_embeddings=reader.flag("tie_word_embeddings", default=family.ties_embeddings),
        eos_token_ids=reader.token_ids("eos_token_id", vocab_size),
        **moe,
        hyper=read_hyper(reader) if family.compressed else None,
        num_mtp_layers=reader.size(
            "num_nextn_predict_layers", "num_mtp_layers", default=0, minimum=0, maximum=_MAX_LAYERS
        ),
        **stored,
    )
    _check_mlp_types(reader, config)
    parts = [reader, *([outer] if outer is not reader else []), *([quantization] if quantization is not None else [])]
    return replace(config, unknown_keys=tuple(key for part in parts for key in judge_unread_keys(part)))


def _read_scales(reader: ConfigReader, family: Family) -> dict[str, Any]:
    """Return the epsilon of norms, and factors on embeddings and logits.

    A factor m on all that sublayers add to the residual is left out: the residual is m times smaller instead. So is its
    first value, and norms, which divide it by the root of its mean square, have an epsilon that is m² times smaller.
    """
    eps = reader.number("rms_norm_eps", family.rms_norm_eps, above=0.0, at_most=1.0)
    keys = "residual_multiplier", "embedding_multiplier", "logits_scaling"
    residual, embedding, logits = (
        reader.number(key, 1.0, above=0.0) if family.has_multipliers else 1.0 for key in keys
    )
    return {"rms_norm_eps": eps / residual**2, "embedding_scale": embedding / residual, "logit_scale": 1 / logits}


def _read_attention(reader: ConfigReader, family: Family, num_layers: int, max_positions: int) -> AttentionConfig:
    if family.compressed:
        return read_compressed(reader, family, num_layers, max_positions)
    if family.grouped is not None:
        return read_gqa(reader, family, family.grouped, num_layers, max_positions)
    return read_mla(reader, family, num_layers, max_positions)


def _no_folder(folder: Path) -> str:
    """Return the error sentence for a missing model folder; a path like owner/name may mean the Hugging Face hub."""
    sentence = f"there is no model folder {folder}; give the path of one with config.json and *.safetensors"
    if folder.parent.exists() or not folder.parent.parent.exists():
        return sentence
    name, _, revision = f"{folder.parent.name}/{folder.name}".partition("@")
    if meant := did_you_mean(name, cached_names()):
        sentence += f"; {name} is not in the Hugging Face cache: {meant}"
    command = f"hf download {name} --revision {revision}" if revision else f"hf download {name}"
    return (
        f"{sentence}; if {name} is a model of the Hugging Face hub, `{command}` puts it into the cache, "
        "where it is found by this name"
    )


def _read_file(path: Path) -> tuple[Carrier | None, ConfigReader, ConfigReader]:
    """Return the carrier model (None without one), the section of the language model, and the whole file."""
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
    if model_type in NOT_IMPLEMENTED:
        raise ModelError(
            f'{reader.path}: model_type is "{model_type}", which does not run here: {NOT_IMPLEMENTED[model_type]}; '
            f"use a model of another type ({', '.join([*FAMILIES, *CARRIERS])})."
        )
    if model_type not in FAMILIES:
        raise reader.unsupported("model_type", model_type or None, f"one of {', '.join([*FAMILIES, *CARRIERS])}")
    if not set(architectures) & known <= set(FAMILIES[model_type].architectures):
        raise reader.unsupported(
            "model_type", model_type, f"one that agrees with architectures, which is {architectures}"
        )
    return model_type


def _check_mlp_types(reader: ConfigReader, config: ModelConfig) -> None:
    """Raise if the list of MLP kinds, which newer libraries write, contradicts the other keys."""
    mlps = ["sparse" if config.is_moe_layer(layer) else "dense" for layer in range(config.num_hidden_layers)]
    as_layers = '"dense" for the layers without experts and "sparse" for the others'
    reader.expect("mlp_layer_types", mlps, supported=as_layers)
