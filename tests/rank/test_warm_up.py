"""Steps before the first real one: how many tokens they have, and that nothing of them is left."""

from __future__ import annotations

import math

import pytest
import torch

from batchinfer.model.config import load_model_config
from batchinfer.model.rotary_angles import RotaryAngles, rope_cos_sin, rope_frequencies
from batchinfer.model.transformer import Transformer
from batchinfer.rank import warm_up as warming
from batchinfer.rank.warm_up import warm_up
from batchinfer_kernels.reference import rows as reference_rows
from support.checkpoints import make_checkpoint
from support.paged_steps import PagedRequests


class Watched:
    """A model that notes how many tokens its steps have."""

    def __init__(self, model):
        self.model, self.sizes = model, []
        self.config, self.dtype = model.config, model.dtype

    def new_pages(self, *sizes):
        return self.model.new_pages(*sizes)

    def forward(self, step, pages):
        self.sizes.append(len(step.tokens))
        return self.model.forward(step, pages)


def first_logits(model):
    requests = PagedRequests(model, [torch.arange(70)], max_new_tokens=1)
    requests.prefill([0], (1000,))
    return requests.all_logits(0)


@pytest.mark.parametrize(
    ("most_tokens", "seconds", "sizes"),
    [(600, math.inf, [64, 512, 600]), (512, math.inf, [64, 512]), (20, math.inf, [20]), (600, 0.0, [64])],
)
def test_steps_grow_while_they_are_short_and_leave_nothing_behind(most_tokens, seconds, sizes, tmp_path, monkeypatch):
    make_checkpoint(tmp_path)
    expected = first_logits(Transformer.load(tmp_path, dtype=torch.float32))
    watched = Watched(Transformer.load(tmp_path, dtype=torch.float32))
    monkeypatch.setattr(warming, "MOST_S", seconds)
    warm_up(watched, most_tokens)
    assert watched.sizes == sizes
    assert torch.equal(first_logits(watched.model), expected)


def test_rotary_angles_stay_what_they_are_however_far_positions_reach(tmp_path):
    make_checkpoint(tmp_path, "v3-yarn")
    config = load_model_config(tmp_path)
    rope, width = config.attention.rope, config.attention.rotary_dim
    angles = RotaryAngles(rope, width, torch.device("cpu"), reference_rows.cos_sin)
    few = torch.tensor([5, 0, 5, 63])
    first = angles.at(few)
    for positions in (
        torch.tensor([], dtype=torch.int64),
        torch.tensor([1023]),
        torch.tensor([7, 1024]),
        torch.arange(5000),
    ):
        expected = rope_cos_sin(positions, rope_frequencies(rope, width), rope, reference_rows.cos_sin)
        for got, wanted in zip(angles.at(positions)[:2], expected, strict=True):
            assert got.shape == (len(positions), width // 2)
            assert torch.equal(got, wanted)
    assert all(torch.equal(again, before) for again, before in zip(angles.at(few)[:2], first[:2], strict=True))
