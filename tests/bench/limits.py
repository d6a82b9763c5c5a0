"""Lower bounds for a workload of the bench models: floating-point operations, bytes of weights, and rates.

A limit counts what cannot be spared: each distinct prefix once, attention in the plain form, and in decode all
requests together from the first token on, each step reading the weights it multiplies with. It leaves out KV, norms and
everything between the products.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from bench_models import SIZES
from peer_server import Requests


@dataclass(frozen=True)
class Work:
    """The work of a workload: operations of prefill and decode (FLOP), weights that decode reads (bytes)."""

    prefill_flop: float
    decode_flop: float
    decode_bytes: float

    def products_s(self, flops: float) -> float:
        """Seconds of all products at this rate (FLOP/s)."""
        return (self.prefill_flop + self.decode_flop) / flops

    def limit_s(self, flops: float, bytes_per_s: float) -> float:
        """Seconds of prefill's products and of decode's, or of reading decode's weights where that takes longer."""
        return self.prefill_flop / flops + max(self.decode_flop / flops, self.decode_bytes / bytes_per_s)


def gemm_flops(size: int = 2048, rounds: int = 7) -> float:
    """FLOP/s of a large product by turns in bfloat16 and float32: the larger one of their medians.

    A type that is ten times slower in a small product is left out: torch multiplies bfloat16 value by value where the
    processor has no instructions for it, and takes minutes for a large product.
    """
    small = {dtype: min(_product_times(dtype, 256, 9)) for dtype in (torch.bfloat16, torch.float32)}
    dtypes = [dtype for dtype, seconds in small.items() if seconds < 10 * min(small.values())]
    turns = [[_product_times(dtype, size, 1)[0] for dtype in dtypes] for _ in range(rounds)]
    return 2 * size**3 / min(map(statistics.median, zip(*turns, strict=True)))


def _product_times(dtype: torch.dtype, size: int, rounds: int) -> list[float]:
    left, right = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        torch.mm(left, right)
        times.append(time.perf_counter() - started)
    return times


def read_bytes_per_s(num_bytes: int = 1 << 29, rounds: int = 7) -> float:
    """Memory read rate of one large sum, median."""
    values = torch.ones(num_bytes // 4)
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        values.sum()
        times.append(time.perf_counter() - started)
    return num_bytes / statistics.median(times)


def body_flops(size: str) -> tuple[float, float, float]:
    """(FLOP per token of all layers without attention scores, of the output head, per token and token attended to)."""
    c = SIZES[size]
    hidden, heads, layers = c["hidden_size"], c["num_attention_heads"], c["num_hidden_layers"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    attention = hidden * c["q_lora_rank"] + c["q_lora_rank"] * heads * (nope + rope)
    attention += (
        hidden * (c["kv_lora_rank"] + rope) + c["kv_lora_rank"] * heads * (nope + value) + heads * value * hidden
    )
    experts = 3 * hidden * c["moe_intermediate_size"] * (c["num_experts_per_tok"] + 1) + hidden * c["n_routed_experts"]
    dense = 3 * hidden * c["intermediate_size"]
    body = 2.0 * (layers * attention + (layers - 1) * experts + dense)
    return body, 2.0 * hidden * c["vocab_size"], 2.0 * layers * heads * (nope + rope + value)


def last_layer_flops(size: str) -> float:
    """Return the FLOP of the last layer that a prompt token without logits is spared: all but its latents."""
    c = SIZES[size]
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    attention = hidden * c["q_lora_rank"] + c["q_lora_rank"] * heads * (nope + rope)
    attention += c["kv_lora_rank"] * heads * (nope + value) + heads * value * hidden
    experts = 3 * hidden * c["moe_intermediate_size"] * (c["num_experts_per_tok"] + 1) + hidden * c["n_routed_experts"]
    return 2.0 * (attention + experts)


def weight_bytes(size: str, bytes_per_value: int, num_rows: int | None = None) -> float:
    """Return the bytes of weights that a step reads, without the embedding.

    Args:
        num_rows: rows of the step, whose experts are chosen evenly; None: so many that all weights are read.
    """
    c = SIZES[size]
    body, head, _ = body_flops(size)
    chosen, num_experts = c["num_experts_per_tok"], c["n_routed_experts"]
    routed = 6.0 * (c["num_hidden_layers"] - 1) * c["hidden_size"] * c["moe_intermediate_size"]
    busy = num_experts if num_rows is None else num_experts * (1 - (1 - chosen / num_experts) ** num_rows)
    return (body - routed * chosen + routed * busy) / 2 * bytes_per_value + head / 2 * 2


def work_of(size: str, requests: Requests, bytes_per_value: int = 2) -> Work:
    """Return the least work of a workload.

    Args:
        bytes_per_value: of weights; the head has two.
    """
    body, head, per_pair = body_flops(size)
    layers, spared = SIZES[size]["num_hidden_layers"], last_layer_flops(size)
    prefill, decode, before = 0.0, 0.0, []
    for prompt, num_output in sorted(requests):
        shared = next((i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), 0)
        new, length = len(prompt) - shared, len(prompt)
        prefill += new * body + head - (new - 1) * spared
        seen = new * (shared + (new + 1) / 2) * (layers - 1) / layers  # in the last layer only one query looks at keys
        prefill += per_pair * (seen + length / layers)
        decode += (num_output - 1) * (body + head + per_pair * (length + num_output / 2))
        before = prompt
    outputs = [num_output for _, num_output in requests]
    running = [sum(count > step for count in outputs) for step in range(1, max(outputs))]
    return Work(prefill, decode, sum(weight_bytes(size, bytes_per_value, rows) for rows in running))
