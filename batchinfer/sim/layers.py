"""The operations of one layer, assigned to the stages of the schedules.

Every stage also has the bytes that its small kernels move (norms, rotary part, FP8 conversion, activation, unpacking
and adding up expert rows): each value is read and written as often as the operation needs if it is not fused with a
product.
"""

from dataclasses import dataclass

from batchinfer.model.config import ModelConfig
from batchinfer.sim.exchange import ExchangeTimes
from batchinfer.sim.hardware import Accelerator
from batchinfer.sim.kernels import (
    bf16_product_s,
    decode_attention_s,
    grouped_product_s,
    prefill_attention_s,
    product_s,
    stream_s,
)
from batchinfer.sim.overlap import Stages

BF16, FP8, FP32 = 2, 1, 4


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The work of one GPU in one micro-batch."""

    tokens: float  # that run through the layer
    kv_pairs: float  # prefill: (query, key) pairs; decode: KV tokens attended to, over all requests
    kv_tokens: float  # prefill: tokens whose keys and values are expanded (new and cached); decode: not used
    expert_rows: float  # routed rows that this GPU receives
    experts: int  # slots on this GPU


def prefill_stages(
    work: LayerWork, model: ModelConfig, gpu: Accelerator, exchange: ExchangeTimes, *, sms_share: float, is_moe: bool
) -> Stages:
    """Return the seconds of a prefill micro-batch's stages; attention in its plain form, unless keys are chosen."""
    heads, tokens = model.num_attention_heads, work.tokens
    keys_and_values = heads * (model.qk_nope_head_dim + model.v_head_dim)
    attended = _attended(work.kv_pairs, tokens, model)
    attn_1 = prefill_attention_s(attended, heads, model.qk_head_dim, model.v_head_dim, gpu, sms_share)
    if attended < work.kv_pairs:  # each query has different keys: in the absorbed form, as in decode
        attn_1 = decode_attention_s(attended, heads, model.latent_dim, model.kv_lora_rank, gpu) / sms_share
    return Stages(
        attn_0=_query_s(tokens, model, gpu, sms_share)
        + _indexer_s(work, model, gpu, sms_share, is_decode=False)
        + product_s(work.kv_tokens, keys_and_values, model.kv_lora_rank, gpu, sms_share=sms_share)
        # the rotary key is copied to each head's own part
        + stream_s(work.kv_tokens * heads * model.qk_head_dim * 2 * BF16, gpu),
        attn_1=attn_1 + _output_and_gate_s(tokens, model, gpu, sms_share, is_moe),
        shared=_shared_s(tokens, model, gpu, sms_share) if is_moe else 0.0,
        mlp=_routed_s(work, model, gpu, sms_share, masked=False)
        if is_moe
        else _mlp_s(tokens, model.intermediate_size, model, gpu, sms_share),
        exchange=exchange,
    )


def decode_stages(
    work: LayerWork,
    model: ModelConfig,
    gpu: Accelerator,
    exchange: ExchangeTimes,
    *,
    is_moe: bool,
    row_bytes: int | None = None,
) -> Stages:
    """Return the seconds of the stages of a decode micro-batch; attention in its absorbed form.

    Args:
        row_bytes: of a KV token; None: of latents in BF16.
    """
    heads, tokens, latent = model.num_attention_heads, work.tokens, model.kv_lora_rank
    absorb_query = bf16_product_s(tokens, latent, model.qk_nope_head_dim, gpu, batch=heads)
    expand_value = bf16_product_s(tokens, model.v_head_dim, latent, gpu, batch=heads)
    attended = _attended(work.kv_pairs, tokens, model)
    attention = decode_attention_s(attended, heads, model.latent_dim, latent, gpu, row_bytes=row_bytes)
    return Stages(
        attn_0=_query_s(tokens, model, gpu, 1.0) + _indexer_s(work, model, gpu, 1.0, is_decode=True) + absorb_query,
        attn_1=attention + expand_value + _output_and_gate_s(tokens, model, gpu, 1.0, is_moe),
        shared=_shared_s(tokens, model, gpu, 1.0) if is_moe else 0.0,
        mlp=_routed_s(work, model, gpu, 1.0, masked=True)
        if is_moe
        else _mlp_s(tokens, model.intermediate_size, model, gpu, 1.0),
        exchange=exchange,
    )


