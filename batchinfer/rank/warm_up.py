"""Warm-up of a lone CPU rank while its job is planned: starts threads and touches memory before the first step."""

import time

import torch

from batchinfer.config import PAGE_TOKENS
from batchinfer.model.step import PrefillSpan, StepInput
from batchinfer.model.transformer import Transformer
from batchinfer.model.weight_bytes import step_bytes

MOST_S = 0.25  # longest expected duration of a warm-up step
_GROWTH = 8
_CHUNK_TOKENS = 8 * PAGE_TOKENS
_MOST_TOUCHED_TOKENS = 8192  # the memory of larger steps is touched when they run


def warm_up(model: Transformer, most_tokens: int) -> None:
    """Run prefill steps of more and more tokens, up to `most_tokens`, as long as the next step should be short.

    Their results are dropped. Ranks that exchange rows would have to run these steps together.
    """
    # each thread touches another part, once; the memory goes back to the allocator, which keeps it (rank_process.py)
    num_bytes = step_bytes(model.config, min(most_tokens, _MOST_TOUCHED_TOKENS), model.dtype.itemsize)
    torch.empty(num_bytes, dtype=torch.uint8).fill_(1)
    num_tokens = min(PAGE_TOKENS, most_tokens)
    while True:
        started_s = time.monotonic()
        step, num_pages = _idle_step(num_tokens)
        model.forward(step, model.new_pages(num_pages, len(step.prefill)))
        took_s = time.monotonic() - started_s
        if num_tokens == most_tokens or _GROWTH * took_s > MOST_S:
            return
        num_tokens = min(_GROWTH * num_tokens, most_tokens)


def _idle_step(num_tokens: int) -> tuple[StepInput, int]:
    """Return a prefill step of chunks of token 0, each with separate pages, and the number of pages."""
    spans, first_page = [], 0
    for start in range(0, num_tokens, _CHUNK_TOKENS):
        count = min(_CHUNK_TOKENS, num_tokens - start)
        page_ids = torch.arange(first_page, first_page + -(-count // PAGE_TOKENS))
        spans.append(PrefillSpan(start, count, count, page_ids))
        first_page += len(page_ids)
    step = StepInput(
        tokens=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.arange(num_tokens) % _CHUNK_TOKENS,
        slots=torch.arange(num_tokens),
        logit_rows=torch.tensor([num_tokens - 1]),
        prefill=tuple(spans),
        state_slots=torch.arange(len(spans)),
    )
    return step, first_page
