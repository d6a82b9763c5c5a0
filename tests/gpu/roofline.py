"""The least time of each stage of a step on a card at its published limits, from the shapes alone.

    python tests/gpu/roofline.py [H100 | H200 | H800]      a table of the slice's units

An operation takes the larger of its operations ÷ the card's rate and its bytes ÷ the card's bandwidth; each operand is
read and each result written once. A stage is the sum of its operations, a step the sum of its stages. No step can be
quicker by fusing less than is fused here; one that fuses more can.
"""

# B requests or T tokens of a micro-batch, all layers of a kind together

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / "kernels")]

from batchinfer.model.config import ModelConfig  # noqa: E402
from batchinfer.model.mla_config import MlaConfig  # noqa: E402

_FP8, _BF16, _FP32 = 1, 2, 4  # bytes of a value
_ROW_FP8 = 1 + 4 / 128  # with a float32 scale per 128 values
_WEIGHT_FP8 = 1 + 4 / 128**2  # per 128 x 128


@dataclass(frozen=True)
class Card:
    """Published limits of one GPU model: TFLOP/s of dense products, GB/s of memory (NVIDIA's datasheets, SXM)."""

    fp8_tflops: float
    bf16_tflops: float
    memory_gb_s: float


CARDS = {"H100": Card(1979, 989, 3350), "H200": Card(1979, 989, 4800), "H800": Card(1979, 989, 3350)}


@dataclass(frozen=True)
class Operation:
    """Some of a stage's work."""

    fp8_flops: float = 0
    bf16_flops: float = 0
    num_bytes: float = 0

    def seconds(self, card: Card) -> float:
        """The least that it takes."""
        computing_s = self.fp8_flops / card.fp8_tflops / 1e12 + self.bf16_flops / card.bf16_tflops / 1e12
        return max(computing_s, self.num_bytes / card.memory_gb_s / 1e9)


Stages = dict[str, list[Operation]]


def card_of(name: str) -> Card | None:
    """The limits of a GPU by its driver's name for it ("NVIDIA H100 80GB HBM3")."""
    return next((card for model, card in CARDS.items() if model in name), None)


def floors_s(stages: Stages, name: str) -> dict[str, float]:
    """Least seconds of each stage on the card of this name; empty where its limits are not known."""
    card = card_of(name)
    if card is None:
        return {}
    return {stage: sum(operation.seconds(card) for operation in work) for stage, work in stages.items()}


def linear(num_rows: float, columns: int, depth: int, *, count: int = 1, fp8: bool = True) -> Operation:
    """Rows times `count` weights [columns, depth] (the rows shared out among them), rows and results in bfloat16."""
    flops = 2 * num_rows * columns * depth
    weight = count * columns * depth * (_WEIGHT_FP8 if fp8 else _BF16)
    num_bytes = weight + num_rows * (depth + columns) * _BF16
    return Operation(flops, 0, num_bytes) if fp8 else Operation(0, flops, num_bytes)


def mlp(num_rows: float, width: int, hidden: int, *, count: int = 1, row_bytes: float = _BF16) -> list[Operation]:
    """SwiGLU with FP8 weights; what is between its two products need not go through memory more than once each way."""
    weights = count * 3 * width * hidden * _WEIGHT_FP8
    between = num_rows * width * (2 * _BF16 + _ROW_FP8) * 2
    num_bytes = weights + between + num_rows * hidden * (row_bytes + _BF16)
    return [Operation(2 * num_rows * 3 * width * hidden, 0, num_bytes)]


def latent(config: ModelConfig) -> MlaConfig:
    """The model's latent attention."""
    assert isinstance(config.attention, MlaConfig)
    return config.attention


def _projections(config: ModelConfig, tokens: int) -> list[Operation]:
    """Norms, query and latent projections, positions, the write to the pages."""
    attention, hidden = latent(config), config.hidden_size
    q_rank, heads = attention.q_lora_rank or hidden, attention.num_attention_heads
    return [
        linear(tokens, q_rank, hidden),
        linear(tokens, attention.latent_dim, hidden),
        linear(tokens, heads * attention.qk_head_dim, q_rank),
    ]


def _output_and_gate(config: ModelConfig, tokens: int, *, is_moe: bool = True) -> list[Operation]:
    """Output projection and the router, whose weight is in three parts of bfloat16."""
    out = linear(tokens, config.hidden_size, config.attention.output_width)
    gate = linear(tokens, 3 * config.n_routed_experts, config.hidden_size, fp8=False)
    return [out, gate] if is_moe else [out]


def _decode_attention(config: ModelConfig, requests: int, kv_tokens: int) -> list[Operation]:
    """Absorbed queries, the latents of all requests once, value up-projection."""
    attention = latent(config)
    heads, rank, width = attention.num_attention_heads, attention.kv_lora_rank, attention.latent_dim
    rows, per_head = requests * heads, (width + rank)
    return [
        _per_head(config, requests, attention.qk_nope_head_dim),
        Operation(0, 2 * rows * kv_tokens * per_head, (requests * kv_tokens * width + rows * (width + rank)) * _BF16),
        _per_head(config, requests, attention.v_head_dim),
    ]


def _per_head(config: ModelConfig, tokens: int, width: int) -> Operation:
    """Return a product per head between `width` and the latent's width, each with its own weight in bfloat16."""
    heads, rank = config.attention.num_attention_heads, latent(config).kv_lora_rank
    return Operation(0, 2 * tokens * heads * width * rank, heads * (width * rank + tokens * (width + rank)) * _BF16)


