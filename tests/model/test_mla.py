"""Rotary angles worked out: attention alone would not notice if all positions were off by the same."""

from __future__ import annotations

import math

import pytest
import torch

from batchinfer.model.mla import RotaryAngles
from batchinfer.model.rope_config import RopeConfig
from batchinfer_kernels.reference import rows


@pytest.mark.parametrize("theta", [100.0, 10000.0])
def test_pairs_turn_by_their_frequency_per_position_from_nothing_at_the_first(theta):
    angles = RotaryAngles(RopeConfig(theta=theta), 4, torch.device("cpu"), rows.cos_sin)
    cos, sin = angles.at(torch.tensor([0, 1, 7]))
    turned = [[position / theta**power for power in (0.0, 0.5)] for position in (0, 1, 7)]
    assert torch.allclose(cos, torch.tensor([[math.cos(angle) for angle in pair] for pair in turned]), atol=1e-6)
    assert torch.allclose(sin, torch.tensor([[math.sin(angle) for angle in pair] for pair in turned]), atol=1e-6)
