"""The indexer of DeepSeek Sparse Attention as config.json describes it (DeepSeek-V3.2-Exp report section 2.1)."""

from dataclasses import dataclass

from batchinfer.model.config_reader import ConfigReader
from batchinfer.model.families import Indexer

_PATTERN = {"F": "full", "S": "shared"}


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """An indexer, which chooses a query's keys: the `topk` that its heads score best, or all if there are fewer."""

    num_heads: int
    head_dim: int
    topk: int
    rope_interleave: bool
    sharing_layers: frozenset[int]  # layers without an indexer, which use the keys of the layer before them

    def of_layer(self, layer: int) -> bool:
        """Return whether this layer has an indexer and does not share an earlier one."""
        return layer not in self.sharing_layers

    def num_weights(self, hidden_size: int, q_lora_rank: int) -> int:
        """Return the number of weights of one indexer without its norm; a token is multiplied with each once."""
        return self.num_heads * (self.head_dim * q_lora_rank + hidden_size) + self.head_dim * hidden_size


def read_indexer(reader: ConfigReader, family: Indexer | None, num_layers: int, rope_dim: int) -> IndexerConfig | None:
    """Read the indexer's keys; return None for a family without indexer, whose keys are refused elsewhere.

    Raises:
        ModelError: a key is missing or has an unsupported value.
    """
    if family is None:
        return None
    if not reader.has("q_lora_rank"):
        raise reader.unsupported("q_lora_rank", None, "a whole number, since the indexer's queries are made of it")
    interleave = family.rope_interleave
    reader.expect("indexer_rope_interleave", interleave, supported=f"{str(interleave).lower()} for this model_type")
    return IndexerConfig(
        num_heads=reader.size("index_n_heads"),
        head_dim=reader.size("index_head_dim", minimum=rope_dim),
        topk=reader.size("index_topk"),
        rope_interleave=interleave,
        sharing_layers=_sharing_layers(reader, num_layers) if family.shares else frozenset(),
    )


def _sharing_layers(reader: ConfigReader, num_layers: int) -> frozenset[int]:
    """Return the layers that share an indexer, by a list of kinds, a text of F and S, or a frequency (transformers)."""
    kinds = reader.texts("indexer_types")
    pattern = reader.text("index_topk_pattern", default="")
    frequency = reader.size("index_topk_freq", default=1)
    offset = reader.size("index_skip_topk_offset", default=2, minimum=0)
    if not kinds and pattern:
        kinds = [_PATTERN.get(letter, letter) for letter in pattern]
    if not kinds:
        kinds = ["shared" if max(layer - offset + 1, 0) % frequency else "full" for layer in range(num_layers)]
    if len(kinds) != num_layers or kinds[0] != "full" or not {"full", "shared"}.issuperset(kinds):
        raise reader.unsupported(
            "indexer_types", kinds, f'"full" or "shared" for each of {num_layers} layers, the first one "full"'
        )
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "shared")
