"""Sizes of CUDA graphs of decode steps: numbers of rows and pages, agreed by the ranks of a group.

A graph has fixed shapes. A step runs in the next larger graph, filled up with rows that read and write filler pages,
which no request has:

    5 requests, graph of 8 rows     tokens a b c d e - - -     "-": slots of the filler pages, one each

Ranks that share experts replay graphs of one size, the largest that any of them needs. So all ranks have the same
graphs, and record a new one in the same step:

    rank 0: 5 requests of at most 3 pages     rank 1: none     rank 2: 9 of 1     all: 16 rows of 4 pages
"""

# B requests of a step, F rows with filler, P pages of the table

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from batchinfer.config import PAGE_TOKENS
from batchinfer.model.step import StepInput

_SMALL_SIZES = (1, 2, 4, 8)
_SIZE_STEP = 16
_LEAST_PAGES = 4


class DecodeBatch(NamedTuple):
    """A rank's next decode step and the abilities of its graphs; whole numbers, to be sent to other ranks.

    num_pages: pages of the request with most.
    sees_all, chooses: whether rows attend to all keys before them, and whether rows attend to chosen keys alone.
    replays, captures: whether this rank can replay graphs at all, and whether it has the memory for another one.
    """

    num_requests: int = 0
    num_pages: int = 0
    sees_all: int = 0
    chooses: int = 0
    replays: int = 0
    captures: int = 0


class GraphSize(NamedTuple):
    """The size of one graph.

    num_rows: rows of the step, or of each of its two micro-batches.
    sees_all, chooses: see DecodeBatch.
    in_pairs: two micro-batches in turn.
    """

    num_rows: int
    num_pages: int
    sees_all: bool
    chooses: bool
    in_pairs: bool = False

    @classmethod
    def of_group(cls, batches: Sequence[DecodeBatch], *, in_pairs: bool, most_rows: int | None) -> GraphSize | None:
        """Return the smallest size with room for the batch of every rank; None if even the largest has none.

        Args:
            most_rows: rows of the largest graph; None: any number.
        """
        num_requests = max(batch.num_requests for batch in batches)
        num_wanted = -(-num_requests // 2) if in_pairs else num_requests
        num_rows = graph_rows(num_wanted)
        if most_rows is not None and num_wanted > most_rows:
            return None
        return cls(
            num_rows if most_rows is None else min(num_rows, most_rows),
            graph_pages(max(batch.num_pages for batch in batches)),
            any(batch.sees_all for batch in batches),
            any(batch.chooses for batch in batches),
            in_pairs,
        )

    def position_range(self, most_keys: float) -> tuple[int, int]:
        """Return a lowest and a highest position for which layers take the paths of rows of this size (see StepInput).

        Args:
            most_keys: of a query; infinite: the model chooses none.
        """
        if most_keys == math.inf:
            return 0, 0
        topk = int(most_keys)
        return 0 if self.sees_all else topk, topk if self.chooses else 0


def graph_rows(num_requests: int) -> int:
    """Return the next number of requests for which there is a graph: 1, 2, 4, 8, 16, 32, 48, 64 and so on."""
    small = next((size for size in _SMALL_SIZES if size >= num_requests), None)
    return small or -(-num_requests // _SIZE_STEP) * _SIZE_STEP


def graph_pages(num_pages: int) -> int:
    """Return the next number of pages per request for which there is a graph: a power of two."""
    return max(_LEAST_PAGES, 1 << max(0, num_pages - 1).bit_length())


def num_filler_pages(most_requests: int, num_ranks: int) -> int:
    """Return the number of pages that give each filler row of a step its own slot.

    All rows of a rank's step can be fillers, if only other ranks of the group have requests.

    Args:
        most_requests: largest number of requests that a rank decodes at once.
    """
    if num_ranks == 1:
        return 1  # at most a step of sizes less one are filler
    in_halves = 2 * graph_rows(-(-most_requests // 2))
    return -(-max(graph_rows(most_requests), in_halves) // PAGE_TOKENS)


def filled_up(
    step: StepInput, num_rows: int, num_pages: int, filler_page: int, num_used: int = 0
) -> tuple[StepInput, torch.Tensor]:
    """Return the step with filler rows, and with filler pages after each request's pages.

    Args:
        num_rows, num_pages: of the result.
        filler_page: the first of the pages that no request has.
        num_used: of their slots that are taken, by the other half of the step.

    Returns:
        The step, and [F] int64: 1 for its own rows, 0 for the filler's.
    """
    assert step.page_table is not None
    assert step.kv_tokens is not None
    num_requests, table_pages = step.page_table.shape
    num_filler = num_rows - num_requests
    places = (0, num_pages - table_pages, 0, num_filler)
    assert min(places) >= 0, f"{num_requests} requests of {table_pages} pages in {num_rows} rows of {num_pages}"
    filler_slots = filler_page * PAGE_TOKENS + num_used + torch.arange(num_filler)
    filled = replace(
        step,
        tokens=F.pad(step.tokens, (0, num_filler)),
        positions=F.pad(step.positions, (0, num_filler)),
        slots=torch.cat([step.slots, filler_slots]),
        logit_rows=torch.arange(num_rows),
        page_table=F.pad(step.page_table, places, value=filler_page),
        kv_tokens=F.pad(step.kv_tokens, (0, num_filler), value=1),
    )
    return filled, F.pad(torch.ones(num_requests, dtype=torch.int64), (0, num_filler))
