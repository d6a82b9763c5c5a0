"""The least an engine does, for tests of the model: gives each request shuffled pages and builds its steps."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from batchinfer.config import PAGE_TOKENS
from batchinfer.model.step import PrefillSpan, StepInput, StepOutput
from batchinfer.model.transformer import Transformer


class PagedRequests:
    """Some requests with pages in shuffled order; `logits[i]` collects what was computed for request i."""

    def __init__(
        self,
        model: Transformer,
        prompts: Sequence[torch.Tensor],
        *,
        max_new_tokens: int,
        seed: int = 0,
        garbage: float = 0.0,
    ):
        self.model = model
        self.tokens = [prompt.tolist() for prompt in prompts]
        self.num_done = [0] * len(prompts)
        self.logits: list[list[torch.Tensor]] = [[] for _ in prompts]
        num_pages = [-(-(len(prompt) + max_new_tokens) // PAGE_TOKENS) for prompt in prompts]
        generator = torch.Generator().manual_seed(seed)
        shuffled = torch.randperm(sum(num_pages) + 3, generator=generator)
        self.page_ids = list(shuffled[: sum(num_pages)].split(num_pages))
        self.slots = torch.randperm(len(prompts), generator=generator)  # of the requests' states
        self.pages = model.new_pages(len(shuffled), len(prompts))
        if garbage:
            self.pages.normal_(generator=generator).mul_(garbage)

    def prefill(self, order: Sequence[int], chunks: Sequence[int]) -> None:
        """Compute all prompts, several requests per step, the k-th step of request i with chunk (i + k) of `chunks`."""
        round_index = 0
        while pending := [i for i in order if self.num_done[i] < len(self.tokens[i])]:
            sizes = {
                i: min(chunks[(i + round_index) % len(chunks)], len(self.tokens[i]) - self.num_done[i]) for i in pending
            }
            self.prefill_step(pending, sizes)
            round_index += 1

    def prefill_step(self, order: Sequence[int], sizes: dict[int, int]) -> StepOutput:
        """One step that computes the next `sizes[i]` tokens of each request in `order`."""
        output = self.model.forward(self.prefill_input(order, sizes), self.pages)
        self._keep(order, sizes, output)
        return output

    def prefill_input(self, order: Sequence[int], sizes: dict[int, int]) -> StepInput:
        """The input of that step."""
        spans, rows, start = [], [], 0
        for i in order:
            context = self.num_done[i] + sizes[i]
            spans.append(PrefillSpan(start, sizes[i], context, self.page_ids[i][: -(-context // PAGE_TOKENS)]))
            rows += [(i, position) for position in range(self.num_done[i], context)]
            start += sizes[i]
        return self._step(rows, prefill=tuple(spans), state_slots=self.slots[list(order)])

    def decode_step(self, order: Sequence[int], num_queries: int = 1) -> StepOutput:
        """One step that computes the next `num_queries` tokens (already in `tokens`) of each request in `order`."""
        output = self.model.forward(self.decode_input(order, num_queries), self.pages)
        self._keep(order, dict.fromkeys(order, num_queries), output)
        return output

    def decode_input(self, order: Sequence[int], num_queries: int = 1) -> StepInput:
        """The input of that step."""
        rows = [(i, self.num_done[i] + query) for i in order for query in range(num_queries)]
        width = max((len(self.page_ids[i]) for i in order), default=1)
        table = torch.zeros(len(order), width, dtype=torch.int64)
        for row, i in enumerate(order):
            table[row, : len(self.page_ids[i])] = self.page_ids[i]
        kv_tokens = torch.tensor([self.num_done[i] + num_queries for i in order], dtype=torch.int64)
        return self._step(rows, page_table=table, kv_tokens=kv_tokens, state_slots=self.slots[list(order)])

    def decode_greedily(self, order: Sequence[int], num_tokens: int) -> None:
        """Append the best token and compute it, `num_tokens` times for all requests in `order`."""
        for _ in range(num_tokens):
            for i in order:
                self.tokens[i].append(int(self.logits[i][-1][-1].argmax()))
            self.decode_step(order)

    def all_logits(self, i: int) -> torch.Tensor:
        """[tokens so far, vocabulary] float32."""
        return torch.cat(self.logits[i])

    def _step(self, rows: list[tuple[int, int]], **kind: Any) -> StepInput:
        return StepInput(
            tokens=torch.tensor([self.tokens[i][position] for i, position in rows], dtype=torch.int64),
            positions=torch.tensor([position for _, position in rows], dtype=torch.int64),
            slots=torch.tensor([self._slot(i, position) for i, position in rows], dtype=torch.int64),
            logit_rows=torch.arange(len(rows)),
            **kind,
        )

    def _slot(self, i: int, position: int) -> int:
        return int(self.page_ids[i][position // PAGE_TOKENS]) * PAGE_TOKENS + position % PAGE_TOKENS

    def _keep(self, order: Sequence[int], sizes: dict[int, int], output: StepOutput) -> None:
        for i, part in zip(order, output.logits.split([sizes[i] for i in order]), strict=True):
            self.logits[i].append(part)
            self.num_done[i] += sizes[i]


def digest_of_logits(folder: Path) -> str:
    """Return a digest of a model's logits, of prompts in chunks and of decoded tokens, in float32 and in bfloat16."""
    found = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        model = Transformer.load(folder, dtype=dtype)
        prompts = [torch.randint(0, 96, (count,), generator=torch.Generator().manual_seed(count)) for count in (3, 150)]
        requests = PagedRequests(model, prompts, max_new_tokens=4)
        requests.prefill(range(2), (70, 9))
        requests.decode_greedily(range(2), 4)
        for number in range(2):
            found.update(requests.all_logits(number).numpy().tobytes())
    return found.hexdigest()
