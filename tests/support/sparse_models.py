"""Checkpoints with an indexer, the same without it, and what a model gives for some prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from batchinfer.model.transformer import Transformer
from support.checkpoints import edit_config, read_tensors, write_tensors
from support.paged_steps import PagedRequests

_KEYS = ("index_topk", "index_n_heads", "index_head_dim", "indexer_types", "layer_types")


def without_indexer(folder: Path) -> None:
    """Make the checkpoint one of DeepSeek-V3."""
    tensors = {name: value for name, value in read_tensors(folder).items() if ".indexer." not in name}
    write_tensors(folder, tensors)
    edit_config(folder, model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], **dict.fromkeys(_KEYS))


def prompts_of(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 96, (length,), generator=generator) for length in lengths]


def logits_of(
    model: Transformer,
    prompts: Sequence[torch.Tensor],
    new_tokens: int,
    chunks: Sequence[int] = (1000,),
    order: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """Return the logits of each prompt and `new_tokens` new tokens, computed together."""
    order = order or range(len(prompts))
    requests = PagedRequests(model, prompts, max_new_tokens=new_tokens, seed=len(order))
    requests.prefill(order, chunks)
    requests.decode_greedily(order, new_tokens)
    return [requests.all_logits(i) for i in range(len(prompts))]
