"""Rotary angles worked out: attention alone would not notice if all positions were off by the same."""

from __future__ import annotations

import math

import pytest
import torch

from batchinfer.model.rope_config import QueryScale, RopeConfig
from batchinfer.model.rotary_angles import RotaryAngles
from batchinfer_kernels.reference import rows


@pytest.mark.parametrize("theta", [100.0, 10000.0])
def test_pairs_turn_by_their_frequency_per_position_from_nothing_at_the_first(theta):
    angles = RotaryAngles(RopeConfig(theta=theta), 4, torch.device("cpu"), rows.cos_sin)
    cos, sin, query_scale = angles.at(torch.tensor([0, 1, 7]))
    assert query_scale is None
    turned = [[position / theta**power for power in (0.0, 0.5)] for position in (0, 1, 7)]
    assert torch.allclose(cos, torch.tensor([[math.cos(angle) for angle in pair] for pair in turned]), atol=1e-6)
    assert torch.allclose(sin, torch.tensor([[math.sin(angle) for angle in pair] for pair in turned]), atol=1e-6)


def test_queries_grow_by_one_factor_per_window_of_positions():
    #  positions   0 … 99   100 … 199   200 … 299   …   1000 (a guess behind the model's window)
    #  factor         1     1 + β ln 2  1 + β ln 3      1 + β ln 11
    scale = QueryScale(beta=0.1, window=100, num_windows=1000 // 100 + 2)
    angles = RotaryAngles(RopeConfig(query_scale=scale), 4, torch.device("cpu"), rows.cos_sin)
    positions = torch.tensor([0, 99, 100, 199, 200, 1000])
    expected = [1.0, 1.0, *(1 + 0.1 * math.log(number) for number in (2, 2, 3, 11))]
    found = angles.at(positions).query_scale
    assert found is not None
    assert found.dtype == torch.float32
    assert found.tolist() == torch.tensor(expected).tolist()
    assert torch.equal(angles.at(positions[3:4]).query_scale, found[3:4])
