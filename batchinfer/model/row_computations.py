"""The row-by-row computations of a model in plain PyTorch, to check that a row's bits do not depend on its batch.

Weights that are packed for C++ or held in FP8 blocks are left out, as their products add in one fixed order.
"""

from collections.abc import Iterator

import torch

from batchinfer.model.attention_kind import AttentionKind
from batchinfer.model.attention_kinds import kind_of
from batchinfer.model.transformer import Transformer
from batchinfer.model.weights import ModelWeights, MoeWeights
from batchinfer_kernels import row_check
from batchinfer_kernels.row_check import RowComputation


def plain_computations(model: Transformer) -> Iterator[RowComputation]:
    """Yield each product of rows with a plain weight, and attention, once per shape."""
    ops, config, weights = model.ops, model.config, model.weights
    kind = kind_of(config.attention)
    seen = set()
    for how, weight in _products(kind, weights):
        if isinstance(weight, torch.Tensor) and (key := (how, weight.shape, weight.stride())) not in seen:
            seen.add(key)
            if how == "batched":
                yield row_check.batched_product(weight, ops.batched_linear)
            else:
                yield row_check.product(weight, ops.router if how == "router" else ops.linear)
    dtype = weights.embedding.dtype
    yield from kind.computations(ops, config.attention, weights.layers[0].attention, dtype)


def _products(kind: AttentionKind, weights: ModelWeights) -> Iterator[tuple[str, object]]:
    """Yield ("linear", "batched" or "router", weight) of all products of rows."""
    yield "linear", weights.lm_head
    if weights.streams is not None:
        yield "router", weights.streams.mixing
    for layer in weights.layers:
        mlp = layer.mlp
        yield from (("router", one.mixing) for one in (layer.attention_streams, layer.mlp_streams) if one is not None)
        yield from kind.products(layer.attention)
        if isinstance(mlp, MoeWeights):
            yield from (("router", gate) for gate in (mlp.router_ED, mlp.shared_gate_1D) if gate is not None)
            for experts in (mlp.gate_up_EFD, mlp.down_EDF):
                if isinstance(experts, torch.Tensor) and len(experts):
                    yield "linear", experts[0]
        dense = mlp.shared if isinstance(mlp, MoeWeights) else mlp
        if dense is not None:
            yield "linear", dense.gate_up.weight
            yield "linear", dense.down.weight
