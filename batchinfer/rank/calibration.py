"""Calibration: counts of the experts that a few pieces of prompts choose, for placing them before the first request."""

import torch

from batchinfer.config import PAGE_TOKENS
from batchinfer.kv.pages import pages_for
from batchinfer.model.step import PrefillSpan, StepInput
from batchinfer.rank.context import RankContext


def count_experts(context: RankContext, pieces: list[list[int]]) -> tuple[int, list[list[int]]]:
    """Run pieces of prompts as one prefill step and drop its results; all ranks of the group do so together.

    Every token is finished, so that the last layer counts all of them, too. No page may be in use.

    Returns:
        The number of tokens that ran, as many as fit into a step and the pages.
        [L, E] the number of times that each expert was chosen.
    """
    spans: list[PrefillSpan] = []
    tokens: list[int] = []
    slots: list[int] = []
    first_page = 0
    for piece in pieces:
        num_pages = pages_for(len(piece))
        if len(tokens) + len(piece) > context.prefill_tokens or first_page + num_pages > context.num_pages:
            break
        page_ids = torch.arange(first_page, first_page + num_pages)
        spans.append(PrefillSpan(len(tokens), len(piece), len(piece), page_ids))
        slots += range(first_page * PAGE_TOKENS, first_page * PAGE_TOKENS + len(piece))
        tokens += piece
        first_page += num_pages
    step = StepInput(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.tensor([place for span in spans for place in range(span.num_tokens)], dtype=torch.int64),
        slots=torch.tensor(slots, dtype=torch.int64),
        logit_rows=torch.arange(len(tokens)),
        prefill=tuple(spans),
    )
    output = context.model.forward(step, context.pages, context.schedule)
    return len(tokens), output.expert_counts.tolist()
