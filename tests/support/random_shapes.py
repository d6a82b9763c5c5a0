"""Models of random shapes, odd ones among them, and what they compute; for tests of equal bits.

As a program it prints the digest of what each of some models computes, and of single operations on extreme values:

    python random_shapes.py FOLDER SEED ...     makes the models of these seeds in FOLDER where they are missing

PAIRS in the environment says how pairs of bfloat16 are multiplied: 1 by their instruction, 0 in float32.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from batchinfer.model.transformer import Transformer
from batchinfer_kernels.cpu import ops
from batchinfer_kernels.reference.gating import GateRule
from batchinfer_kernels.reference.mla import PagedKeys
from support.paged_steps import PagedRequests

DTYPES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "fp8": {"dtype": torch.bfloat16, "eight_bit": True},
    "int4": {"dtype": torch.bfloat16, "eight_bit": True, "four_bit": True},
}
MAX_NEW_TOKENS = 3
VOCABULARY = 96
GROUPED_MODELS = ("gpt-oss", "qwen3-moe", "qwen3-windows", "minimax-m2", "glm4-moe", "llama")
COMPRESSED, GROUPED = 100, 200  # the first seeds of models with these kinds of attention


def make_model(folder: Path, seed: int) -> Path:
    """Write the model of this seed to `folder` / seed; hidden size 64 to 1024, every width odd or even.

    Every third one has an indexer. Those from COMPRESSED on have a window and compressed entries, and those from
    GROUPED on have grouped-query attention.
    """
    target = folder / str(seed)
    if target.exists():
        return target
    draw, making = random.Random(seed), folder / f"{seed}.making"
    if COMPRESSED <= seed < GROUPED:
        from support.compressed_models import published_tensors, random_model, write_compressed

        changes = _compressed_sizes(draw)
        return write_compressed(making, published_tensors(random_model(seed, **changes)), **changes).rename(target)
    from support.checkpoints import make_checkpoint

    making.mkdir(parents=True)
    if seed >= GROUPED:
        name = GROUPED_MODELS[(seed - GROUPED) % len(GROUPED_MODELS)]
        make_checkpoint(making, name, seed=seed, **_grouped_sizes(draw, name))
        return making.rename(target)
    heads, groups = draw.choice([1, 2, 3, 5, 8, 12, 17]), draw.choice([1, 2, 4])
    sizes: dict[str, Any] = {
        "hidden_size": draw.choice([64, 128, 333, 512, 1024, draw.randrange(64, 1024)]),
        "intermediate_size": draw.randrange(1, 300),
        "moe_intermediate_size": draw.choice([1, 41, 64, 70, draw.randrange(1, 200)]),
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": draw.choice([None, draw.randrange(1, 100)]),
        "kv_lora_rank": draw.choice([16, 64, draw.randrange(1, 130)]),
        "qk_nope_head_dim": draw.choice([16, draw.randrange(1, 70)]),
        "qk_rope_head_dim": 2 * draw.randrange(1, 40),
        "v_head_dim": draw.choice([16, 32, draw.randrange(1, 70)]),
        "n_routed_experts": groups * draw.choice([2, 5, 16]),
        "n_group": groups,
        "topk_group": draw.randint(1, groups),
        "num_experts_per_tok": 2,
        "n_shared_experts": draw.choice([1, 2]),
        "attention_bias": draw.random() < 0.2,
        "tie_word_embeddings": draw.random() < 0.3,
    }
    name = "v3"
    if seed % 3 == 2:
        name = draw.choice(["v32", "glm-dsa"])
        sizes |= {"q_lora_rank": sizes["q_lora_rank"] or 24, "index_topk": draw.randrange(1, 40)}
        sizes |= {
            "index_n_heads": draw.randrange(1, 80),
            "index_head_dim": sizes["qk_rope_head_dim"] + draw.randrange(9),
        }
    make_checkpoint(making, name, seed=seed, **sizes)
    return making.rename(target)


def _grouped_sizes(draw: random.Random, name: str) -> dict[str, Any]:
    num_kv_heads, num_experts = draw.choice([1, 2, 3]), draw.choice([3, 8, 17])
    width = draw.choice([1, 41, 64, draw.randrange(1, 200)])
    sizes: dict[str, Any] = {
        "hidden_size": draw.choice([64, 333, 512, draw.randrange(64, 600)]),
        "intermediate_size": width,
        "num_attention_heads": num_kv_heads * draw.choice([1, 2, 3, 5, 8]),
        "num_key_value_heads": num_kv_heads,
        "head_dim": 4 * draw.choice([1, 8, 16, draw.randrange(1, 33)]),
    }
    if name == "llama":  # as transformers demands
        sizes["hidden_size"] = sizes["num_attention_heads"] * draw.randrange(3, 20)
    if name in ("gpt-oss", "qwen3-windows"):
        sizes["sliding_window"] = draw.choice([1, 8, 50, 100])
    if name in ("gpt-oss", "minimax-m2"):
        return sizes | {"num_local_experts": num_experts, "num_experts_per_tok": draw.choice([1, 2, 3])}
    if name in ("qwen3-moe", "glm4-moe"):
        count = "num_experts" if name == "qwen3-moe" else "n_routed_experts"
        return sizes | {count: num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": width}
    return sizes


def _compressed_sizes(draw: random.Random) -> dict[str, Any]:
    rotated, groups = 2 * draw.randrange(1, 20), draw.choice([1, 2, 3])
    return {
        "hidden_size": draw.choice([64, 333, 512, draw.randrange(64, 600)]),
        "moe_intermediate_size": draw.choice([1, 41, 64, draw.randrange(1, 200)]),
        "num_attention_heads": groups * draw.choice([1, 3, 8, 11]),
        "head_dim": 2 * ((rotated + draw.choice([0, 1, 32, 87]) + 1) // 2),
        "qk_rope_head_dim": rotated,
        "q_lora_rank": draw.randrange(1, 100),
        "o_groups": groups,
        "o_lora_rank": draw.randrange(1, 50),
        "compress_ratios": [0, 4, 128, 4],
        "num_hidden_layers": 4,
        "sliding_window": draw.choice([1, 8, 50, 128]),
        "index_n_heads": draw.randrange(1, 80),
        "index_head_dim": 2 * ((rotated + 1) // 2) + 2 * draw.randrange(9),
        "index_topk": draw.randrange(1, 12),
        "n_routed_experts": draw.choice([3, 8, 17]),
        "hc_mult": draw.choice([1, 2, 4]),
    }


def make_prompts(seed: int, most: int = 70) -> list[torch.Tensor]:
    """Two to `most` prompts, some of which have a common start."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    start = torch.randint(0, VOCABULARY, (66,), generator=generator)
    lengths = [draw.choice([1, 2, 7, 63, 64, 65, draw.randrange(1, 90)]) for _ in range(draw.randint(2, most))]

    def tokens(length: int) -> torch.Tensor:
        own = torch.randint(0, VOCABULARY, (length,), generator=generator)
        return torch.cat([start[: draw.choice([0, 0, length // 2])], own])

    return [tokens(length) for length in lengths]


def computed(model: Transformer, prompts: list[torch.Tensor], order: list[int], chunks: list[int]) -> PagedRequests:
    """Prompts prefilled together in this order in chunks of these sizes, then some decode steps."""
    requests = PagedRequests(model, prompts, max_new_tokens=MAX_NEW_TOKENS, seed=len(order))
    requests.prefill(order, chunks)
    requests.decode_greedily(order, MAX_NEW_TOKENS)
    return requests


def extreme_results() -> Iterator[torch.Tensor]:
    """Products, activations, norms and sampling of values from the smallest to the largest, subnormal ones too."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:  # in float64, which torch draws alike on all processors
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def values(*shape: int, dtype: torch.dtype, powers: tuple[int, int]) -> torch.Tensor:
        exponent = torch.randint(*powers, shape, generator=generator).double()
        return (normal(*shape) * 2**exponent).to(dtype)

    for dtype in (torch.float32, torch.bfloat16):
        for powers in ((-3, 3), (-80, -50), (-140, -100), (50, 64)):
            x, weight = (values(40, 200, dtype=dtype, powers=powers) for _ in range(2))
            yield ops.linear(x, weight)
            yield ops.linear(x, weight, float32_out=True)
            yield ops.rms_norm(x, weight[0], 1e-6)
            yield ops.silu_mul(x, weight)
            yield ops.add_sums(x, weight.float(), x)
            yield ops.linear(x.bfloat16(), ops.pack(weight.bfloat16(), eight_bit=True))
            yield ops.linear(x.bfloat16(), ops.pack(weight.bfloat16(), four_bit=True))
        every = torch.linspace(-110, 95, 2**16).to(dtype)[None]
        yield ops.silu_mul(every, torch.ones_like(every))
        rule = GateRule("noaux_tc", topk=4, num_groups=1, topk_groups=1, normalize=True, scale=1.0)
        yield ops.gate(every.float().view(-1, 16), None, rule)[1]
        # scores from 0 to far below: what exp of attention gives for each
        keys = torch.zeros(40, 64, 32, dtype=dtype)
        keys[..., 0] = torch.linspace(-400, 0, 40 * 64).view(40, 64).to(dtype)
        keys[..., 1:] = normal(40, 64, 31).to(dtype)
        q = torch.zeros(1, 9, 32, dtype=dtype)
        q[..., 0] = torch.linspace(0.1, 1, 9).to(dtype)
        tokens = torch.tensor([40 * 64])
        yield ops.mla_decode(q, PagedKeys(keys, torch.arange(40)[None], tokens, tokens - 1), latent_dim=16, scale=1.0)
    logits = 30 * normal(4, 1001).float()
    yield ops.log_sum_exp(logits)
    yield from ops.most_likely(logits, 7)
    rows = torch.arange(600)
    shares = [
        torch.tensor(some, dtype=torch.float64) for some in ((1.0, 0.1, 30.0, 1e-9), (1.0, 0.9, 0.01), (0.0, 0.2))
    ]
    temperature, top_p, min_p = (some[rows % len(some)] for some in shares)
    uniform = torch.rand(600, generator=generator, dtype=torch.float64)
    yield ops.draw(logits.repeat(150, 1), temperature, rows % 5 * (rows % 7), top_p, min_p, uniform)
    yield from ops.cos_sin(torch.rand(1000, generator=generator) * 1e6, 0.9)


def digest(tensors: list[torch.Tensor]) -> str:
    """Return a digest of the bytes of all tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        # a number that is none may have any bits
        clean = torch.where(tensor.isnan(), torch.zeros((), dtype=tensor.dtype), tensor)
        found.update(clean.contiguous().view(torch.uint8).numpy().tobytes() + bytes(tensor.isnan().flatten().tolist()))
    return found.hexdigest()[:16]


def main(folder: Path, seeds: list[int]) -> None:
    """Print a digest per model and dtype, one for extreme values, and whether all logits were finite."""
    torch.set_num_threads(2)
    if "PAIRS" in os.environ:
        ops.library().choose_pairs(int(os.environ["PAIRS"]))
    found: dict[str, str | bool] = {"extreme values": digest(list(extreme_results()))}
    is_finite = True
    for seed in seeds:
        prompts = make_prompts(seed, most=12)
        for name, options in DTYPES.items():
            model = Transformer.load(make_model(folder, seed), backend="cpu", **options)
            requests = computed(model, prompts, list(range(len(prompts))), [50, 7, 1000])
            logits = [requests.all_logits(i) for i in range(len(prompts))]
            is_finite &= all(bool(rows.isfinite().all()) for rows in logits)
            found[f"model {seed} {name}"] = digest(logits)
    print(json.dumps(found | {"finite": is_finite}))


def program() -> None:
    main(Path(sys.argv[1]), [int(seed) for seed in sys.argv[2:]])


if __name__ == "__main__":
    program()
