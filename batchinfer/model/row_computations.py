"""The row-by-row computations of a model in plain PyTorch, to check that a row's bits do not depend on its batch.

Weights that are packed for C++ or held in FP8 blocks are left out, as their products add in one fixed order.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from batchinfer.model.transformer import Transformer
from batchinfer.model.weights import ModelWeights, MoeWeights, Projection
from batchinfer_kernels import row_check
from batchinfer_kernels.reference.fp8_pages import narrow
from batchinfer_kernels.reference.mla import PagedKeys
from batchinfer_kernels.row_check import RowComputation


def plain_computations(model: Transformer) -> Iterator[RowComputation]:
    """Yield each product of rows with a plain weight, and attention, once per shape."""
    ops, config, weights = model.ops, model.config, model.weights
    seen = set()
    for kind, weight in _products(weights):
        if isinstance(weight, torch.Tensor) and (key := (kind, weight.shape, weight.stride())) not in seen:
            seen.add(key)
            if kind == "batched":
                yield row_check.batched_product(weight, ops.batched_linear)
            else:
                yield row_check.product(weight, ops.router if kind == "router" else ops.linear)
    kv_up_HZC = weights.layers[0].attention.kv_up_HZC
    shape = row_check.AttentionShape(
        num_heads=config.num_attention_heads,
        nope_dim=config.qk_nope_head_dim,
        rotary_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        latent_dim=config.kv_lora_rank,
    )
    if isinstance(kv_up_HZC, torch.Tensor):
        decode, prefill = (
            _over_fp8_pages(op, shape.latent_dim) if ops.fp8_pages else op for op in (ops.mla_decode, ops.mla_prefill)
        )
        yield row_check.decode_attention(shape, weights.embedding.dtype, decode)
        yield row_check.prefill_attention(shape, kv_up_HZC, prefill)
        if config.indexer is not None:
            widths = config.indexer.num_heads, config.indexer.head_dim, config.indexer.topk
            indexer = row_check.IndexerShape(*widths)
            yield row_check.sparse_attention(shape, indexer, weights.embedding.dtype, ops.choose_keys, ops.mla_sparse)


def _over_fp8_pages(op: Callable[..., torch.Tensor], latent_dim: int) -> Callable[..., torch.Tensor]:
    """Return attention over FP8 pages that takes bfloat16 pages and rounds them first."""

    def run(q: torch.Tensor, keys: PagedKeys, *rest: Any, **options: Any) -> torch.Tensor:
        pages = narrow(keys.pages.flatten(0, 1), latent_dim).view(*keys.pages.shape[:2], -1)
        return op(q, keys._replace(pages=pages), *rest, **options)

    return run


def _products(weights: ModelWeights) -> Iterator[tuple[str, object]]:
    """Yield (kind, weight) of all products outside attention; kinds are "linear", "batched" and "router"."""
    yield "linear", weights.lm_head
    for layer in weights.layers:
        attention, mlp = layer.attention, layer.mlp
        yield "batched", attention.key_up_HCN
        yield "batched", attention.value_up_HVC
        if attention.indexer is not None:
            yield "linear", attention.indexer.query
            yield "linear", attention.indexer.key
            yield "router", attention.indexer.heads
        projections: list[Projection | None] = [attention.q_down, attention.q, attention.kv_down, attention.out]
        if isinstance(mlp, MoeWeights):
            yield "router", mlp.router_ED
            for experts in (mlp.gate_up_EFD, mlp.down_EDF):
                if isinstance(experts, torch.Tensor) and len(experts):
                    yield "linear", experts[0]
        dense = mlp.shared if isinstance(mlp, MoeWeights) else mlp
        projections += [] if dense is None else [dense.gate_up, dense.down]
        for projection in projections:
            if projection is not None:
                yield "linear", projection.weight
