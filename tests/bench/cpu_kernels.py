"""The C++ operations against torch's own on the same inputs, and against what this machine can do; decides no test.

bfloat16, shapes of a model with hidden size 1024, 64 experts of width 512, 16 heads and a latent of 256 + 32. Each row
takes turns between the C++ operation and torch's (or the reference, where torch has no such operation) and prints the
best of several short rounds. The limits come from the same run: a square bfloat16 product, and reading memory. Where
other programs use the cores too, `--threads 1` is the only fair picture: with more, both wait for threads to get one.

    python tests/bench/cpu_kernels.py [--rounds 15] [--threads 1] [--only linear]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from batchinfer_kernels import reference
from batchinfer_kernels.cpu import build, ops
from batchinfer_kernels.reference import mla as reference_mla
from batchinfer_kernels.reference.mla import PagedKeys

ROUND_S = 0.01
HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOPK = 1024, 512, 64, 6
NUM_HEADS, LATENT, ROTARY, CONTEXT = 16, 256, 32, 490
NUM_COPIES_BYTES = 96 << 20  # weights in turn from more memory than any cache holds


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison: both functions take the index of the copy of the weights to use."""

    name: str
    ours: Callable[[int], torch.Tensor]
    theirs: Callable[[int], torch.Tensor]
    flop: float
    num_bytes: float  # read and written at least
    num_copies: int = 1


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def linear_cases() -> Iterator[Case]:
    for name, num_out, num_in in [("q", 1536, 1024), ("expert gate/up", 1024, 1024), ("expert down", 1024, 512)]:
        for num_rows in (1, 4, 16, 64, 512, 2048):
            yield linear_case(name, num_rows, num_out, num_in)
    for num_rows in (1, 8, 64):
        yield linear_case("lm_head", num_rows, 32000, 1024)


