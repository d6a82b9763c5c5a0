"""Steps of the slice: what goes in, and how one is run again and again, with or without events between its stages."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from accelerator import Accelerator
from stages import StageEvents

from batchinfer.config import PAGE_TOKENS
from batchinfer.model.step import PrefillSpan, StepInput, StepTensors
from batchinfer.parallel.overlap import run_to_end


def decode_step(share: Any, table: torch.Tensor, kv_tokens: int) -> StepInput:
    """The next token of each request, on the host; its latent goes behind the `kv_tokens` - 1 before it."""
    num_requests, last = len(table), kv_tokens - 1
    return StepInput(
        tokens=torch.arange(num_requests) % share.config.vocab_size,
        positions=torch.full((num_requests,), last),
        slots=table[:, last // PAGE_TOKENS] * PAGE_TOKENS + last % PAGE_TOKENS,
        logit_rows=torch.arange(num_requests),
        page_table=table,
        kv_tokens=torch.full((num_requests,), kv_tokens),
    )


def prefill_step(share: Any, num_prompts: int, prompt_tokens: int) -> StepInput:
    """Whole prompts, none of it computed before, on the host; logits of each one's last token."""
    per_prompt = -(-prompt_tokens // PAGE_TOKENS)
    pages = torch.arange(num_prompts * per_prompt).view(num_prompts, per_prompt)
    positions = torch.arange(prompt_tokens)
    slots = (pages[:, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS).flatten()
    spans = tuple(
        PrefillSpan(place * prompt_tokens, prompt_tokens, prompt_tokens, ids) for place, ids in enumerate(pages)
    )
    tokens = torch.arange(len(slots)) % share.config.vocab_size
    last = torch.arange(1, num_prompts + 1) * prompt_tokens - 1
    return StepInput(tokens, positions.repeat(num_prompts), slots, last, prefill=spans)


class Stepper:
    """One step that can be run again and again: as a captured graph in decode, call by call in prefill.

    Args:
        with_stages: put two events around each stage. They take time themselves, about a thousand of them in a step:
            a step that is timed as a whole goes without.
    """

    def __init__(
        self,
        share: Any,
        step: StepInput,
        pages: torch.Tensor,
        accelerator: Accelerator,
        *,
        with_stages: bool = False,
    ):
        self.accelerator = accelerator
        self.stages = StageEvents(is_timed=with_stages and not accelerator.is_rehearsal)
        self._tensors = StepTensors.of(step, accelerator.device)  # a graph reads them again each time

        def run() -> None:
            self.stages.events.clear()
            self.output = run_to_end(share.model.points(self._tensors, pages, self.stages))

        run()  # compiles
        self._run: Callable[[], Any] = run
        if step.page_table is not None and not accelerator.is_rehearsal:
            run()  # what compiles or is allocated once is done before the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            self._run = graph.replay
            self._run()
        accelerator.wait()

    def run(self) -> None:
        """Once more."""
        self._run()

    @property
    def is_finite(self) -> bool:
        """Whether all logits are."""
        return bool(torch.isfinite(self.output.logits).all())

    def seconds(self) -> tuple[float, dict[str, float]]:
        """Median seconds of the step and of each stage that has events."""
        steps: list[float] = []
        stages: dict[str, list[float]] = {}
        for _ in range(self.accelerator.runs):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self._run()
            end.record()
            torch.cuda.synchronize()
            steps.append(start.elapsed_time(end) / 1e3)
            if self.stages.is_timed:
                for name, seconds in self.stages.seconds().items():
                    stages.setdefault(name, []).append(seconds)
        return statistics.median(steps), {name: statistics.median(values) for name, values in stages.items()}
