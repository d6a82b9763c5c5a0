"""Attention to a window and to compressed entries by config.json (DeepSeek-V4 report section 2.3).

    layer             keys of a query, one row for all heads, each key and value at once
    ratio 0           the last tokens, its own included: the window
    ratio 4 (CSA)     the window, and of the entries of 4 tokens each those that an indexer chooses
    ratio 128 (HCA)   the window, and all entries of 128 tokens each

Entries grow with the prompt and are in pages. The window's rows, and the rows of tokens whose entry is not made yet,
are a state of fixed size.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from batchinfer.model.attention_config import AttentionConfig, LayerMatrices, Tensors
from batchinfer.model.config_reader import ConfigReader
from batchinfer.model.families import Family
from batchinfer.model.rope_config import RopeConfig, read_rope

INDEXED, WIDE = 4, 128  # ratios: tokens of an entry, of which an indexer chooses some, or which all are keys
_STATE_BYTES = 4  # of a value that waits for its entry: they are in float32
_DRAFTER = "dspark_"  # keys of the layers mtp.*, which are not read
_RATIOS = 0, INDEXED, WIDE


@dataclass(frozen=True, slots=True)
class Compressor:
    """Sizes of a compressor, which makes one entry of `width` values from `ratio` tokens."""

    ratio: int
    width: int

    @property
    def overlaps(self) -> bool:
        """Whether an entry is made of the tokens before its own, too."""
        return self.ratio == INDEXED

    @property
    def raw_width(self) -> int:
        """Values of a token's part in entries; with an overlap it has one part in its entry and one in the next."""
        return self.width * (1 + self.overlaps)

    @property
    def num_waiting(self) -> int:
        """Number of tokens kept in the state: one entry's, or two entries' if entries overlap."""
        return self.ratio * (1 + self.overlaps)

    @property
    def state_values(self) -> int:
        """Values of parts and of their gates that a request keeps in float32."""
        return self.num_waiting * 2 * self.raw_width

    def num_weights(self, hidden: int) -> int:
        """Return the number of weights that a token is multiplied with."""
        return 2 * hidden * self.raw_width

    def tensors(self, prefix: str, hidden: int) -> Tensors:
        """Yield name and shape of its tensors."""
        yield f"{prefix}.ape", (self.ratio, self.raw_width)
        yield f"{prefix}.wkv.weight", (self.raw_width, hidden)
        yield f"{prefix}.wgate.weight", (self.raw_width, hidden)
        yield f"{prefix}.norm.weight", (self.width,)


