"""The table of attention kinds."""

from batchinfer.model import compressed, gqa, mla, sparse_attention
from batchinfer.model.attention_config import AttentionConfig
from batchinfer.model.attention_kind import AttentionKind
from batchinfer.model.compressed_config import CompressedConfig
from batchinfer.model.compressed_memory import empty_memory, memory_parts
from batchinfer.model.fused import layers as fused
from batchinfer.model.gqa_config import GqaConfig
from batchinfer.model.mla_config import DsaConfig, MlaConfig
from batchinfer.model.ops import COMPRESSED, GROUPED, LATENT, STREAMS
from batchinfer.model.weights import CompressedWeights, GqaWeights, MlaWeights

_WITHOUT_ENTRIES = (*COMPRESSED, *STREAMS)  # operations of models with compressed entries, which have several streams
_KINDS: dict[type[AttentionConfig], AttentionKind] = {
    MlaConfig: AttentionKind(
        weights=MlaWeights,
        unused_ops=(*GROUPED, *_WITHOUT_ENTRIES),
        load=mla.load,
        build=fused.attention_of,
        products=mla.products,
        computations=mla.computations,
    ),
    DsaConfig: AttentionKind(
        weights=MlaWeights,
        unused_ops=(*GROUPED, *_WITHOUT_ENTRIES),
        load=sparse_attention.load,
        build=sparse_attention.build,
        products=sparse_attention.products,
        computations=sparse_attention.computations,
    ),
    GqaConfig: AttentionKind(
        weights=GqaWeights,
        unused_ops=(*LATENT, *_WITHOUT_ENTRIES),
        load=gqa.load,
        build=gqa.build,
        products=gqa.products,
        computations=gqa.computations,
    ),
    CompressedConfig: AttentionKind(
        weights=CompressedWeights,
        unused_ops=(*LATENT, *GROUPED),
        load=compressed.load,
        build=compressed.build,
        products=compressed.products,
        computations=compressed.computations,
        memory=empty_memory,
        parts=memory_parts,
    ),
}


def kind_of(config: AttentionConfig) -> AttentionKind:
    """Return the functions for attention of this kind."""
    return _KINDS[type(config)]
