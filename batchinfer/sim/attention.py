"""Times of a layer's attention by its kind: projections before core attention, and core attention.

Output projection and router follow attention of every kind (layers.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from batchinfer.model.attention_config import AttentionConfig
from batchinfer.model.compressed_config import INDEXED, CompressedConfig
from batchinfer.model.config import ModelConfig
from batchinfer.model.gqa_config import GqaConfig
from batchinfer.model.mla_config import DsaConfig, MlaConfig
from batchinfer.sim.hardware import Accelerator
from batchinfer.sim.kernels import (
    MLA_FP8_SHARE,
    bf16_product_s,
    decode_attention_s,
    prefill_attention_s,
    product_s,
    stream_s,
)

BF16, FP8 = 2, 1
# small kernels: norm, rounding; norm of query and latent, rounding; rotary part and the KV row
QUERY_KERNELS = 5


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """The attention of one GPU in one micro-batch, in a layer."""

    tokens: float  # that run through the layer
    kv_pairs: float  # prefill: (query, key) pairs; decode: KV tokens attended to, over all requests
    kv_tokens: float  # prefill: tokens whose keys and values are used (new and cached); decode: not used


class AttentionSeconds(NamedTuple):
    """Seconds of a layer's attention up to core attention, and of core attention."""

    before: float
    core: float


def prefill_attention(work: AttentionWork, model: ModelConfig, gpu: Accelerator, sms_share: float) -> AttentionSeconds:
    """Return the seconds of a prefill micro-batch, without the output projection."""
    return _TIMES[type(model.attention)].prefill(work, model, gpu, sms_share)


def decode_attention(
    work: AttentionWork, model: ModelConfig, gpu: Accelerator, row_bytes: int | None
) -> AttentionSeconds:
    """Return the seconds of a decode micro-batch, without the output projection.

    Args:
        row_bytes: of a KV token; None: of values in BF16.
    """
    return _TIMES[type(model.attention)].decode(work, model, gpu, row_bytes)


def _latent_prefill(work: AttentionWork, model: ModelConfig, gpu: Accelerator, sms_share: float) -> AttentionSeconds:
    """Return the seconds in the plain form, unless keys are chosen."""
    attention, tokens = _latent(model), work.tokens
    heads = attention.num_attention_heads
    keys_and_values = heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    attended = _attended(work, attention)
    core = prefill_attention_s(attended, heads, attention.qk_head_dim, attention.v_head_dim, gpu, sms_share)
    measured = _measured_prefill_s(work, heads, gpu) if type(attention) is MlaConfig else None
    if measured is not None:
        core = measured / sms_share
    elif attended < work.kv_pairs:  # each query has different keys: in the absorbed form, as in decode
        core = decode_attention_s(attended, heads, attention.latent_dim, attention.kv_lora_rank, gpu) / sms_share
    before = (
        _latent_query_s(tokens, model, gpu, sms_share)
        + _indexer_s(work, model, gpu, sms_share, is_decode=False)
        + product_s(work.kv_tokens, keys_and_values, attention.kv_lora_rank, gpu, sms_share=sms_share)
        # the rotary key is copied to each head's own part
        + stream_s(work.kv_tokens * heads * attention.qk_head_dim * 2 * BF16, gpu)
    )
    return AttentionSeconds(before, core)


def _latent_decode(
    work: AttentionWork, model: ModelConfig, gpu: Accelerator, row_bytes: int | None
) -> AttentionSeconds:
    """Return the seconds in the absorbed form."""
    attention, tokens = _latent(model), work.tokens
    heads, latent = attention.num_attention_heads, attention.kv_lora_rank
    absorb_query = bf16_product_s(tokens, latent, attention.qk_nope_head_dim, gpu, batch=heads)
    expand_value = bf16_product_s(tokens, attention.v_head_dim, latent, gpu, batch=heads)
    attended = _attended(work, attention)
    rate_share = 1.0 if row_bytes is None else MLA_FP8_SHARE
    shape = heads, attention.latent_dim, latent
    core = decode_attention_s(attended, *shape, gpu, row_bytes=row_bytes, rate_share=rate_share)
    if gpu.rates is not None and tokens:
        absorb_query, expand_value = gpu.rates.absorb_s(tokens, heads) or (absorb_query, expand_value)
        if attended == work.kv_pairs:
            per_request = work.kv_pairs / tokens
            core = gpu.rates.decode_attention_s(tokens, per_request, heads, is_fp8=row_bytes is not None) or core
    queries = _latent_query_s(tokens, model, gpu, 1.0) + _indexer_s(work, model, gpu, 1.0, is_decode=True)
    return AttentionSeconds(queries + absorb_query, core + expand_value)


