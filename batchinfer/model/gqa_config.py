"""Grouped-query attention by config.json (GQA, arXiv 2305.13245): several heads of queries share a head of keys."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from batchinfer.model.attention_config import AttentionConfig, LayerMatrices, Tensors, linear_tensors
from batchinfer.model.config_reader import ConfigReader
from batchinfer.model.families import Family, Grouped
from batchinfer.model.mla_config import read_flag
from batchinfer.model.rope_config import RopeConfig, read_rope, read_window_rope

_FULL, _WINDOW = "full_attention", "sliding_attention"  # layer_types
_NOPE_INTERVAL = 4  # of layers without rotation, where config.json does not say it
_SCALE_BYTES, _TILE = 4, 128  # of pages in FP8: bytes of a scale, and values that share it


@dataclass(frozen=True, slots=True)
class GqaConfig(AttentionConfig):
    """A row is the keys of all KV heads, then their values."""

    why_no_drafts: ClassVar[str | None] = "drafts are computed for latent attention alone"

    num_key_value_heads: int
    head_dim: int
    rotated: int  # first values of a head that are rotated
    qk_norm: Literal["head", "whole"] | None  # norms of queries and keys: of each head alone, or of all heads together
    qkv_bias: bool
    out_bias: bool
    has_sinks: bool  # a score per head without a value
    windows: tuple[int | None, ...]  # of each layer: keys that a query sees, its own included; None: all
    window_rope: RopeConfig | None  # of layers with a window; None: as of the others
    score_factor: float  # on query · key
    joined_qkv: bool = False  # queries, keys and values are one tensor in files
    nope_layers: frozenset[int] = frozenset()  # layers in which nothing is rotated
    rope_interleave: bool = False  # rotary pairs are neighbours in files; in memory they are a half apart

    @property
    def qkv_width(self) -> int:
        """Values of all queries, keys and values of a token."""
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim

    @property
    def qkv_widths(self) -> dict[str, int]:
        """Names and widths of the projections to queries, keys and values, as files have them."""
        if self.joined_qkv:
            return {"qkv_proj": self.qkv_width}
        keys = self.num_key_value_heads * self.head_dim
        return {"q_proj": self.query_width, "k_proj": keys, "v_proj": keys}

    @property
    def qkv_order(self) -> list[int] | None:
        """The row in a file of each row in memory, of queries above keys above values; None if they are the same."""
        if not self.rope_interleave:
            return None
        pairs = [*range(0, self.rotated, 2), *range(1, self.rotated, 2), *range(self.rotated, self.head_dim)]
        num_rotated = self.num_attention_heads + self.num_key_value_heads
        heads = [head * self.head_dim + row for head in range(num_rotated) for row in pairs]
        return [*heads, *range(len(heads), self.qkv_width)]

    @property
    def row_width(self) -> int:
        return 2 * self.num_key_value_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        return self.rotated

    @property
    def query_width(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def output_width(self) -> int:
        return self.query_width

    @property
    def softmax_scale(self) -> float:
        """Factor on query · key; in these families YaRN's mscale_all_dim changes cos and sin alone."""
        return self.score_factor

    @property
    def full_share(self) -> float:
        """Share of layers without a window."""
        return self.windows.count(None) / len(self.windows)

    @property
    def products_per_key(self) -> int:
        """Multiplications of a layer for each key, as the mean over all layers; keys of windows do not count."""
        return max(1, round(2 * self.query_width * self.full_share))

    def num_weights(self, hidden: int, num_layers: int) -> int:
        return hidden * (self.qkv_width + self.output_width)

    def matrices(self, hidden: int, layer: int) -> LayerMatrices:
        biases = self.qkv_bias * self.qkv_width + self.out_bias * hidden
        norms = sum(self._norm_widths) if self.qk_norm else 0
        others = biases + norms + self.has_sinks * self.num_attention_heads
        return LayerMatrices(((hidden, self.qkv_width), (self.output_width, hidden)), num_others=others)

    def tensors(self, prefix: str, hidden: int, layer: int) -> Tensors:
        for name, width in self.qkv_widths.items():
            yield from linear_tensors(f"{prefix}.{name}", width, hidden, bias=self.qkv_bias)
        yield from linear_tensors(f"{prefix}.o_proj", hidden, self.output_width, bias=self.out_bias)
        if self.qk_norm is not None:
            for name, width in zip(("q_norm", "k_norm"), self._norm_widths, strict=True):
                yield f"{prefix}.{name}.weight", (width,)
        if self.has_sinks:
            yield f"{prefix}.sinks", (self.num_attention_heads,)

    @property
    def why_no_fp8_pages(self) -> str | None:
        if self.row_width % 4:
            return f"keys and values of the model have {self.row_width} values per token, not a multiple of 4"
        return None

    @property
    def fp8_row_bytes(self) -> int:
        return self.row_width + _SCALE_BYTES * -(-self.row_width // _TILE)

    @property
    def _norm_widths(self) -> tuple[int, int]:
        heads = (1, 1) if self.qk_norm == "head" else (self.num_attention_heads, self.num_key_value_heads)
        return heads[0] * self.head_dim, heads[1] * self.head_dim


def read_gqa(reader: ConfigReader, family: Family, grouped: Grouped, num_layers: int, max_positions: int) -> GqaConfig:
    """Read grouped-query attention.

    Raises:
        ModelError: a key is missing or has an unsupported value.
    """
    defaults = family.defaults
    heads = reader.size("num_attention_heads", default=defaults.get("num_attention_heads"))
    kv_heads = reader.size("num_key_value_heads", default=defaults.get("num_key_value_heads", heads))
    if heads % kv_heads:
        raise reader.unsupported("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}")
    each = max(1, reader.size("hidden_size") // heads)
    head_dim = reader.size("head_dim", default=defaults.get("head_dim", each), null=each)
    share = _rotary_share(reader, grouped, head_dim)
    rotated = int(head_dim * share)
    if rotated % 2 or not 0 < rotated <= head_dim:
        supported = f"a share of head_dim = {head_dim} that is an even number of values"
        raise reader.unsupported("partial_rotary_factor", share, supported)
    has_bias = read_flag(reader, family, grouped.bias_key, default=grouped.attention_bias)
    kinds, has_own_rope = (_FULL, _WINDOW), grouped.window_theta is not None
    rope = read_rope(reader, family, max_positions, share, _FULL if has_own_rope else None)
    if rope.pair_factors and len(rope.pair_factors) != rotated // 2:
        section = next(key for key in ("rope_parameters", "rope_scaling") if reader.section(key) is not None)
        supported = f"lists of {rotated // 2} numbers, one per pair of values that are rotated"
        raise reader.unsupported(f"{section}.long_factor", f"{len(rope.pair_factors)} numbers", supported)
    windows = _read_windows(reader, grouped, num_layers, max_positions)
    return GqaConfig(
        num_attention_heads=heads,
        rope=rope,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rotated=rotated,
        qk_norm=_read_qk_norm(reader, grouped),
        qkv_bias=has_bias,
        out_bias=has_bias and grouped.biased_output,
        has_sinks=grouped.has_sinks,
        windows=windows,
        window_rope=read_window_rope(reader, family, max_positions, kinds) if has_own_rope else None,
        score_factor=_read_score_factor(reader, family, head_dim),
        joined_qkv=grouped.joined_qkv,
        nope_layers=_read_nope_layers(reader, grouped, windows),
        rope_interleave=grouped.rope_interleave,
    )


def _rotary_share(reader: ConfigReader, grouped: Grouped, head_dim: int) -> float:
    """Return the share of a head that is rotated, which read_rope compares with all keys that say it."""
    if grouped.rotary_share == 1.0 and grouped.rotary_key is None and not grouped.any_rotary_share:
        return 1.0  # transformers ignores another share, or fails, by rope_type
    sections = (reader, reader.section("rope_parameters"), reader.section("rope_scaling"))
    said = [one.optional_number("partial_rotary_factor", above=0.0, at_most=1.0) for one in sections if one is not None]
    default = grouped.rotary_share
    if grouped.rotary_key is not None and reader.has(grouped.rotary_key):
        default = reader.size(grouped.rotary_key, maximum=head_dim) / head_dim
    return next((share for share in said if share is not None), default)


def _read_qk_norm(reader: ConfigReader, grouped: Grouped) -> Literal["head", "whole"] | None:
    """Return the norm of queries and keys; in some families a key turns it on."""
    if grouped.norm_key is not None and not reader.flag(grouped.norm_key, default=grouped.norm_default):
        return None
    for key, value in grouped.norm_notes:
        reader.expect(key, value, supported=f'"{value}" for this model_type')
    return grouped.qk_norm


def _read_score_factor(reader: ConfigReader, family: Family, head_dim: int) -> float:
    """Return the factor on query · key: a key's value, else by another key or by the width of a head."""
    if family.has_multipliers:
        return reader.number("attention_multiplier", 1.0, above=0.0)
    key, by = "query_pre_attn_scalar", float(head_dim)
    if key in family.defaults:
        by = reader.number(key, family.defaults[key], above=0.0)
    return by**-0.5


def _read_nope_layers(reader: ConfigReader, grouped: Grouped, windows: tuple[int | None, ...]) -> frozenset[int]:
    """Return the layers without rotation; of "listed" ones those with 0 in `no_rope_layers`, else every n-th one."""
    num_layers = len(windows)
    if grouped.nope == "full":
        window = reader.size("sliding_window", default=grouped.window, null=0)
        if window and not any(windows):  # transformers rotates in no layer then, others in all
            raise reader.unsupported("sliding_window", window, "null where no layer has a window")
        return frozenset(layer for layer, one in enumerate(windows) if window and one is None)
    if grouped.nope != "listed":
        return frozenset()
    interval = reader.size("no_rope_layer_interval", default=_NOPE_INTERVAL)
    if not reader.has("no_rope_layers"):
        return frozenset(range(interval - 1, num_layers, interval))
    rotates = reader.numbers("no_rope_layers", whole=True)
    if len(rotates) != num_layers or not {0, 1}.issuperset(rotates):
        raise reader.unsupported("no_rope_layers", rotates, f"0 or 1 for each of {num_layers} layers")
    return frozenset(layer for layer, one in enumerate(rotates) if not one)


def _read_windows(
    reader: ConfigReader, grouped: Grouped, num_layers: int, max_positions: int
) -> tuple[int | None, ...]:
    """Return the window of each layer by `layer_types`, else by the family's rule; None for full attention."""
    kinds, rule = reader.texts("layer_types"), grouped.windows
    reader.expect("attn_type_list", [1] * num_layers, supported="1 for every layer, full attention")
    window = _read_window(reader, grouped)
    if rule in ("pattern", "hybrid"):
        reader.pass_over("_sliding_window_pattern")  # a note of transformers
        if kinds or not window:
            reader.pass_over("sliding_window_pattern")  # layer_types says the same
        else:
            full = reader.size("sliding_window_pattern", default=grouped.full_every)
            kinds = [_WINDOW if (layer + 1) % full else _FULL for layer in range(num_layers)]
    if not window or rule == "every":
        kind, needed = _WINDOW if window else _FULL, rule == "pattern"  # by a pattern some layers would have a window
        reader.expect("layer_types", [kind] * num_layers, supported=f'"{kind}" for every layer', needed=needed)
        return (window if 0 < window < max_positions else None,) * num_layers
    if not kinds and rule == "optional":
        first = reader.size("max_window_layers", minimum=0)
        kinds = [_WINDOW if layer >= first else _FULL for layer in range(num_layers)]
    reader.pass_over("max_window_layers")  # layer_types says the same
    kinds = kinds or [_FULL if layer % 2 else _WINDOW for layer in range(num_layers)]
    if len(kinds) != num_layers or not {_FULL, _WINDOW}.issuperset(kinds):
        raise reader.unsupported("layer_types", kinds, f'"{_FULL}" or "{_WINDOW}" for each of {num_layers} layers')
    return tuple(window if kind == _WINDOW else None for kind in kinds)


def _read_window(reader: ConfigReader, grouped: Grouped) -> int:
    """Return the window of the layers that have one; 0: no layer has."""
    rule = grouped.windows
    if rule == "off":
        reader.expect("use_sliding_window", False, supported="false for this model_type")
    if rule == "off" or (rule == "optional" and not reader.flag("use_sliding_window", default=False)):
        reader.pass_over("sliding_window", "max_window_layers")
        return 0
    if rule in ("optional", "alternate"):
        return reader.size("sliding_window")
    return 0 if rule == "none" else reader.size("sliding_window", default=grouped.window, null=0)
