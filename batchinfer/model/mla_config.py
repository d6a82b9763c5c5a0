"""Latent attention by config.json (MLA, DeepSeek-V2 report section 2.1), also with an indexer (DSA)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from batchinfer.model.attention_config import AttentionConfig, LayerMatrices, Tensors, linear_tensors
from batchinfer.model.config_reader import ConfigReader
from batchinfer.model.families import Family
from batchinfer.model.indexer_config import IndexerConfig, read_indexer
from batchinfer.model.rope_config import read_rope

_SCALE_BYTES, _ROTARY_BYTES = 4, 2  # of pages in FP8
_TILE = 128  # latent values that share a scale


@dataclass(frozen=True, slots=True)
class MlaConfig(AttentionConfig):
    """A row is the compressed key-value latent and the rotary key of all heads."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool
    attention_bias: bool

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key: the part without position, then the rotary part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values that attention reads per token: the latent and the rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor on query · key, with YaRN's correction."""
        return self.qk_head_dim**-0.5 * self.rope.softmax_factor

    @property
    def row_width(self) -> int:
        return self.latent_dim

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim

    @property
    def query_width(self) -> int:
        return self.num_attention_heads * self.qk_head_dim

    @property
    def output_width(self) -> int:
        return self.num_attention_heads * self.v_head_dim

    @property
    def products_per_key(self) -> int:
        """Multiplications of a layer for each key, in the absorbed form."""
        return self.num_attention_heads * (self.latent_dim + self.kv_lora_rank)

    def num_weights(self, hidden: int, num_layers: int) -> int:
        query = self.query_width
        queries = hidden * query if self.q_lora_rank is None else self.q_lora_rank * (hidden + query)
        per_head = self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)
        latents = hidden * self.latent_dim + self.num_attention_heads * per_head
        return queries + latents + self.output_width * hidden

    def matrices(self, hidden: int, layer: int) -> LayerMatrices:
        """Return a layer's weights; one map makes keys and values of latents for prefill, two maps for decode."""
        query, heads, latent = self.query_width, self.num_attention_heads, self.kv_lora_rank
        down = self.q_lora_rank
        queries = ((hidden, query),) if down is None else ((hidden, down), (down, query))
        return LayerMatrices(
            narrow=(*queries, (hidden, self.latent_dim), (self.output_width, hidden)),
            wide=(
                (heads * latent, self.qk_nope_head_dim + self.v_head_dim),
                (heads * self.qk_nope_head_dim, latent),
                (heads * latent, self.v_head_dim),
            ),
            num_others=(down or 0) + latent,
        )

    def tensors(self, prefix: str, hidden: int, layer: int) -> Tensors:
        heads, bias = self.num_attention_heads, self.attention_bias
        if self.q_lora_rank is None:
            yield f"{prefix}.q_proj.weight", (self.query_width, hidden)
        else:
            yield from linear_tensors(f"{prefix}.q_a_proj", self.q_lora_rank, hidden, bias=bias)
            yield f"{prefix}.q_a_layernorm.weight", (self.q_lora_rank,)
            yield f"{prefix}.q_b_proj.weight", (self.query_width, self.q_lora_rank)
        yield from linear_tensors(f"{prefix}.kv_a_proj_with_mqa", self.latent_dim, hidden, bias=bias)
        yield f"{prefix}.kv_a_layernorm.weight", (self.kv_lora_rank,)
        yield f"{prefix}.kv_b_proj.weight", (heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank)
        yield from linear_tensors(f"{prefix}.o_proj", hidden, self.output_width, bias=bias)

    @property
    def why_no_fp8_pages(self) -> str | None:
        if self.kv_lora_rank % 4:
            return f"kv_lora_rank of the model is {self.kv_lora_rank}, not a multiple of 4"
        return None

    @property
    def fp8_row_bytes(self) -> int:
        num_tiles = -(-self.kv_lora_rank // _TILE)
        return self.kv_lora_rank + _SCALE_BYTES * num_tiles + _ROTARY_BYTES * self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class DsaConfig(MlaConfig):
    """A row also has the key of the indexer, which chooses the keys that a query attends to.

    Layers that share an indexer keep room for its key, too: all pages have one shape.
    """

    why_no_drafts: ClassVar[str | None] = "the layer's attention is sparse, which drafts do not compute"

    indexer: IndexerConfig

    @property
    def row_width(self) -> int:
        return self.latent_dim + self.indexer.head_dim

    @property
    def most_keys(self) -> float:
        return float(self.indexer.topk)

    def num_indexers(self, num_layers: int) -> int:
        """Return the number of layers with an indexer; layers that share an earlier layer's indexer do not count."""
        return num_layers - len(self.indexer.sharing_layers)

    def products_per_scored_key(self, num_layers: int) -> int:
        return self.num_indexers(num_layers) * self.indexer.num_heads * self.indexer.head_dim

    def num_weights(self, hidden: int, num_layers: int) -> int:
        of_indexers = self.num_indexers(num_layers) * self._indexer_weights(hidden)
        return MlaConfig.num_weights(self, hidden, num_layers) + of_indexers // num_layers

    def matrices(self, hidden: int, layer: int) -> LayerMatrices:
        latent = MlaConfig.matrices(self, hidden, layer)
        if not self.indexer.of_layer(layer):
            return latent
        return latent._replace(num_others=latent.num_others + self._indexer_weights(hidden))

    def tensors(self, prefix: str, hidden: int, layer: int) -> Tensors:
        yield from MlaConfig.tensors(self, prefix, hidden, layer)
        if self.indexer.of_layer(layer):
            yield from self._indexer_tensors(f"{prefix}.indexer", hidden)

    @property
    def why_no_fp8_pages(self) -> str | None:
        return "the model has an indexer (sparse attention), whose keys pages in FP8 do not hold"

    def _indexer_weights(self, hidden: int) -> int:
        assert self.q_lora_rank is not None
        return self.indexer.num_weights(hidden, self.q_lora_rank)

    def _indexer_tensors(self, prefix: str, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        indexer = self.indexer
        assert self.q_lora_rank is not None
        yield f"{prefix}.wq_b.weight", (indexer.num_heads * indexer.head_dim, self.q_lora_rank)
        yield f"{prefix}.wk.weight", (indexer.head_dim, hidden)
        yield f"{prefix}.k_norm.weight", (indexer.head_dim,)
        yield f"{prefix}.k_norm.bias", (indexer.head_dim,)
        yield f"{prefix}.weights_proj.weight", (indexer.num_heads, hidden)


def read_mla(reader: ConfigReader, family: Family, num_layers: int, max_positions: int) -> MlaConfig:
    """Read latent attention.

    Raises:
        ModelError: a key is missing or has an unsupported value.
    """
    heads = reader.size("num_attention_heads")
    as_heads = "equal to num_attention_heads, since MLA has no grouped heads"
    reader.expect("num_key_value_heads", heads, supported=as_heads)
    rope_dim = _read_rope_dim(reader)
    nope_dim = reader.size("qk_nope_head_dim")
    reader.expect("qk_head_dim", nope_dim + rope_dim, supported="qk_nope_head_dim + qk_rope_head_dim")
    fields: dict[str, Any] = {
        "num_attention_heads": heads,
        "q_lora_rank": reader.size("q_lora_rank") if reader.has("q_lora_rank") else None,
        "kv_lora_rank": reader.size("kv_lora_rank"),
        "qk_nope_head_dim": nope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": reader.size("v_head_dim"),
    }
    indexer = read_indexer(reader, family.indexer, num_layers, rope_dim)
    fields |= {
        "rope": read_rope(reader, family, max_positions, rope_dim / (nope_dim + rope_dim)),
        "rope_interleave": read_flag(reader, family, "rope_interleave", default=True),
        "attention_bias": reader.flag("attention_bias", default=False),
    }
    # the second name of the same is transformers' own from before it had the first
    kinds = ("full_attention",) if indexer is None else ("indexed_attention", "deepseek_sparse_attention")
    expected = [[kind] * num_layers for kind in kinds]
    reader.expect("layer_types", *expected, supported=f'"{kinds[0]}" for every layer')
    return MlaConfig(**fields) if indexer is None else DsaConfig(**fields, indexer=indexer)


def read_flag(reader: ConfigReader, family: Family, key: str, *, default: bool) -> bool:
    """Return a flag; families that do not support it must leave it at its fixed value."""
    if key in family.fixed:
        reader.expect(key, family.fixed[key], supported=f"{str(family.fixed[key]).lower()} for this model_type")
        return family.fixed[key]
    return reader.flag(key, default=default)


def _read_rope_dim(reader: ConfigReader) -> int:
    rope_dim = reader.size("qk_rope_head_dim")
    if rope_dim % 2:
        raise reader.unsupported("qk_rope_head_dim", rope_dim, "an even number, since rotary values come in pairs")
    return rope_dim
