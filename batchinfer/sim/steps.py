"""Seconds of one prefill step and of one decode step of a unit; of a prefill batch with disk and network, too."""

from dataclasses import dataclass, replace
from functools import lru_cache

from batchinfer.model.config import ModelConfig
from batchinfer.model.page_format import BFLOAT16, PageFormat
from batchinfer.records import ConfigError
from batchinfer.sim.attention import BF16
from batchinfer.sim.dealing import Skews
from batchinfer.sim.exchange import LATEST, ExchangeTimes, Release, decode_exchange, gather_s, prefill_exchange
from batchinfer.sim.hardware import Accelerator
from batchinfer.sim.kernels import bf16_product_s, stream_s
from batchinfer.sim.layers import LayerWork, decode_stages, prefill_stages
from batchinfer.sim.overlap import Stages, decode_layer_s, prefill_layer_s

# DeepSeek's published profile (github.com/deepseek-ai/profile-data): prefill leaves 24 of 132 SMs to communication,
# decode none
COMMUNICATION_SMS_SHARE = 24 / 132


@dataclass(frozen=True, slots=True)
class Unit:
    """GPUs that share the experts of one model copy."""

    ep_size: int
    redundant_experts: int = 0
    skew: float = 1.0  # expert rows of the busiest GPU by the mean
    overlap: bool = True
    release: Release = LATEST  # of the exchange
    pages: PageFormat = BFLOAT16
    # prefill: each layer's experts are copied to all GPUs, and no row travels
    gathered: bool = False

    def micro_batches(self, model: ModelConfig) -> int:
        """Return the parts of a step that run side by side: two only if rows travel."""
        return 2 if self.overlap and self.ep_size > 1 and model.num_moe_layers and not self.gathered else 1

    def slots_per_gpu(self, model: ModelConfig) -> int:
        """Return the expert slots of each GPU.

        Raises:
            ConfigError: the slots of experts and redundant experts do not divide by the GPUs.
        """
        num_slots = model.n_routed_experts + self.redundant_experts
        if num_slots % self.ep_size:
            fitting = -model.n_routed_experts % self.ep_size
            raise ConfigError(
                f"redundant_experts is {self.redundant_experts}: {num_slots} slots do not divide by EP size "
                f"{self.ep_size}; use {fitting}"
            )
        return num_slots // self.ep_size


@dataclass(frozen=True, slots=True)
class Step:
    """The times of a step of one unit."""

    seconds: float
    by_stage: dict[str, float]  # busy seconds of one GPU by stage, overlapped ones too
    exposed_s: float  # in which nothing computes
    bottleneck: str  # the stage that takes longest, or the exchange when computing waits for it


@dataclass(frozen=True, slots=True)
class Batch:
    """Sums over the prompts of a prefill step."""

    prompts: float
    prompt_tokens: float
    new_tokens: float
    attention_pairs: float
    expanded_tokens: float  # whose keys and values are expanded, see `Workload.expanded_tokens`


@lru_cache(maxsize=100_000)
def prefill_step(
    new_tokens: float,
    kv_pairs: float,
    kv_tokens: float,
    prompts: float,
    model: ModelConfig,
    gpu: Accelerator,
    unit: Unit,
) -> Step:
    """Return the times of a prefill step with the same work on each GPU.

    Args:
        new_tokens: tokens that one GPU computes.
        kv_pairs: (query, key) pairs of one GPU, see `balance.prefill.attention_work`.
        kv_tokens: new and cached tokens of one GPU.
        prompts: number of prompts whose last token needs logits.
    """
    if unit.gathered and model.num_moe_layers:
        return _gathered_step(new_tokens, kv_pairs, kv_tokens, prompts, model, gpu, unit)
    halves = unit.micro_batches(model)
    sms_share = 1.0 - (COMMUNICATION_SMS_SHARE if unit.ep_size > 1 else 0.0)
    tokens = new_tokens / halves
    slots = unit.slots_per_gpu(model)
    work = LayerWork(tokens, kv_pairs / halves, kv_tokens / halves, _rows(tokens, model, unit), slots)
    exchange = prefill_exchange(tokens, model, unit.ep_size, gpu, receive_skew=unit.skew, release=unit.release)
    dense = prefill_stages(work, model, gpu, exchange, sms_share=1.0, is_moe=False)
    moe = dense
    if model.num_moe_layers:
        moe = prefill_stages(work, model, gpu, exchange, sms_share=sms_share, is_moe=True)
    moe_s = prefill_layer_s(moe) if halves == 2 else moe.plain_s
    return _step(model, moe, dense, moe_s, halves, _head_s(prompts, model, gpu))