def linear_case(name: str, num_rows: int, num_out: int, num_in: int) -> Case:
    num_copies = max(1, NUM_COPIES_BYTES // (2 * num_out * num_in)) if num_rows <= 64 else 1
    x, weights = random(num_rows, num_in), random(num_copies, num_out, num_in)
    packed = [ops.pack(weight) for weight in weights]
    return Case(
        f"linear {name} {num_rows} x {num_in} -> {num_out}",
        lambda copy: ops.linear(x, packed[copy]),
        lambda copy: F.linear(x, weights[copy]),
        2.0 * num_rows * num_in * num_out,
        2.0 * (num_in * num_out + num_rows * (num_in + num_out)),
        num_copies,
    )


def expert_cases() -> Iterator[Case]:
    gate_up, down = random(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN), random(NUM_EXPERTS, HIDDEN, INTERMEDIATE)
    packed = ops.pack(gate_up, is_paired=True), ops.pack(down)
    for num_tokens in (1, 8, 64, 512, 2048):
        experts = torch.stack([torch.randperm(NUM_EXPERTS)[:TOPK] for _ in range(num_tokens)])
        num_rows = torch.bincount(experts.flatten(), minlength=NUM_EXPERTS)
        x = random(num_tokens * TOPK, HIDDEN)
        weights = int((num_rows > 0).sum()) * 3 * HIDDEN * INTERMEDIATE
        yield Case(
            f"grouped_mlp {num_tokens} tokens x {TOPK} of {NUM_EXPERTS} experts",
            lambda copy, x=x, num_rows=num_rows: ops.grouped_mlp(x, num_rows, *packed),
            lambda copy, x=x, num_rows=num_rows: torch_experts(x, num_rows, gate_up, down),
            6.0 * len(x) * HIDDEN * INTERMEDIATE,
            2.0 * (weights + 2 * x.numel()),
        )


def torch_experts(x: torch.Tensor, num_rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    start = 0
    for expert, count in enumerate(num_rows.tolist()):
        if count:
            gate, up = F.linear(x[start : start + count], gate_up[expert]).chunk(2, dim=-1)
            out[start : start + count] = F.linear(F.silu(gate) * up, down[expert])
            start += count
    return out


def attention_cases() -> Iterator[Case]:
    width, num_pages = LATENT + ROTARY, -(-CONTEXT // 64)
    for num_requests in (1, 8, 64):
        pages = random(num_requests * num_pages, 64, width)
        table = torch.randperm(len(pages)).view(num_requests, num_pages)
        kv_tokens = torch.full((num_requests,), CONTEXT)
        q = random(num_requests, NUM_HEADS, width)
        arguments = (q, PagedKeys(pages, table, kv_tokens, kv_tokens - 1))
        yield Case(
            f"mla_decode {num_requests} x {CONTEXT} tokens, {NUM_HEADS} heads (torch: sdpa on gathered keys)",
            lambda copy, a=arguments: ops.mla_decode(*a, latent_dim=LATENT, scale=0.06),
            lambda copy, a=arguments: torch_attention(*a),
            2.0 * num_requests * CONTEXT * NUM_HEADS * (width + LATENT),
            2.0 * num_requests * CONTEXT * width,
        )
        yield Case(
            f"mla_decode {num_requests} x {CONTEXT} tokens, {NUM_HEADS} heads (torch: the reference)",
            lambda copy, a=arguments: ops.mla_decode(*a, latent_dim=LATENT, scale=0.06),
            lambda copy, a=arguments: reference_mla.mla_decode(*a, latent_dim=LATENT, scale=0.06),
            2.0 * num_requests * CONTEXT * NUM_HEADS * (width + LATENT),
            2.0 * num_requests * CONTEXT * width,
        )


def prefill_cases() -> Iterator[Case]:
    nope, value = 64, 64
    kv_b = random(NUM_HEADS, nope + value, LATENT)
    for num_tokens, context in ((490, 490), (64, 554), (2048, 2048)):
        num_pages = -(-context // 64)
        q, pages = random(num_tokens, NUM_HEADS, nope + ROTARY), random(num_pages, 64, LATENT + ROTARY)
        page_ids, positions = torch.arange(num_pages), torch.arange(context - num_tokens, context)
        keys, counts = PagedKeys(pages, page_ids[None], torch.tensor([context]), positions), torch.tensor([num_tokens])
        options = {"v_dim": value, "scale": 0.1}
        ours, plain = (q, keys, ops.pack(kv_b), counts), (q, keys, kv_b, counts)
        arguments = (q, pages, page_ids, positions, kv_b)
        seen = num_tokens * (context - num_tokens) + num_tokens * (num_tokens + 1) / 2
        products = seen * (nope + ROTARY + value) + context * LATENT * (nope + value)
        yield Case(
            f"mla_prefill {num_tokens} of {context} tokens, {NUM_HEADS} heads (torch: sdpa)",
            lambda copy, a=ours, o=options: ops.mla_prefill(*a, **o),
            lambda copy, a=arguments: torch_prefill(*a),
            2.0 * NUM_HEADS * products,
            2.0 * (pages.numel() + q.numel()),
        )
        yield Case(
            f"mla_prefill {num_tokens} of {context} tokens, {NUM_HEADS} heads (torch: the reference)",
            lambda copy, a=ours, o=options: ops.mla_prefill(*a, **o),
            lambda copy, a=plain, o=options: reference_mla.mla_prefill(*a, **o),
            2.0 * NUM_HEADS * products,
            2.0 * (pages.numel() + q.numel()),
        )


def torch_prefill(
    q: torch.Tensor, pages: torch.Tensor, page_ids: torch.Tensor, positions: torch.Tensor, kv_b: torch.Tensor
) -> torch.Tensor:
    context = int(positions[-1]) + 1
    latents = pages[page_ids].flatten(0, 1)[:context]
    kv = F.linear(latents[:, :LATENT], kv_b.flatten(0, 1)).unflatten(-1, (NUM_HEADS, -1))
    rotary = latents[:, None, LATENT:].expand(-1, NUM_HEADS, -1)
    keys = torch.cat([kv[..., : q.shape[-1] - ROTARY], rotary], -1).transpose(0, 1)
    values = kv[..., q.shape[-1] - ROTARY :].transpose(0, 1)
    mask = torch.arange(context) <= positions[:, None]
    return F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=mask, scale=0.1).transpose(0, 1)


def torch_attention(q: torch.Tensor, paged: PagedKeys) -> torch.Tensor:
    keys = paged.pages[paged.page_table_BP].flatten(1, 2)[:, None, : int(paged.kv_tokens_B[0])]
    return F.scaled_dot_product_attention(q[:, None], keys, keys[..., :LATENT].contiguous(), scale=0.06)[:, 0]


def batched_cases() -> Iterator[Case]:
    key_up, value_up = random(NUM_HEADS, 64, LATENT), random(NUM_HEADS, 64, LATENT).transpose(1, 2)
    for num_rows in (1, 64):
        for name, width, y in (("q · key_up", 64, key_up), ("out · value_up", LATENT, value_up)):
            x = random(num_rows, NUM_HEADS, width).transpose(0, 1)
            packed = ops.pack(y.mT)
            yield Case(
                f"batched_linear {num_rows} rows, {name} (torch: bmm)",
                lambda copy, x=x, packed=packed: ops.batched_linear(x, packed),
                lambda copy, x=x, y=y: torch.bmm(x, y),
                2.0 * num_rows * y.numel(),
                2.0 * (y.numel() + x.numel() + num_rows * NUM_HEADS * y.shape[-1]),
            )


def row_cases() -> Iterator[Case]:
    weight = random(HIDDEN)
    for num_rows in (1, 64, 2048):
        x, gate_up = random(num_rows, HIDDEN), random(num_rows, 2 * INTERMEDIATE)
        gate, up = gate_up.chunk(2, dim=-1)
        yield Case(
            f"rms_norm {num_rows} x {HIDDEN} (torch: the reference)",
            lambda copy, x=x: ops.rms_norm(x, weight, 1e-6),
            lambda copy, x=x: reference.rms_norm(x, weight, 1e-6),
            4.0 * x.numel(),
            4.0 * x.numel(),
        )
        yield Case(
            f"silu_mul {num_rows} x {INTERMEDIATE} (torch: silu, then times)",
            lambda copy, gate=gate, up=up: ops.silu_mul(gate, up),
            lambda copy, gate=gate, up=up: F.silu(gate) * up,
            10.0 * gate.numel(),
            6.0 * gate.numel(),
        )


def side_by_side(case: Case, rounds: int) -> tuple[float, float]:
    """Best seconds per call of both functions, taken in turn."""
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(rounds + 1):
        for name, function in (("ours", case.ours), ("theirs", case.theirs)):
            seconds[name].append(seconds_per_call(function, case.num_copies))
    return min(seconds["ours"][1:]), min(seconds["theirs"][1:])


def seconds_per_call(function: Callable[[int], torch.Tensor], num_copies: int) -> float:
    started, num_calls = time.perf_counter(), 0
    while time.perf_counter() - started < ROUND_S:
        function(num_calls % num_copies)
        num_calls += 1
    return (time.perf_counter() - started) / num_calls


def limits(rounds: int) -> tuple[float, float]:
    """FLOP/s of a square bfloat16 product and bytes per second of reading memory, best of several."""
    square, block = random(1024, 1024), torch.zeros(64 << 20)
    product = min(seconds_per_call(lambda copy: torch.mm(square, square), 1) for _ in range(rounds))
    read = min(seconds_per_call(lambda copy: block.sum(), 1) for _ in range(rounds))
    return 2 * 1024**3 / product, 4 * block.numel() / read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    if reason := build.why_not():
        raise SystemExit(f"the C++ operations cannot run here: {reason}.")
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    flop_limit, byte_limit = limits(options.rounds)
    print(f"{torch.get_num_threads()} threads; limits {flop_limit / 1e9:.0f} GFLOP/s, {byte_limit / 1e9:.1f} GB/s")
    print(f"{'GFLOP/s':>8} {'GB/s':>6} {'of limit':>9} {'x torch':>8}  case")
    for cases in (linear_cases, expert_cases, attention_cases, prefill_cases, batched_cases, row_cases):
        for case in cases():
            if options.only not in case.name:
                continue
            ours, theirs = side_by_side(case, options.rounds)
            # the time that computing or reading takes at the very least
            floor = max(case.flop / flop_limit, case.num_bytes / byte_limit)
            rates = f"{case.flop / ours / 1e9:8.0f} {case.num_bytes / ours / 1e9:6.1f}"
            print(f"{rates} {floor / ours:9.0%} {theirs / ours:8.2f}  {case.name}", flush=True)


if __name__ == "__main__":
    main()