def _measured_prefill_s(work: AttentionWork, heads: int, gpu: Accelerator) -> float | None:
    """Return the seconds of prompts without hits that have as many pairs per token; None: not measured."""
    if gpu.rates is None or not work.tokens:
        return None
    prompt_tokens = 2 * work.kv_pairs / work.tokens
    seconds = gpu.rates.prefill_attention_s(prompt_tokens, heads)
    return None if seconds is None else seconds * work.kv_pairs / (prompt_tokens**2 / 2)


def _latent(model: ModelConfig) -> MlaConfig:
    assert isinstance(model.attention, MlaConfig)
    return model.attention


def _attended(work: AttentionWork, attention: AttentionConfig) -> float:
    """Return the (query, key) pairs that are attended to, as if every query saw the mean number of keys."""
    return min(work.kv_pairs, work.tokens * attention.most_keys)


def _indexer_s(
    work: AttentionWork, model: ModelConfig, gpu: Accelerator, sms_share: float, *, is_decode: bool
) -> float:
    """Return the seconds of the indexer's projections and scores, as the mean over all layers.

    Keys are scored only if some are chosen. Projections are in FP8, scores in BF16 at the rates of attention: of one
    key for all heads in decode.
    """
    attention, tokens = model.attention, work.tokens
    if not isinstance(attention, DsaConfig):
        return 0.0
    indexer = attention.indexer
    assert attention.q_lora_rank is not None
    seconds = product_s(tokens, indexer.num_heads * indexer.head_dim, attention.q_lora_rank, gpu, sms_share=sms_share)
    seconds += product_s(tokens, indexer.head_dim + indexer.num_heads, model.hidden_size, gpu, sms_share=sms_share)
    shape = indexer.num_heads, indexer.head_dim, 0  # nothing is multiplied with values
    if _attended(work, attention) < work.kv_pairs:
        in_prefill = prefill_attention_s(work.kv_pairs, *shape, gpu, sms_share)
        seconds += decode_attention_s(work.kv_pairs, *shape, gpu) if is_decode else in_prefill
    return seconds * attention.num_indexers(model.num_hidden_layers) / model.num_hidden_layers


def _latent_query_s(tokens: float, model: ModelConfig, gpu: Accelerator, sms_share: float) -> float:
    """Return the seconds of norm, projections down (query and latent at once) and up, small norms, rotary part."""
    attention, hidden = _latent(model), model.hidden_size
    query = attention.query_width
    down = attention.latent_dim + (attention.q_lora_rank or query)
    products = product_s(tokens, down, hidden, gpu, sms_share=sms_share)
    if attention.q_lora_rank:
        products += product_s(tokens, query, attention.q_lora_rank, gpu, sms_share=sms_share)
    moved = hidden * (BF16 + FP8) + down * (2 * BF16 + FP8) + query * 2 * BF16
    return products + stream_s(tokens * moved, gpu, kernels=QUERY_KERNELS)


def _grouped_prefill(work: AttentionWork, model: ModelConfig, gpu: Accelerator, sms_share: float) -> AttentionSeconds:
    attention = _grouped(model)
    shape = attention.num_attention_heads, attention.head_dim, attention.head_dim
    core = prefill_attention_s(_mean_pairs(work, attention), *shape, gpu, sms_share)
    return AttentionSeconds(_grouped_query_s(work.tokens, model, gpu, sms_share), core)


def _grouped_decode(
    work: AttentionWork, model: ModelConfig, gpu: Accelerator, row_bytes: int | None
) -> AttentionSeconds:
    attention = _grouped(model)
    shape = attention.num_attention_heads, attention.head_dim, attention.head_dim
    row_bytes = row_bytes or BF16 * attention.row_width
    core = decode_attention_s(_mean_pairs(work, attention), *shape, gpu, row_bytes=row_bytes)
    return AttentionSeconds(_grouped_query_s(work.tokens, model, gpu, 1.0), core)