def _attended(kv_pairs: float, tokens: float, model: ModelConfig) -> float:
    """Return the (query, key) pairs that are attended to, as if every query saw the mean number of keys."""
    return kv_pairs if model.indexer is None else min(kv_pairs, tokens * model.indexer.topk)


def _indexer_s(work: LayerWork, model: ModelConfig, gpu: Accelerator, sms_share: float, *, is_decode: bool) -> float:
    """Return the seconds of the indexer's projections and scores, as the mean over all layers.

    Keys are scored only if some are chosen. Projections are in FP8, scores in BF16 at the rates of attention: of one
    key for all heads in decode.
    """
    indexer, tokens = model.indexer, work.tokens
    if indexer is None:
        return 0.0
    assert model.q_lora_rank is not None
    seconds = product_s(tokens, indexer.num_heads * indexer.head_dim, model.q_lora_rank, gpu, sms_share=sms_share)
    seconds += product_s(tokens, indexer.head_dim + indexer.num_heads, model.hidden_size, gpu, sms_share=sms_share)
    shape = indexer.num_heads, indexer.head_dim, 0  # nothing is multiplied with values
    if _attended(work.kv_pairs, tokens, model) < work.kv_pairs:
        in_prefill = prefill_attention_s(work.kv_pairs, *shape, gpu, sms_share)
        seconds += decode_attention_s(work.kv_pairs, *shape, gpu) if is_decode else in_prefill
    return seconds * model.num_indexers / model.num_hidden_layers


def _query_s(tokens: float, model: ModelConfig, gpu: Accelerator, sms_share: float) -> float:
    """Return the seconds of norm, projections down (query and latent at once) and up, small norms, rotary part."""
    hidden, query = model.hidden_size, model.num_attention_heads * model.qk_head_dim
    down = model.latent_dim + (model.q_lora_rank or query)
    products = product_s(tokens, down, hidden, gpu, sms_share=sms_share)
    if model.q_lora_rank:
        products += product_s(tokens, query, model.q_lora_rank, gpu, sms_share=sms_share)
    moved = hidden * (BF16 + FP8) + down * (2 * BF16 + FP8) + query * 2 * BF16
    return products + stream_s(tokens * moved, gpu)


def _output_and_gate_s(tokens: float, model: ModelConfig, gpu: Accelerator, sms_share: float, is_moe: bool) -> float:
    """Return the seconds of output projection, residual, norm, and the router with its scores in float32."""
    hidden, values = model.hidden_size, model.num_attention_heads * model.v_head_dim
    seconds = product_s(tokens, hidden, values, gpu, sms_share=sms_share)
    moved = values * (BF16 + FP8) + hidden * (3 * BF16 + BF16 + FP8)
    if is_moe:
        seconds += bf16_product_s(tokens, model.n_routed_experts, hidden, gpu, sms_share=sms_share)
        moved += model.n_routed_experts * 2 * FP32
    return seconds + stream_s(tokens * moved, gpu)


def _shared_s(tokens: float, model: ModelConfig, gpu: Accelerator, sms_share: float) -> float:
    return _mlp_s(tokens, model.n_shared_experts * model.moe_intermediate_size, model, gpu, sms_share)


def _mlp_s(tokens: float, width: int, model: ModelConfig, gpu: Accelerator, sms_share: float) -> float:
    hidden = model.hidden_size
    if width == 0:
        return 0.0
    up = product_s(tokens, 2 * width, hidden, gpu, sms_share=sms_share)
    down = product_s(tokens, hidden, width, gpu, sms_share=sms_share)
    return up + down + stream_s(tokens * width * (2 * BF16 + FP8), gpu)


def _routed_s(work: LayerWork, model: ModelConfig, gpu: Accelerator, sms_share: float, *, masked: bool) -> float:
    """Return the seconds of this GPU's routed experts; prefill also unpacks received rows and adds up returned ones."""
    if work.experts == 0:
        return 0.0
    hidden, width, rows = model.hidden_size, model.moe_intermediate_size, work.expert_rows
    per_expert = rows / work.experts
    up = grouped_product_s(per_expert, work.experts, 2 * width, hidden, gpu, masked=masked, sms_share=sms_share)
    down = grouped_product_s(per_expert, work.experts, hidden, width, gpu, masked=masked, sms_share=sms_share)
    moved = rows * width * (2 * BF16 + FP8)
    if not masked:
        moved += rows * hidden * 2 * FP8 + rows * hidden * BF16
    return up + down + stream_s(moved, gpu)
