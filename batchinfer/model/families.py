"""Model families: facts that a `model_type` of config.json implies beyond the other keys, one row each.

The first ones are the architecture of DeepSeek-V2 and V3, latent attention and routed experts, under several names; in
some an indexer chooses which keys a query attends to (DSA), in one queries grow with their position. The others have
grouped-query attention, with or without experts. A row of FAMILIES is a language model. A row of CARRIERS is a model of
text and images that holds such a language model whole, its config.json in one part and its tensors behind one prefix;
the rest of it is not computed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# norms of the inputs of attention and MLP; of their results, before they are added to the residual
PRE_NORMS = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
POST_NORMS = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}


@dataclass(frozen=True, slots=True)
class Indexer:
    """Differences between families with DeepSeek Sparse Attention (DeepSeek-V3.2-Exp report section 2.1)."""

    rope_interleave: bool  # the indexer's rotary pairs; attention's pairs are always interleaved
    shares: bool = False  # layers may use the keys that the indexer of an earlier layer chose


@dataclass(frozen=True, slots=True)
class Grouped:
    """The options of grouped-query attention in which families differ, by config.json."""

    qk_norm: Literal["head", "whole"] | None = None
    norm_key: str | None = None  # the key that turns the norm on; None: it is always there
    norm_default: bool = False
    norm_notes: tuple[tuple[str, str], ...] = ()  # keys about the norm, and their only value
    attention_bias: bool = False
    bias_key: str = "attention_bias"
    biased_output: bool = True  # the bias is of the output, too
    has_sinks: bool = False
    # use_sliding_window turns optional ones on; "off": it may not, as transformers and published keys name other layers
    # "every": every layer has one if sliding_window is a number; "pattern": all layers but every n-th; "hybrid": as
    # "pattern", if sliding_window is a number
    windows: Literal["none", "off", "optional", "alternate", "every", "pattern", "hybrid"] = "none"
    full_every: int = 6  # n where config.json does not say sliding_window_pattern
    window: int = 0  # of every layer where config.json does not say sliding_window, as in transformers; 0: none
    window_theta: float | None = None  # default rope_theta of layers with a window; None: they rotate as the others do
    rotary_share: float = 1.0
    any_rotary_share: bool = False  # partial_rotary_factor may say another share
    rotary_key: str | None = None  # the key with the number of values that are rotated
    needs_rope: bool = False  # config.json must have rope_parameters or rope_scaling
    has_longrope: bool = False  # the only rope_type other than the default
    # layers in which nothing is rotated: "listed" ones in no_rope_layers, else every fourth; "full": where other layers
    # have a window, those without
    nope: Literal["none", "listed", "full"] = "none"
    rope_interleave: bool = False  # rotary pairs are (0, 1), (2, 3), … of a head, not halves
    joined_qkv: bool = False  # queries, keys and values are one tensor in files


@dataclass(frozen=True, slots=True)
class Family:
    """Defaults and permitted values of config.json's keys in one family."""

    architectures: tuple[str, ...]  # in config.json, of which one is enough
    topk_methods: tuple[str, ...] = ("noaux_tc",)  # permitted choices of experts; the first is the default
    scoring_func: str = "sigmoid"
    norm_topk_prob: bool = True
    num_groups: int | None = 1  # n_group and topk_group where config.json has none; None: it must say them
    routed_scaling_factor: float | None = None  # None: config.json must say it
    has_plain_gate: bool = False  # without groups and factor: n_group, topk_group and routed_scaling_factor may be 1
    rms_norm_eps: float = 1e-6  # where config.json has none, as in transformers
    rope_theta: float = 10000.0  # likewise
    has_shared_gate: bool = False  # the shared expert's result is times the sigmoid of a product, its width is a key
    has_expert_biases: bool = False  # of experts and router, and clamped SwiGLU
    expert_width: str = "moe_intermediate_size"  # the key of the experts' width
    num_dense_layers: int = 0  # first_k_dense_replace
    has_experts: bool = True
    has_multipliers: bool = False  # of embeddings, attention scores, sublayers' results and logits
    joined_mlp: bool = False  # gate and up of dense layers are one tensor in files
    ties_embeddings: bool = False  # tie_word_embeddings
    grouped: Grouped | None = None  # None: latent attention
    compressed: bool = False  # a window and compressed entries instead; hyper-connections, hash layers, clamped experts
    indexer: Indexer | None = None  # of latent attention; None: a query attends to all keys before it
    scales_queries: bool = False  # by position; its rope_parameters say how
    fixed: dict[str, bool] = field(default_factory=lambda: {"mlp_bias": False})  # flags that must have this value
    activation: tuple[str, str] = ("hidden_act", "silu")  # of dense MLPs: its key and only value
    norms_from_one: bool = False  # weights of norms are stored less 1, which is added to them in float32
    wide_norms: bool = False  # weights of norms stay in float32
    norms: Mapping[str, str] = field(default_factory=lambda: PRE_NORMS)  # of a layer, by field of LayerWeights
    scales_embedding: bool = False  # by the root of hidden_size
    # further keys where config.json does not say them; query_pre_attn_scalar is read where it is among them
    defaults: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Carrier:
    """A model of text and images: the place of its language model, and its other parts."""

    architectures: tuple[str, ...]
    part: str  # of config.json
    prefix: str  # of the names of the language model's tensors
    skipped: tuple[str, ...]  # prefixes of the other tensors' names
    image_keys: frozenset[str]  # keys of config.json that do not concern the language model