def _grouped(model: ModelConfig) -> GqaConfig:
    assert isinstance(model.attention, GqaConfig)
    return model.attention


def _mean_pairs(work: AttentionWork, attention: GqaConfig) -> float:
    """Return the pairs that are attended to as the mean over layers, of which some may have a window."""
    in_windows = [min(work.kv_pairs, work.tokens * window) for window in attention.windows if window is not None]
    return attention.full_share * work.kv_pairs + sum(in_windows) / len(attention.windows)


def _grouped_query_s(tokens: float, model: ModelConfig, gpu: Accelerator, sms_share: float) -> float:
    """Return the seconds of norm, projection of queries, keys and values, their norms and rotary part."""
    attention, hidden = _grouped(model), model.hidden_size
    width = attention.qkv_width
    moved = hidden * (BF16 + FP8) + width * 2 * BF16
    return product_s(tokens, width, hidden, gpu, sms_share=sms_share) + stream_s(tokens * moved, gpu)


def _compressed_prefill(
    work: AttentionWork, model: ModelConfig, gpu: Accelerator, sms_share: float
) -> AttentionSeconds:
    attention = _compressed(model)
    shape = attention.num_attention_heads, attention.head_dim, attention.head_dim
    core = decode_attention_s(_entries_and_window(work, attention), *shape, gpu) / sms_share  # keys differ by query
    scored = _scored_entries(work, attention)
    core += prefill_attention_s(scored, attention.index_heads, attention.index_dim, 0, gpu, sms_share)
    return AttentionSeconds(_compressed_query_s(work.tokens, model, gpu, sms_share), core)


def _compressed_decode(
    work: AttentionWork, model: ModelConfig, gpu: Accelerator, row_bytes: int | None
) -> AttentionSeconds:
    attention = _compressed(model)
    shape = attention.num_attention_heads, attention.head_dim, attention.head_dim
    core = decode_attention_s(_entries_and_window(work, attention), *shape, gpu, row_bytes=BF16 * attention.head_dim)
    core += decode_attention_s(_scored_entries(work, attention), attention.index_heads, attention.index_dim, 0, gpu)
    return AttentionSeconds(_compressed_query_s(work.tokens, model, gpu, 1.0), core)


def _compressed(model: ModelConfig) -> CompressedConfig:
    assert isinstance(model.attention, CompressedConfig)
    return model.attention


def _entries_and_window(work: AttentionWork, attention: CompressedConfig) -> float:
    """Return the (query, key) pairs of a layer, as the mean over layers and as if every query saw as many tokens."""
    total = 0.0
    for ratio in attention.ratios:
        total += min(work.kv_pairs, work.tokens * attention.window)
        if ratio:
            most = work.tokens * attention.index_topk if ratio == INDEXED else work.kv_pairs
            total += min(work.kv_pairs / ratio, most)
    return total / len(attention.ratios)


def _scored_entries(work: AttentionWork, attention: CompressedConfig) -> float:
    """Return the (query, index key) pairs that are scored, as the mean over layers."""
    return work.kv_pairs / INDEXED * attention.ratios.count(INDEXED) / len(attention.ratios)


def _compressed_query_s(tokens: float, model: ModelConfig, gpu: Accelerator, sms_share: float) -> float:
    """Return the seconds of all projections but the last, as the mean over layers, and of their rows."""
    attention, hidden = _compressed(model), model.hidden_size
    output = attention.output_width * hidden
    width = (attention.num_weights(hidden, model.num_hidden_layers) - output) // hidden
    moved = hidden * (BF16 + FP8) + attention.query_width * 2 * BF16
    return product_s(tokens, width, hidden, gpu, sms_share=sms_share) + stream_s(tokens * moved, gpu)


class _Times(NamedTuple):
    """Functions of one attention kind."""

    prefill: Callable[[AttentionWork, ModelConfig, Accelerator, float], AttentionSeconds]
    decode: Callable[[AttentionWork, ModelConfig, Accelerator, int | None], AttentionSeconds]


_LATENT = _Times(_latent_prefill, _latent_decode)
_TIMES: dict[type[AttentionConfig], _Times] = {
    MlaConfig: _LATENT,
    DsaConfig: _LATENT,
    GqaConfig: _Times(_grouped_prefill, _grouped_decode),
    CompressedConfig: _Times(_compressed_prefill, _compressed_decode),
}