def _gathered_step(
    new_tokens: float,
    kv_pairs: float,
    kv_tokens: float,
    prompts: float,
    model: ModelConfig,
    gpu: Accelerator,
    unit: Unit,
) -> Step:
    """Return the times of a prefill step whose GPUs compute all experts of their own tokens.

    The next layer's experts come while a layer computes. Copies are made by the GPUs' copy engines and network cards,
    which take memory bandwidth (a share is read for others, a copy written) and no SMs.
    """
    experts = layer_expert_bytes(model)
    moved_s = stream_s(2 * experts, gpu)
    gathering_s = gather_s(experts, unit.ep_size, gpu, release=unit.release)
    work = LayerWork(new_tokens, kv_pairs, kv_tokens, new_tokens * model.num_experts_per_tok, model.n_routed_experts)
    alone = ExchangeTimes(0.0, 0.0)
    dense, moe = (prefill_stages(work, model, gpu, alone, sms_share=1.0, is_moe=is_moe) for is_moe in (False, True))
    moe_s = max(moe.compute_s + moved_s, gathering_s)
    step = _step(model, moe, dense, moe_s, 1, _head_s(prompts, model, gpu))
    by_stage = step.by_stage | {"gathering experts": model.num_moe_layers * gathering_s}
    bottleneck = "gathering experts" if gathering_s > moe.compute_s + moved_s else step.bottleneck
    return replace(step, by_stage=by_stage, bottleneck=bottleneck)


def layer_expert_bytes(model: ModelConfig) -> int:
    """Return the bytes of a layer's routed experts in FP8."""
    return 3 * model.hidden_size * model.moe_intermediate_size * model.n_routed_experts


@lru_cache(maxsize=100_000)
def decode_step(requests: float, kv_tokens: float, model: ModelConfig, gpu: Accelerator, unit: Unit) -> Step:
    """Return the times of a decode step that gives each request one token.

    Args:
        requests: of one GPU.
        kv_tokens: KV tokens of one GPU, over all its requests.
    """
    halves = unit.micro_batches(model)
    tokens = requests / halves
    work = LayerWork(tokens, kv_tokens / halves, 0.0, _rows(tokens, model, unit), unit.slots_per_gpu(model))
    exchange = decode_exchange(tokens, model, unit.ep_size, gpu, receive_skew=unit.skew, release=unit.release)
    row_bytes = unit.pages.row_width(model) if unit.pages.is_fp8 else None
    dense = decode_stages(work, model, gpu, exchange, is_moe=False, row_bytes=row_bytes)
    moe = dense
    if model.num_moe_layers:
        moe = decode_stages(work, model, gpu, exchange, is_moe=True, row_bytes=row_bytes)
    moe_s = decode_layer_s(moe) if halves == 2 else moe.plain_s
    return _step(model, moe, dense, moe_s, halves, _head_s(requests, model, gpu))


def prefill_batch(
    batch: Batch, skews: Skews, model: ModelConfig, gpu: Accelerator, unit: Unit, disk_bytes_per_s: float
) -> tuple[float, str, Step]:
    """Return the seconds of a batch, its bottleneck, and the step of the busiest GPU.

    All GPUs of a unit meet in every exchange, so that the GPU with most attention delays the others even if another one
    has most tokens.

    Args:
        disk_bytes_per_s: of a node, for KV that is in the cache.
    """
    share = skews.new_tokens / unit.ep_size
    step = prefill_step(
        batch.new_tokens * share,
        batch.attention_pairs * skews.attention / unit.ep_size,
        batch.expanded_tokens * share * skews.expanded,
        batch.prompts * share,
        model,
        gpu,
        unit,
    )
    kv_bytes, hits = unit.pages.bytes_per_token(model), batch.prompt_tokens - batch.new_tokens
    read, sent = (model.attention.state_bytes(BF16, stored=stored) for stored in (True, False))  # of each prompt
    num_nodes = unit.ep_size / gpu.gpus_per_node
    limits = {
        step.bottleneck: step.seconds,
        "disk": (hits * kv_bytes + (batch.prompts * read if hits else 0.0)) / (disk_bytes_per_s * num_nodes),
        "KV to decode": (batch.prompt_tokens * kv_bytes + batch.prompts * sent)
        / (gpu.network_bytes_per_s * unit.ep_size),
    }
    limit = max(limits, key=limits.__getitem__)
    return limits[limit], limit, step


def _rows(tokens: float, model: ModelConfig, unit: Unit) -> float:
    return tokens * model.num_experts_per_tok * unit.skew


def _head_s(rows: float, model: ModelConfig, gpu: Accelerator) -> float:
    return bf16_product_s(rows, model.vocab_size, model.hidden_size, gpu)


def _step(model: ModelConfig, moe: Stages, dense: Stages, moe_s: float, halves: int, head_s: float) -> Step:
    num_moe = model.num_moe_layers
    num_dense = model.num_hidden_layers - num_moe
    by_stage = {
        "attention projections": halves * (num_moe * moe.attn_0 + num_dense * dense.attn_0),
        "core attention and output": halves * (num_moe * moe.attn_1 + num_dense * dense.attn_1),
        "shared expert": halves * num_moe * moe.shared,
        "routed experts": halves * num_moe * moe.mlp,
        "dense layers": halves * num_dense * dense.mlp,
        "output head": head_s,
        "dispatch": halves * num_moe * moe.exchange.dispatch_s,
        "combine": halves * num_moe * moe.exchange.combine_s,
    }
    seconds = num_moe * moe_s + halves * num_dense * dense.compute_s + head_s
    computing = sum(by_stage.values()) - by_stage["dispatch"] - by_stage["combine"]
    if by_stage["dispatch"] + by_stage["combine"] > computing:
        bottleneck = "exchange"
    else:
        bottleneck = max((name for name in by_stage if name not in ("dispatch", "combine")), key=by_stage.__getitem__)
    return Step(seconds, by_stage, max(0.0, seconds - computing), bottleneck)