def _prefill_attention(config: ModelConfig, prompts: int, prompt_tokens: int) -> list[Operation]:
    """Keys and values of all heads from the latents, then causal attention over them."""
    attention, tokens = latent(config), prompts * prompt_tokens
    heads, nope, value = attention.num_attention_heads, attention.qk_nope_head_dim, attention.v_head_dim
    up = linear(tokens, heads * (nope + value), attention.kv_lora_rank, fp8=False)
    pairs = prompts * prompt_tokens * (prompt_tokens + 1) / 2
    per_token = 2 * nope + 2 * value + attention.qk_rope_head_dim
    return [
        up,
        Operation(0, 2 * pairs * heads * (attention.qk_head_dim + value), tokens * heads * per_token * _BF16),
    ]


def _exchange(config: ModelConfig, tokens: int, *, is_masked: bool) -> tuple[list[Operation], list[Operation]]:
    """The local copies of dispatch (rounded once, copied per expert) and combine (copied if in blocks, then summed)."""
    rows, hidden = tokens * config.num_experts_per_tok, config.hidden_size
    dispatch = tokens * hidden * (_BF16 + _ROW_FP8) + 2 * rows * hidden * _ROW_FP8
    combine = (3 if is_masked else 1) * rows * hidden * _BF16 + tokens * hidden * _FP32
    return [Operation(num_bytes=dispatch)], [Operation(num_bytes=combine)]


def _of_moe_layers(config: ModelConfig, num_slots: int, tokens: int, *, is_masked: bool) -> Stages:
    """Return the stages that decode and prefill share in a layer with experts."""
    hidden, width = config.hidden_size, config.moe_intermediate_size
    dispatch, combine = _exchange(config, tokens, is_masked=is_masked)
    return {
        "SHARED": mlp(tokens, config.n_shared_experts * width, hidden),
        "DISPATCH": dispatch,
        "MLP": mlp(tokens * config.num_experts_per_tok, width, hidden, count=num_slots, row_bytes=_ROW_FP8),
        "COMBINE": combine,
    }


def _step(config: ModelConfig, layer: Stages, dense: list[Operation], num_moe_layers: int, num_logits: int) -> Stages:
    """All layers of a step."""
    num_dense = config.num_hidden_layers - config.num_moe_layers
    stages = {name: work * num_moe_layers for name, work in layer.items()}
    stages["DENSE"] = dense * num_dense
    stages["LOGITS"] = [linear(num_logits, config.vocab_size, config.hidden_size, fp8=False)]
    return stages


def decode_stages(config: ModelConfig, num_slots: int, requests: int, kv_tokens: int) -> Stages:
    """A micro-batch of decode: one token per request, each over its own `kv_tokens`."""
    projections, attention = _projections(config, requests), _decode_attention(config, requests, kv_tokens)
    layer = {
        "ATTN-0": projections,
        "ATTN-1": attention + _output_and_gate(config, requests),
        **_of_moe_layers(config, num_slots, requests, is_masked=True),
    }
    dense = projections + attention + _output_and_gate(config, requests, is_moe=False)
    dense += mlp(requests, config.intermediate_size, config.hidden_size)
    return _step(config, layer, dense, config.num_moe_layers, requests)


def prefill_stages(config: ModelConfig, num_slots: int, prompts: int, prompt_tokens: int) -> Stages:
    """A micro-batch of prefill: whole prompts without cached tokens; of the last layer only the projections."""
    tokens = prompts * prompt_tokens
    attention = _projections(config, tokens) + _prefill_attention(config, prompts, prompt_tokens)
    layer = {
        "ATTN": attention + _output_and_gate(config, tokens),
        **_of_moe_layers(config, num_slots, tokens, is_masked=False),
    }
    dense = attention + _output_and_gate(config, tokens, is_moe=False)
    dense += mlp(tokens, config.intermediate_size, config.hidden_size)
    return _step(config, layer, dense, config.num_moe_layers - 1, prompts)


def _table(name: str) -> str:
    """Every batch size of the slice, a micro-batch of half, on one card."""
    from share import DECODE, DEEPSEEK_V3, PREFILL, config_of

    config = config_of(DEEPSEEK_V3)
    units = {
        f"decode, {requests} requests": decode_stages(config, DECODE.num_slots, requests // 2, 4989)
        for requests in (64, 128, 192, 256)
    }
    units["prefill, 16,384 tokens"] = prefill_stages(config, PREFILL.num_slots, 2, 4096)
    lines = [f"{name}: {CARDS[name]}", "least ms of a micro-batch of half the tokens"]
    for title, stages in units.items():
        seconds = floors_s(stages, name)
        parts = ", ".join(f"{stage} {1e3 * one:.2f}" for stage, one in seconds.items())
        lines.append(f"  {title}: {1e3 * sum(seconds.values()):.2f} ({parts})")
        for stage, work in stages.items():
            flops = sum(operation.fp8_flops + operation.bf16_flops for operation in work)
            num_bytes = sum(operation.num_bytes for operation in work)
            lines.append(f"    {stage:<9} {flops / 1e12:9.3f} TFLOP {num_bytes / 1e9:9.2f} GB")
    return "\n".join(lines)


if __name__ == "__main__":
    names = sys.argv[1:] or ["H100", "H200"]
    if unknown := set(names) - set(CARDS):
        sys.exit(f"no limits are known of {', '.join(sorted(unknown))}; known are {', '.join(CARDS)}")
    print("\n".join(map(_table, names)))
