"""Steps of both kinds, as a rank makes them, for models that are small or hold no values."""

from __future__ import annotations

from typing import Any

import torch

from batchinfer.model.step import PrefillSpan, StepInput


def decode_input(*, most_pages: int = 2) -> StepInput:
    """A token each of three requests, behind 70 and more."""
    kv_tokens = torch.tensor([70, 71, 72])
    return StepInput(
        tokens=torch.arange(3),
        positions=kv_tokens - 1,
        slots=torch.arange(3) * 64 + 5,
        logit_rows=torch.arange(3),
        page_table=(torch.arange(12).view(3, 4)[:, :2]).repeat(1, most_pages // 2),
        kv_tokens=kv_tokens,
    )


def prefill_input(**more: Any) -> StepInput:
    """A prompt of 70 tokens and the end of another, whose page is a copy."""
    return StepInput(
        tokens=torch.arange(80) % 50,
        positions=torch.cat([torch.arange(70), torch.arange(5, 15)]),
        slots=torch.arange(80),
        logit_rows=torch.tensor([69, 79]),
        prefill=(PrefillSpan(0, 70, 70, torch.tensor([0, 1])), PrefillSpan(70, 10, 15, torch.tensor([2]))),
        copy_from=torch.arange(5) + 128,
        copy_to=torch.arange(5) + 192,
        **more,
    )