@dataclass(frozen=True, slots=True)
class CompressedConfig(AttentionConfig):
    """Attention to a window and to compressed entries; `rope` is of the layers without entries."""

    unit_tokens: ClassVar[int] = WIDE  # tokens of the largest entry, which lies in two pages
    why_no_drafts: ClassVar[str | None] = (
        "the layer for multi-token prediction, mtp.*, is not read for models of compressed entries"
    )

    compressed_rope: RopeConfig  # of the layers with entries, for all that is rotated in them
    head_dim: int  # of queries, rows of the window, and entries
    rotated: int  # last values of these that are rotated
    q_lora_rank: int
    num_output_groups: int
    o_lora_rank: int  # of each group of heads
    window: int  # keys that a query sees without entries, its own included
    ratios: tuple[int, ...]  # of each layer
    index_heads: int
    index_dim: int
    index_topk: int

    @property
    def row_width(self) -> int:
        """Values of a token in pages, as the mean over all layers."""
        return -(-self._page_values // (WIDE * len(self.ratios)))

    def values_per_token(self, num_layers: int) -> int:
        return -(-self._page_values // WIDE)

    @property
    def _page_values(self) -> int:
        """Values that WIDE tokens have in pages, over all layers."""
        return sum(WIDE // one.ratio * one.width for one in self._all())

    def compressors(self, layer: int) -> tuple[Compressor, ...]:
        """Return a layer's compressors: of its entries, then of its index keys; either may be missing."""
        ratio = self.ratios[layer]
        if ratio == 0:
            return ()
        entries = Compressor(ratio, self.head_dim)
        return (entries, Compressor(ratio, self.index_dim)) if ratio == INDEXED else (entries,)

    def state_bytes(self, bytes_per_value: int, *, stored: bool = False) -> int:
        windows = len(self.ratios) * self.window * self.head_dim * bytes_per_value
        # after whole entries only those that overlap need tokens from before
        waiting = sum(one.state_values for one in self._all() if one.overlaps or not stored)
        return windows + waiting * _STATE_BYTES

    def _all(self) -> list[Compressor]:
        return [one for layer in range(len(self.ratios)) for one in self.compressors(layer)]

    @property
    def rotary_dim(self) -> int:
        return self.rotated

    @property
    def query_width(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def output_width(self) -> int:
        return self.num_output_groups * self.o_lora_rank

    @property
    def _group_width(self) -> int:
        """Values of the heads of one group of the output projection."""
        return self.query_width // self.num_output_groups

    @property
    def most_keys(self) -> float:
        """Tokens whose entries the indexers choose: a query that sees more attends to no more of them."""
        return INDEXED * self.index_topk if INDEXED in self.ratios else float("inf")

    @property
    def products_per_key(self) -> int:
        """Multiplications of a layer for each token before, as the mean over all layers; the window does not count."""
        entries = self._share(INDEXED) / INDEXED + self._share(WIDE) / WIDE
        return max(1, round(2 * self.query_width * entries))

    def products_per_scored_key(self, num_layers: int) -> int:
        """Return the multiplications of all layers for each token before: of scored entries, and of wide ones."""
        indexed, wide = self.ratios.count(INDEXED), self.ratios.count(WIDE)
        scored = indexed * self.index_heads * self.index_dim / INDEXED
        return round(scored + wide * 2 * self.query_width / WIDE)

    def _share(self, ratio: int) -> float:
        return self.ratios.count(ratio) / len(self.ratios)

    def num_weights(self, hidden: int, num_layers: int) -> int:
        total = 0
        for layer in range(len(self.ratios)):
            one = self.matrices(hidden, layer)
            total += sum(num_in * num_out for num_in, num_out in (*one.narrow, *one.wide))
        return total // len(self.ratios)

    def matrices(self, hidden: int, layer: int) -> LayerMatrices:
        narrow = [
            (hidden, self.q_lora_rank),
            (self.q_lora_rank, self.query_width),
            (hidden, self.head_dim),
            (self.output_width, hidden),
        ]
        wide = [(self._group_width, self.output_width)]
        others = self.q_lora_rank + 2 * self.head_dim + self.num_attention_heads
        for one in self.compressors(layer):
            wide += [(hidden, one.raw_width)] * 2
            others += one.ratio * one.raw_width + one.width
        if self.ratios[layer] == INDEXED:
            narrow.append((self.q_lora_rank, self.index_heads * self.index_dim))
            wide.append((hidden, self.index_heads))
        return LayerMatrices(tuple(narrow), tuple(wide), others)

    def tensors(self, prefix: str, hidden: int, layer: int) -> Tensors:
        """Yield name and shape of a layer's tensors, in the names of the published files."""
        yield f"{prefix}.wq_a.weight", (self.q_lora_rank, hidden)
        yield f"{prefix}.q_norm.weight", (self.q_lora_rank,)
        yield f"{prefix}.wq_b.weight", (self.query_width, self.q_lora_rank)
        yield f"{prefix}.wkv.weight", (self.head_dim, hidden)
        yield f"{prefix}.kv_norm.weight", (self.head_dim,)
        yield f"{prefix}.attn_sink", (self.num_attention_heads,)
        yield f"{prefix}.wo_a.weight", (self.output_width, self._group_width)
        yield f"{prefix}.wo_b.weight", (hidden, self.output_width)
        names = (f"{prefix}.compressor", f"{prefix}.indexer.compressor")
        for name, one in zip(names, self.compressors(layer), strict=False):
            yield from one.tensors(name, hidden)
        if self.ratios[layer] == INDEXED:
            yield f"{prefix}.indexer.wq_b.weight", (self.index_heads * self.index_dim, self.q_lora_rank)
            yield f"{prefix}.indexer.weights_proj.weight", (self.index_heads, hidden)

    @property
    def why_no_fp8_pages(self) -> str | None:
        return "pages of compressed entries are in the model's dtype"


def read_compressed(reader: ConfigReader, family: Family, num_layers: int, max_positions: int) -> CompressedConfig:
    """Read this attention's keys.

    Raises:
        ModelError: a key is missing or has an unsupported value.
    """
    heads = reader.size("num_attention_heads")
    head_dim = reader.size("head_dim")
    rotated = reader.size("qk_rope_head_dim", maximum=head_dim)
    index_dim = reader.size("index_head_dim", minimum=rotated)
    reader.expect("num_key_value_heads", 1, supported="1: one row is key and value of all heads", needed=True)
    reader.expect("attention_bias", False, supported="false")
    groups = reader.size("o_groups", maximum=heads)
    if heads % groups:
        raise reader.unsupported("o_groups", groups, f"a divisor of num_attention_heads = {heads}")
    if rotated % 2:
        raise reader.unsupported("qk_rope_head_dim", rotated, "an even number")
    reader.pass_over(*(key for key in reader.unread() if key.startswith(_DRAFTER)))
    plain, scaled = _read_ropes(reader, family, max_positions)
    return CompressedConfig(
        num_attention_heads=heads,
        rope=plain,
        compressed_rope=scaled,
        head_dim=head_dim,
        rotated=rotated,
        q_lora_rank=reader.size("q_lora_rank"),
        num_output_groups=groups,
        o_lora_rank=reader.size("o_lora_rank"),
        window=reader.size("sliding_window"),
        ratios=_read_ratios(reader, num_layers),
        index_heads=reader.size("index_n_heads"),
        index_dim=index_dim,
        index_topk=reader.size("index_topk"),
    )


def _read_ratios(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return the tokens of an entry in each layer; the list may go on for layers of multi-token prediction."""
    ratios = reader.numbers("compress_ratios", whole=True)
    if len(ratios) < num_layers or not set(_RATIOS).issuperset(ratios):
        known = " or ".join(map(str, _RATIOS))
        supported = f"{known} for each of {num_layers} layers, and for those of multi-token prediction"
        raise reader.unsupported("compress_ratios", ratios or None, supported)
    return tuple(ratios[:num_layers])


def _read_ropes(reader: ConfigReader, family: Family, max_positions: int) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotary settings of layers without entries, and of layers with entries (own base, rope_scaling)."""
    theta = reader.number("rope_theta", above=1.0)
    base = reader.number("compress_rope_theta", above=1.0)
    scaled = read_rope(reader, family, max_positions, 1.0)
    if (scaled.mscale, scaled.mscale_all_dim, scaled.attention_factor) != (None, None, None):
        told = reader.section("rope_scaling")
        raise reader.unsupported("rope_scaling", None if told is None else told.unread(), "YaRN without any mscale")
    return RopeConfig(theta=theta), replace(scaled, theta=base, attention_factor=1.0)
