"""Steps of a random model with DeepSeek-V4-Flash's exact layer shapes against this machine's limits; decides no test.

One layer of each kind (window alone, chosen entries, wide entries), few experts and a small vocabulary, in bfloat16 on
one thread, in processor time, medians. A decode step has many requests of the same length, a prefill step the last
tokens of a prompt. The limit of a step is the larger of the time in which its weights and KV can be read and the time
in which its products can be multiplied, both at rates measured in the same run.

    python tests/bench/compressed_steps.py [--requests 64] [--context 4096] [--chunk 256] [--ops] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from batchinfer.config import PAGE_TOKENS  # noqa: E402
from batchinfer.model import residual  # noqa: E402
from batchinfer.model.compressed import CompressedAttention  # noqa: E402
from batchinfer.model.compressed_config import INDEXED, WIDE, CompressedConfig  # noqa: E402
from batchinfer.model.config import load_model_config  # noqa: E402
from batchinfer.model.ops import Ops  # noqa: E402
from batchinfer.model.step import PrefillSpan, StepInput  # noqa: E402
from batchinfer.model.transformer import Transformer, local_dispatcher  # noqa: E402
from batchinfer_kernels.registry import Operation  # noqa: E402

FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": 512, "hidden_size": 4096,
    "moe_intermediate_size": 2048, "num_hidden_layers": 3, "num_attention_heads": 64, "num_key_value_heads": 1,
    "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 6, "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "topk_method": "noaux_tc", "num_hash_layers": 1,
    "swiglu_limit": 10.0, "sliding_window": 128, "compress_ratios": [0, INDEXED, WIDE, 0], "index_n_heads": 64,
    "index_head_dim": 128, "index_topk": 512, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                     "original_max_position_embeddings": 65536},
    "max_position_embeddings": 1048576, "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
    "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1, "attention_bias": False,
}  # fmt: skip
READ_BYTES = 512 << 20


def tensors_of(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return random tensors by the names of the published files."""
    c = config
    hidden, heads, width, latent = (
        c[name] for name in ("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank")
    )
    groups, rank, streams = c["o_groups"], c["o_lora_rank"], c["hc_mult"]
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (c["vocab_size"], hidden), "norm.weight": (hidden,)}
    shapes |= {"head.weight": (c["vocab_size"], hidden)}
    shapes |= {"hc_head_fn": (streams, streams * hidden), "hc_head_base": (streams,), "hc_head_scale": (1,)}
    for layer, ratio in enumerate(c["compress_ratios"][: c["num_hidden_layers"]]):
        own = f"layers.{layer}"
        for sublayer in ("attn", "ffn"):
            shapes[f"{own}.{sublayer}_norm.weight"] = (hidden,)
            mixed = streams * (2 + streams)
            shapes[f"{own}.hc_{sublayer}_fn"] = (mixed, streams * hidden)
            shapes |= {f"{own}.hc_{sublayer}_base": (mixed,), f"{own}.hc_{sublayer}_scale": (3,)}
        at = f"{own}.attn"
        shapes |= {f"{at}.wq_a.weight": (latent, hidden), f"{at}.wq_b.weight": (heads * width, latent)}
        shapes |= {f"{at}.wkv.weight": (width, hidden), f"{at}.wo_a.weight": (groups * rank, heads * width // groups)}
        shapes |= {f"{at}.wo_b.weight": (hidden, groups * rank), f"{at}.q_norm.weight": (latent,)}
        shapes |= {f"{at}.kv_norm.weight": (width,), f"{at}.attn_sink": (heads,)}
        pools = [(f"{at}.compressor", width)] if ratio else []
        if ratio == INDEXED:
            pools.append((f"{at}.indexer.compressor", c["index_head_dim"]))
            shapes[f"{at}.indexer.wq_b.weight"] = (c["index_n_heads"] * c["index_head_dim"], latent)
            shapes[f"{at}.indexer.weights_proj.weight"] = (c["index_n_heads"], hidden)
        for name, values in pools:
            raw = values * (1 + (ratio == INDEXED))
            shapes |= {f"{name}.ape": (ratio, raw), f"{name}.norm.weight": (values,)}
            shapes |= {f"{name}.wkv.weight": (raw, hidden), f"{name}.wgate.weight": (raw, hidden)}
        ffn = f"{own}.ffn"
        shapes[f"{ffn}.gate.weight"] = (c["n_routed_experts"], hidden)
        if layer >= c["num_hash_layers"]:
            shapes[f"{ffn}.gate.bias"] = (c["n_routed_experts"],)
        experts = [f"{ffn}.shared_experts", *(f"{ffn}.experts.{one}" for one in range(c["n_routed_experts"]))]
        inner = c["moe_intermediate_size"]
        for expert in experts:
            shapes |= {f"{expert}.{part}.weight": (inner, hidden) for part in ("w1", "w3")}
            shapes[f"{expert}.w2.weight"] = (hidden, inner)
    in_float32 = ("hc_", "attn_sink", ".ape", "gate.bias")
    tensors = {}
    for name, shape in shapes.items():
        dtype = torch.float32 if any(part in name for part in in_float32) else torch.bfloat16
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones(shape, dtype=dtype)
        else:
            tensors[name] = torch.empty(shape, dtype=dtype).normal_(std=shape[-1] ** -0.5)
    for layer in range(c["num_hash_layers"]):
        chosen = torch.rand(c["vocab_size"], c["n_routed_experts"]).argsort(-1)[:, : c["num_experts_per_tok"]]
        tensors[f"layers.{layer}.ffn.gate.tid2eid"] = chosen.contiguous()
    return tensors


class OpSeconds:
    """Processor seconds in each operation, and in the parts of attention and of the streams."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def timed(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            started = time.process_time()
            result = run(*args, **options)
            self.seconds[name] += time.process_time() - started
            return result

        return call

    def ops(self, ops: Ops) -> Ops:
        """Return these operations, timed."""
        named = {field.name: getattr(ops, field.name) for field in fields(ops)}
        timed = {name: self.timed(name, op) for name, op in named.items() if isinstance(op, Operation)}
        return replace(ops, **{name: op for name, op in timed.items() if not name.startswith("pack")})  # type: ignore[arg-type]

    def watch(self) -> None:
        """Time the parts of a layer, too; what they take includes their operations."""
        for owner, names in (
            (CompressedAttention, ("project", "attend")),
            (residual.StreamResidual, ("enter", "leave")),
        ):
            for name in names:
                setattr(owner, name, self.timed(f"({name})", getattr(owner, name)))


def decode_step(num_requests: int, context: int) -> StepInput:
    """Return one token of each request, the last of `context` tokens."""
    num_pages = -(-context // PAGE_TOKENS)
    table = torch.randperm(num_requests * num_pages).view(num_requests, num_pages)
    positions = torch.full((num_requests,), context - 1)
    return StepInput(
        tokens=torch.randint(8, FLASH["vocab_size"], (num_requests,)),
        positions=positions,
        slots=table[:, -1] * PAGE_TOKENS + positions % PAGE_TOKENS,
        logit_rows=torch.arange(num_requests),
        page_table=table,
        kv_tokens=positions + 1,
        state_slots=torch.randperm(num_requests),
    )


def prefill_step(context: int, chunk: int) -> StepInput:
    """Return the last tokens of one prompt."""
    page_ids = torch.randperm(-(-context // PAGE_TOKENS))
    positions = torch.arange(context - chunk, context)
    return StepInput(
        tokens=torch.randint(8, FLASH["vocab_size"], (chunk,)),
        positions=positions,
        slots=page_ids[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS,
        logit_rows=torch.arange(chunk),
        prefill=(PrefillSpan(0, chunk, context, page_ids),),
        state_slots=torch.tensor([0]),
    )


def body_weights(config: CompressedConfig, num_layers: int) -> float:
    """Return the weights of all attention, streams and shared experts, with which each token is multiplied."""
    c, total = FLASH, 0
    for layer in range(num_layers):
        total += c["hidden_size"] * (c["q_lora_rank"] + c["head_dim"]) + config.q_lora_rank * config.query_width
        total += config.query_width * config.o_lora_rank + config.output_width * c["hidden_size"]
        total += sum(one.num_weights(c["hidden_size"]) for one in config.compressors(layer))
        if config.ratios[layer] == INDEXED:
            total += config.index_heads * (config.index_dim * config.q_lora_rank + c["hidden_size"])
        total += 2 * 24 * 4 * c["hidden_size"] + 3 * c["hidden_size"] * c["moe_intermediate_size"]
    return float(total)


def attention_products(config: CompressedConfig, positions: torch.Tensor) -> float:
    """Return multiplications of core attention and index scores, over all layers and queries."""
    total = 0.0
    for ratio in config.ratios:
        in_window = (positions + 1).clamp(max=config.window)
        entries = (positions + 1) // ratio if ratio else torch.zeros_like(positions)
        if ratio == INDEXED:
            total += float(entries.sum()) * config.index_heads * config.index_dim
            entries = entries.clamp(max=config.index_topk)
        total += 2.0 * float((in_window + entries).sum()) * config.query_width
    return total


def kv_bytes(config: CompressedConfig, positions: torch.Tensor) -> float:
    """Return the bytes of rows, entries and index keys that queries of different requests read."""
    total = 0.0
    for ratio in config.ratios:
        entries = (positions + 1) // ratio if ratio else torch.zeros_like(positions)
        if ratio == INDEXED:
            total += float(entries.sum()) * config.index_dim
            entries = entries.clamp(max=config.index_topk)
        total += float(((positions + 1).clamp(max=config.window) + entries).sum()) * config.head_dim
    return 2 * total


def median_s(work: Callable[[], object], rounds: int) -> float:
    """Return the median processor time of a call, of some behind a first one."""
    work()
    times = []
    for _ in range(rounds):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--ops", action="store_true", help="show the time of each operation")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    watch = OpSeconds()
    if options.ops:
        watch.watch()
    with torch.inference_mode(), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_text(json.dumps(FLASH))
        save_file(tensors_of(FLASH), folder / "model.safetensors")
        model = Transformer.load(folder, dtype=torch.bfloat16, backend=options.backend)
        config = load_model_config(folder).attention
    assert isinstance(config, CompressedConfig)
    if options.ops:
        experts = local_dispatcher(model.config, model.ops, "cpu")
        model = Transformer(model.config, model.weights, [experts] * model.num_moe_layers, watch.ops(model.ops))
    body, inner = (
        body_weights(config, FLASH["num_hidden_layers"]),
        3 * FLASH["hidden_size"] * FLASH["moe_intermediate_size"],
    )
    layers, used = FLASH["num_hidden_layers"], FLASH["num_experts_per_tok"]
    held = 2 * (body + layers * FLASH["n_routed_experts"] * inner)
    memory, square = torch.ones(READ_BYTES // 4), torch.randn(2048, 2048).bfloat16()
    packed = model.ops.pack(square)
    steps = {
        "decode": decode_step(options.requests, options.context),
        "prefill": prefill_step(options.context, options.chunk),
    }
    with torch.inference_mode():
        for name, step in steps.items():
            num_pages = options.requests * -(-options.context // PAGE_TOKENS)
            kv = model.new_pages(num_pages, options.requests)
            for of_layer in kv:
                for values in (of_layer.window, *of_layer.entries, *of_layer.waiting):
                    values.normal_()
            bytes_per_s = READ_BYTES / median_s(memory.sum, options.rounds)
            flops = 2 * 2048**3 / median_s(lambda: model.ops.linear(square, packed), options.rounds)
            num_tokens = len(step.tokens)
            flop = 2 * (num_tokens * (body + layers * used * inner) + attention_products(config, step.positions))
            read = held + (kv_bytes(config, step.positions) if name == "decode" else 0)
            watch.seconds.clear()
            took = median_s(partial(model.forward, step, kv), options.rounds)
            read_s, multiply_s = read / bytes_per_s, flop / flops
            limit_s, of = max((read_s, "memory"), (multiply_s, "products"))
            print(
                f"{name}: {num_tokens} tokens, {options.context:,}: {took * 1e3:.0f} ms; read {read / 1e9:.2f} GB at "
                f"{bytes_per_s / 1e9:.1f} GB/s {read_s * 1e3:.0f} ms ({read_s / took:.0%}); products "
                f"{flop / 1e9:.0f} GFLOP at {flops / 1e9:.0f} GFLOP/s {multiply_s * 1e3:.0f} ms "
                f"({multiply_s / took:.0%}); the limit is that of {of}, {limit_s * 1e3:.0f} ms: {limit_s / took:.0%}",
                flush=True,
            )
            for op, total in watch.seconds.most_common(24) if options.ops else ():
                print(f"    {op:<22}{total / (options.rounds + 1) * 1e3:>9.1f} ms")


if __name__ == "__main__":
    main()
