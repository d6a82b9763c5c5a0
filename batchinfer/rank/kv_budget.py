"""How much of a GPU's memory its KV pages may take: what the largest steps leave over. Called when a worker is made.

all of the GPU   | weights, libraries | KV pages           | largest step | reserve |
"""

# T tokens, B requests

from __future__ import annotations

import numpy as np
import torch

from batchinfer.config import PAGE_TOKENS
from batchinfer.model.sampling import SamplingRows, sample
from batchinfer.model.step import PrefillSpan, StepInput
from batchinfer.model.transformer import Transformer

# Of the GPU's memory, for what comes later: captured graphs, buffers of libraries, gaps between blocks of memory, and
# steps in which this rank's experts get more rows than in the measured ones.
RESERVE_SHARE = 0.08
_STRIDE = 7919  # between the tokens of the steps, so that they go to many experts


def measured_room(
    model: Transformer,
    *,
    prefill_tokens: int,
    decode_requests: int,
    largest_tokens: int,
    runs_prefill: bool,
    runs_decode: bool,
) -> int:
    """Run the largest steps once on the model's GPU, and say how many bytes are left for KV pages.

    All ranks of a group do this together, as their rows travel.
    """
    device = model.device
    steps, num_pages = largest_steps(prefill_tokens, decode_requests, largest_tokens, model.config.vocab_size)
    pages = model.new_pages(num_pages)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    for step, runs in zip(steps, (runs_prefill, runs_decode), strict=True):
        if runs:
            logits = model.forward(step, pages).logits
            sample(logits, _drawn_rows(len(logits)), np.zeros(len(logits), dtype=np.int64), model.logit_ops)
    torch.cuda.synchronize(device)
    working = torch.cuda.max_memory_allocated(device) - before
    del pages
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return room_for_pages(total=total, free=free, working=working)


def room_for_pages(*, total: int, free: int, working: int) -> int:
    """Bytes for pages.

    Args:
        total: of the GPU.
        free: while no step runs.
        working: that the largest step takes.
    """
    return max(0, free - working - int(total * RESERVE_SHARE))


def largest_steps(
    prefill_tokens: int, decode_requests: int, largest_tokens: int, vocab_size: int
) -> tuple[tuple[StepInput, StepInput], int]:
    """A prefill step and a decode step as large as they get, and how many pages they need.

    In prefill the last tokens of a prompt that is as long as possible, with logits of as many as could be the last ones
    of short prompts; in decode requests that all are that long. What they attend to is garbage: the pages of their own
    tokens, again and again.
    """
    num_pages = -(-max(prefill_tokens, decode_requests) // PAGE_TOKENS)
    context = max(largest_tokens, prefill_tokens)
    page_ids = torch.arange(-(-context // PAGE_TOKENS)) % num_pages
    prefill = StepInput(
        tokens=_tokens(prefill_tokens, vocab_size),
        positions=torch.arange(context - prefill_tokens, context),
        slots=torch.arange(prefill_tokens),
        logit_rows=torch.arange(max(0, prefill_tokens - decode_requests), prefill_tokens),
        prefill=(PrefillSpan(0, prefill_tokens, context, page_ids),),
    )
    decode = StepInput(
        tokens=_tokens(decode_requests, vocab_size),
        positions=torch.full((decode_requests,), largest_tokens - 1),
        slots=torch.arange(decode_requests),
        logit_rows=torch.arange(decode_requests),
        page_table=(torch.arange(-(-largest_tokens // PAGE_TOKENS)) % num_pages).repeat(decode_requests, 1),
        kv_tokens=torch.full((decode_requests,), largest_tokens),
    )
    return (prefill, decode), num_pages


def _drawn_rows(count: int) -> SamplingRows:
    """Rows whose tokens are drawn behind every filter, which takes several times the memory of their logits."""
    return SamplingRows(
        temperature=np.ones(count),
        top_k=np.full(count, 1000),
        top_p=np.full(count, 0.9),
        min_p=np.full(count, 0.01),
        key=np.zeros(count, dtype=np.uint64),
        num_logprobs=np.full(count, 20),
    )


def _tokens(count: int, vocab_size: int) -> torch.Tensor:
    return torch.arange(count) * _STRIDE % vocab_size
