"""The engine on one machine: seconds and tokens/s of whole workloads beside what the machine can do.

Random-weight models (bench_models.py) in bfloat16, one rank with all threads. A workload's time runs from the start of
its first step to the end of its last; loading does not count. Below it stands the time that its matrix products and
attention would take at the rate at which this machine multiplies large matrices in bfloat16, or in float32 where
that is quicker (Intel's processors without AMX), measured in the same run.

    python tests/bench/engine.py [--sizes tiny small] [--rounds 3] [--dtype bfloat16 | fp8]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow as pa
import torch

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from bench_models import SIZES, make_model, workload  # noqa: E402

from support.jobs import Ended, batchinfer, write_job, write_shard  # noqa: E402


def gemm_flops(size: int = 2048, rounds: int = 7) -> float:
    """FLOP/s of a large product by turns in bfloat16 and float32: the larger one of their medians."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    operands = {dtype: (left.to(dtype), right.to(dtype)) for dtype in (torch.bfloat16, torch.float32)}
    times: dict[torch.dtype, list[float]] = {dtype: [] for dtype in operands}
    for _ in range(rounds):
        for dtype, matrices in operands.items():
            started = time.perf_counter()
            torch.mm(*matrices)
            times[dtype].append(time.perf_counter() - started)
    return 2 * size**3 / min(map(statistics.median, times.values()))


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
    """FLOP of the last layer that a prompt token is spared when nobody wants its logits: all but its latents."""
    c = SIZES[size]
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    attention = hidden * c["q_lora_rank"] + c["q_lora_rank"] * heads * (nope + rope)
    attention += c["kv_lora_rank"] * heads * (nope + value) + heads * value * hidden
    experts = 3 * hidden * c["moe_intermediate_size"] * (c["num_experts_per_tok"] + 1) + hidden * c["n_routed_experts"]
    return 2.0 * (attention + experts)


def ideal_flops(size: str, requests: list[tuple[list[int], int]]) -> float:
    """What a workload needs at least, each distinct prefix computed once, attention in the plain form."""
    body, head, per_pair = body_flops(size)
    layers, spared = SIZES[size]["num_hidden_layers"], last_layer_flops(size)
    total, before = 0.0, []
    for prompt, num_output in sorted(requests):
        shared = next((i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), 0)
        new, length = len(prompt) - shared, len(prompt)
        total += (new + num_output - 1) * body + num_output * head - (new - 1) * spared
        seen = new * (shared + (new + 1) / 2) * (layers - 1) / layers  # in the last layer only one query looks at keys
        total += per_pair * (seen + length / layers + (num_output - 1) * (length + num_output / 2))
        before = prompt
    return total


def run_once(
    folder: Path,
    model: Path,
    requests: list[tuple[list[int], int]],
    command: Callable[..., Ended] = batchinfer,
    *,
    dtype: str = "bfloat16",
) -> dict[str, float]:
    """Seconds of one run: in all, in prefill and in decode steps; of the command, and of it to its last output row.

    Output tokens, too.

    Args:
        command: runs batchinfer, in this process by default.
    """
    shutil.rmtree(folder / "run", ignore_errors=True)
    how = pa.array([{"max_tokens": count} for _, count in requests], pa.struct([("max_tokens", pa.int32())]))
    write_shard(folder / "prompts" / "a.parquet", {"token_ids": [prompt for prompt, _ in requests], "how": how})
    job = write_job(
        folder,
        input={"prompt": None, "token_ids": "token_ids", "sampling": "how"},
        model={"path": str(model), "dtype": dtype},
        sampling={"max_tokens": 128, "ignore_eos": True},
    )
    started = time.time()
    ended = command("run", job)
    command_s = time.time() - started
    if ended.code:
        sys.exit(ended.err)
    sql = f"""
        SELECT max(start_s + duration_s) - min(start_s) AS steps, sum(output_tokens) AS tokens,
               sum(duration_s) FILTER (kind = 'prefill') AS prefill, sum(duration_s) FILTER (kind = 'decode') AS decode
        FROM read_parquet('{folder}/run/stats/steps/*.parquet')
    """
    names = ("steps", "tokens", "prefill", "decode")
    found = dict(zip(names, map(float, duckdb.execute(sql).fetchall()[0]), strict=True))
    # the time of the rename that made the outputs visible
    written_s = max(file.stat().st_ctime for file in (folder / "run" / "outputs").iterdir()) - started
    return {**found, "command": command_s, "written": written_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "fp8"])
    options = parser.parse_args()
    print(f"products {gemm_flops() / 1e9:,.0f} GFLOP/s, memory read {read_bytes_per_s() / 1e9:,.1f} GB/s")
    with tempfile.TemporaryDirectory() as scratch:
        for size in options.sizes:
            model = make_model(Path(scratch) / size, size)
            for kind in ("shared", "unshared"):
                requests = workload(size, kind)
                runs = [
                    run_once(Path(scratch) / f"{size}-{kind}", model, requests, dtype=options.dtype)
                    for _ in range(options.rounds)
                ]
                middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
                ideal_s = ideal_flops(size, requests) / gemm_flops()
                rate = middle["tokens"] / middle["steps"]
                print(
                    f"{size} {kind:<9}{middle['steps']:>8.2f} s in steps (prefill {middle['prefill']:.2f}, decode "
                    f"{middle['decode']:.2f}), {middle['command']:.2f} s in all, {rate:,.0f} output tokens/s, "
                    f"{ideal_s / middle['steps']:.1%} of the limit ({ideal_s:.2f} s)",
                    flush=True,
                )


if __name__ == "__main__":
    main()
