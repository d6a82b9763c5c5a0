"""The table of attention kinds."""

from batchinfer.model import mla, sparse_attention
from batchinfer.model.attention_config import AttentionConfig
from batchinfer.model.attention_kind import AttentionKind
from batchinfer.model.fused import layers as fused
from batchinfer.model.mla_config import DsaConfig, MlaConfig
from batchinfer.model.weights import MlaWeights

_KINDS: dict[type[AttentionConfig], AttentionKind] = {
    MlaConfig: AttentionKind(
        weights=MlaWeights,
        load=mla.load,
        build=fused.attention_of,
        products=mla.products,
        computations=mla.computations,
    ),
    DsaConfig: AttentionKind(
        weights=MlaWeights,
        load=sparse_attention.load,
        build=sparse_attention.build,
        products=sparse_attention.products,
        computations=sparse_attention.computations,
    ),
}


def kind_of(config: AttentionConfig) -> AttentionKind:
    """Return the functions for attention of this kind."""
    return _KINDS[type(config)]