FAMILIES: dict[str, Family] = {
    "deepseek_v3": Family(("DeepseekV3ForCausalLM",), num_groups=None),
    "deepseek_v2": Family(
        ("DeepseekV2ForCausalLM",),
        topk_methods=("greedy", "group_limited_greedy"),
        scoring_func="softmax",
        norm_topk_prob=False,
        # a true norm_topk_prob means nothing in transformers, and no routed_scaling_factor in DeepSeek's own code
        fixed={"rope_interleave": True, "norm_topk_prob": False},
    ),
    "kimi_k2": Family(("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"), num_groups=None),
    "glm4_moe_lite": Family(("Glm4MoeLiteForCausalLM",), rms_norm_eps=1e-5, num_dense_layers=1),
    "deepseek_v32": Family(
        ("DeepseekV32ForCausalLM",),
        num_groups=None,
        num_dense_layers=3,
        indexer=Indexer(rope_interleave=False),
        fixed={"mlp_bias": False, "rope_interleave": True},
    ),
    "glm_moe_dsa": Family(
        ("GlmMoeDsaForCausalLM",),
        rms_norm_eps=1e-5,
        num_dense_layers=3,
        indexer=Indexer(rope_interleave=True, shares=True),
        fixed={"mlp_bias": False, "rope_interleave": True},
    ),
    "youtu": Family(("YoutuForCausalLM",), has_experts=False, ties_embeddings=True),
    # Mistral Small 4 inside mistral3, and Mistral Large 3, whose params.json comes here by mistral_format.py
    "mistral4": Family(
        ("Mistral4ForCausalLM",), topk_methods=("group_top2",), scoring_func="softmax", scales_queries=True
    ),
    "qwen3": Family(("Qwen3ForCausalLM",), has_experts=False, grouped=Grouped(qk_norm="head", windows="optional")),
    "qwen3_moe": Family(
        ("Qwen3MoeForCausalLM",),
        topk_methods=("greedy",),
        scoring_func="softmax",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        has_plain_gate=True,
        grouped=Grouped(qk_norm="head", windows="off"),
    ),
    "qwen2_moe": Family(
        ("Qwen2MoeForCausalLM",),
        topk_methods=("greedy",),
        scoring_func="softmax",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        has_plain_gate=True,
        has_shared_gate=True,
        grouped=Grouped(attention_bias=True, bias_key="qkv_bias", biased_output=False, windows="off"),
    ),
    "glm4_moe": Family(
        ("Glm4MoeForCausalLM",),
        rms_norm_eps=1e-5,
        num_dense_layers=1,
        routed_scaling_factor=1.0,
        grouped=Grouped(qk_norm="head", norm_key="use_qk_norm", biased_output=False, rotary_share=0.5),
    ),
    "minimax_m2": Family(
        ("MiniMaxM2ForCausalLM",),
        rope_theta=5000000.0,
        routed_scaling_factor=1.0,
        has_plain_gate=True,
        expert_width="intermediate_size",
        fixed={"mlp_bias": False, "norm_topk_prob": True, "attention_bias": False},
        grouped=Grouped(
            qk_norm="whole",
            norm_key="use_qk_norm",
            norm_default=True,
            norm_notes=(("qk_norm_type", "per_layer"),),
            rotary_key="rotary_dim",
        ),
    ),
    "gpt_oss": Family(
        ("GptOssForCausalLM",),
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        topk_methods=("topk_softmax",),
        scoring_func="softmax",
        routed_scaling_factor=1.0,
        has_plain_gate=True,
        expert_width="intermediate_size",
        has_expert_biases=True,
        fixed={"mlp_bias": False, "norm_topk_prob": True},
        grouped=Grouped(attention_bias=True, has_sinks=True, windows="alternate", needs_rope=True),
    ),
    "deepseek_v4": Family(
        ("DeepseekV4ForCausalLM",), scoring_func="sqrtsoftplus", compressed=True, fixed={"mlp_bias": False}
    ),
    "llama": Family(("LlamaForCausalLM",), has_experts=False, grouped=Grouped(), fixed={}),
    "qwen2": Family(
        ("Qwen2ForCausalLM",),
        has_experts=False,
        fixed={"mlp_bias": False, "attention_bias": True},
        grouped=Grouped(attention_bias=True, biased_output=False, windows="optional"),
    ),
    "seed_oss": Family(
        ("SeedOssForCausalLM",), has_experts=False, grouped=Grouped(attention_bias=True, biased_output=False), fixed={}
    ),
    "mistral": Family(
        ("MistralForCausalLM",),
        has_experts=False,
        fixed={"mlp_bias": False, "attention_bias": False},
        grouped=Grouped(windows="every", window=4096),
    ),
    "mixtral": Family(
        ("MixtralForCausalLM",),
        rms_norm_eps=1e-5,
        rope_theta=1000000.0,
        topk_methods=("greedy",),
        scoring_func="softmax",
        routed_scaling_factor=1.0,
        has_plain_gate=True,
        expert_width="intermediate_size",
        fixed={"mlp_bias": False, "norm_topk_prob": True, "attention_bias": False},
        grouped=Grouped(windows="every"),
    ),
    "smollm3": Family(
        ("SmolLM3ForCausalLM",),
        rope_theta=2000000.0,
        has_experts=False,
        ties_embeddings=True,
        fixed={},
        grouped=Grouped(windows="off", nope="listed"),
    ),
    "glm4": Family(
        ("Glm4ForCausalLM",),
        rms_norm_eps=1.5625e-7,
        has_experts=False,
        joined_mlp=True,
        norms={
            "input_norm": "input_layernorm",
            "attention_post_norm": "post_self_attn_layernorm",
            "mlp_norm": "post_attention_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
        },
        grouped=Grouped(attention_bias=True, biased_output=False, rotary_share=0.5, rope_interleave=True),
    ),
    "ernie4_5": Family(
        ("Ernie4_5ForCausalLM",),
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        has_experts=False,
        ties_embeddings=True,
        fixed={"mlp_bias": False, "attention_bias": False},
        grouped=Grouped(rope_interleave=True),
        defaults={"head_dim": 128},
    ),
    "exaone4": Family(
        ("Exaone4ForCausalLM",),
        rms_norm_eps=1e-5,
        has_experts=False,
        norms=POST_NORMS,
        fixed={"mlp_bias": False, "attention_bias": False},
        grouped=Grouped(qk_norm="head", windows="hybrid", window=4096, full_every=4, nope="full"),
    ),
    "olmo3": Family(
        ("Olmo3ForCausalLM",),
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        has_experts=False,
        norms=POST_NORMS,
        wide_norms=True,
        grouped=Grouped(qk_norm="whole", windows="pattern", window=4096, full_every=4, window_theta=500000.0),
    ),
    "olmo2": Family(
        ("Olmo2ForCausalLM",),
        rms_norm_eps=1e-5,
        has_experts=False,
        norms=POST_NORMS,
        wide_norms=True,
        grouped=Grouped(qk_norm="whole"),
    ),
    "granite": Family(("GraniteForCausalLM",), has_experts=False, has_multipliers=True, grouped=Grouped(), fixed={}),
    "phi3": Family(
        ("Phi3ForCausalLM",),
        rms_norm_eps=1e-5,
        has_experts=False,
        joined_mlp=True,
        fixed={"mlp_bias": False, "attention_bias": False},
        grouped=Grouped(windows="every", any_rotary_share=True, has_longrope=True, joined_qkv=True),
    ),
    "gemma3_text": Family(
        ("Gemma3ForCausalLM",),
        rope_theta=1000000.0,
        has_experts=False,
        ties_embeddings=True,
        fixed={"mlp_bias": False, "attention_bias": False},
        grouped=Grouped(qk_norm="head", windows="pattern", window=4096, window_theta=10000.0),
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        norms_from_one=True,
        wide_norms=True,
        norms={
            "input_norm": "input_layernorm",
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        },
        scales_embedding=True,
        # published files leave out what transformers has as default
        defaults={
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
        },
    ),
}
CARRIERS: dict[str, Carrier] = {
    "kimi_k25": Carrier(
        architectures=("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        part="text_config",
        prefix="language_model.",
        skipped=("vision_tower.", "mm_projector."),
        image_keys=frozenset(
            [
                *("vision_config", "vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"),
                *("projection_hidden_size", "projection_layer_norm_eps", "media_placeholder_token_id", "ignore_index"),
                *("video_placeholder", "use_unified_vision_chunk"),
            ]
        ),
    ),
    "mistral3": Carrier(
        architectures=("Mistral3ForConditionalGeneration",),
        part="text_config",
        prefix="language_model.",
        skipped=("vision_tower.", "multi_modal_projector."),
        image_keys=frozenset(
            [
                *("vision_config", "image_token_index", "image_token_id", "projector_hidden_act", "spatial_merge_size"),
                *("vision_feature_layer", "multimodal_projector_bias"),
            ]
        ),
    ),
    "gemma3": Carrier(
        architectures=("Gemma3ForConditionalGeneration",),
        part="text_config",
        prefix="language_model.",
        skipped=("vision_tower.", "multi_modal_projector."),
        image_keys=frozenset(
            ["vision_config", "mm_tokens_per_image", "image_token_index", "boi_token_index", "eoi_token_index"]
        ),
    ),
}
# Types that are asked for and not there, and what they compute beyond the families above.
NOT_IMPLEMENTED = {
    "mistral_large4": "its layers share latents and differ in positions, and softmax scales are learned",
    "kimi_linear": "most of its layers keep a linear-attention state (KDA) instead of latents",
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_6", "qwen3_6_moe"),
        "three of four layers keep a linear-attention state (gated delta-net), which no pages hold",
    ),
    **dict.fromkeys(
        ("minimax", "minimax_text_01", "minimax_m1"),
        "most of its layers keep a linear-attention state (lightning attention), which no pages hold",
    ),
    **dict.fromkeys(
        ("nemotron_h", "granitemoehybrid", "falcon_h1", "jamba", "bamba", "zamba2"),
        "many of its layers keep a state of Mamba, which no pages hold",
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe"), "its convolution layers keep a state, which no pages hold"),
    "longcat_flash": "its layers have two attentions and experts that compute nothing",
}
