"""The operations of one layer, assigned to the stages of the schedules.

Every stage also has the bytes that its small kernels move (norms, rotary part, FP8 conversion, activation, unpacking
and adding up expert rows): each value is read and written as often as the operation needs if it is not fused with a
product.
"""

from dataclasses import dataclass

from batchinfer.model.config import ModelConfig
from batchinfer.sim.attention import BF16, FP8, AttentionWork, decode_attention, prefill_attention
from batchinfer.sim.exchange import ExchangeTimes
from batchinfer.sim.hardware import Accelerator
from batchinfer.sim.kernels import bf16_product_s, grouped_product_s, product_s, stream_s
from batchinfer.sim.overlap import Stages

FP32 = 4
# small kernels of a layer: rounding of the attended values, residual and norm, rounding, gate scores, choice of experts
OUTPUT_KERNELS = 5
MLP_KERNELS = 2  # activation, rounding
COMPUTE_BOUND_ROWS = 256  # rows of an expert from which its products are bound by arithmetic


@dataclass(frozen=True, slots=True)
class LayerWork(AttentionWork):
    """The work of one GPU in one micro-batch."""

    expert_rows: float  # routed rows that this GPU receives
    experts: int  # slots on this GPU


def prefill_stages(
    work: LayerWork, model: ModelConfig, gpu: Accelerator, exchange: ExchangeTimes, *, sms_share: float, is_moe: bool
) -> Stages:
    """Return the seconds of a prefill micro-batch's stages."""
    attention, tokens = prefill_attention(work, model, gpu, sms_share), work.tokens
    return Stages(
        attn_0=attention.before,
        attn_1=attention.core + _output_and_gate_s(tokens, model, gpu, sms_share, is_moe),
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
    """Return the seconds of the stages of a decode micro-batch.

    Args:
        row_bytes: of a KV token; None: of values in BF16.
    """
    attention, tokens = decode_attention(work, model, gpu, row_bytes), work.tokens
    return Stages(
        attn_0=attention.before,
        attn_1=attention.core + _output_and_gate_s(tokens, model, gpu, 1.0, is_moe),
        shared=_shared_s(tokens, model, gpu, 1.0) if is_moe else 0.0,
        mlp=_routed_s(work, model, gpu, 1.0, masked=True)
        if is_moe
        else _mlp_s(tokens, model.intermediate_size, model, gpu, 1.0),
        exchange=exchange,
    )


def _output_and_gate_s(tokens: float, model: ModelConfig, gpu: Accelerator, sms_share: float, is_moe: bool) -> float:
    """Return the seconds of output projection, residual, norm, and the router with its scores in float32."""
    hidden, values = model.hidden_size, model.attention.output_width
    seconds = product_s(tokens, hidden, values, gpu, sms_share=sms_share, has_fp4=True)
    moved = values * (BF16 + FP8) + hidden * (3 * BF16 + BF16 + FP8)
    if is_moe:
        seconds += bf16_product_s(tokens, model.n_routed_experts, hidden, gpu, sms_share=sms_share)
        moved += model.n_routed_experts * 2 * FP32
    return seconds + stream_s(tokens * moved, gpu, kernels=OUTPUT_KERNELS)


def _shared_s(tokens: float, model: ModelConfig, gpu: Accelerator, sms_share: float) -> float:
    return _mlp_s(tokens, model.n_shared_experts * model.moe_intermediate_size, model, gpu, sms_share)


def _mlp_s(tokens: float, width: int, model: ModelConfig, gpu: Accelerator, sms_share: float) -> float:
    hidden = model.hidden_size
    if width == 0:
        return 0.0
    up = product_s(tokens, 2 * width, hidden, gpu, sms_share=sms_share, has_fp4=True)
    down = product_s(tokens, hidden, width, gpu, sms_share=sms_share, has_fp4=True)
    return up + down + stream_s(tokens * width * (2 * BF16 + FP8), gpu, kernels=MLP_KERNELS)


def _routed_s(work: LayerWork, model: ModelConfig, gpu: Accelerator, sms_share: float, *, masked: bool) -> float:
    """Return the seconds of this GPU's routed experts; prefill also unpacks received rows and adds up returned ones."""
    if work.experts == 0:
        return 0.0
    hidden, width, rows = model.hidden_size, model.moe_intermediate_size, work.expert_rows
    per_expert = rows / work.experts
    if gpu.rates is not None and per_expert:
        shape = {"experts": model.n_routed_experts, "topk": model.num_experts_per_tok}
        seconds = gpu.rates.experts_s(per_expert, work.experts, hidden, width, masked=masked, **shape)
        if seconds is not None:
            return seconds / sms_share if per_expert > COMPUTE_BOUND_ROWS else seconds
    up = grouped_product_s(per_expert, work.experts, 2 * width, hidden, gpu, masked=masked, sms_share=sms_share)
    down = grouped_product_s(per_expert, work.experts, hidden, width, gpu, masked=masked, sms_share=sms_share)
    moved = rows * width * (2 * BF16 + FP8)
    if not masked:
        moved += rows * hidden * 2 * FP8 + rows * hidden * BF16
    return up + down + stream_s(moved, gpu)
