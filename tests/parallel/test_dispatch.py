"""The expert exchange of a single rank: the oracle for every other one."""

from __future__ import annotations

import pytest
import torch

from batchinfer.parallel.dispatch import LocalDispatcher, count_rows, sum_per_token
from batchinfer.parallel.row_format import RowFormat
from support.placed_rows import placed


def random_exchange(seed, num_tokens=23, topk=3, num_experts=7, hidden=5):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hidden, generator=generator)
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=-1)[:, :topk]
    return x, ids, torch.rand(num_tokens, topk, generator=generator)


def test_worked_example():
    # token 0 goes to experts 2 and 0, token 1 to experts 2 and 1; expert e answers with (e + 1) * its row
    x = torch.tensor([[1.0], [10.0]])
    ids = torch.tensor([[2, 0], [2, 1]])
    dispatcher = LocalDispatcher(num_experts=4)
    handle = dispatcher.dispatch(x, ids, torch.tensor([[0.5, 2.0], [1.0, 0.1]]))
    received = handle.wait()
    assert received.layout == "contiguous"
    assert received.scales is None
    assert received.x.tolist() == [[1.0], [10.0], [1.0], [10.0]]  # expert 0, expert 1, then expert 2 in token order
    assert received.num_rows_E.tolist() == [1, 1, 2, 0]
    answers = received.x * torch.tensor([[1.0], [2.0], [3.0], [3.0]])
    # token 0: 0.5 * 3 + 2 * 1, token 1: 1 * 30 + 0.1 * 20
    assert dispatcher.combine(answers, handle).wait().tolist() == [[3.5], [32.0]]


@pytest.mark.parametrize("seed", range(10))
def test_combine_undoes_dispatch_and_sums_in_ascending_k(seed):
    x, ids, weights = random_exchange(seed)
    dispatcher = LocalDispatcher(num_experts=7)
    handle = dispatcher.dispatch(x, ids, weights)
    received = handle.wait()
    expert_of_row = torch.repeat_interleave(torch.arange(7), received.num_rows_E)
    y = dispatcher.combine(received.x * (expert_of_row[:, None] + 1), handle).wait()
    expected = torch.zeros_like(x)
    for k in range(ids.shape[1]):
        expected = expected + weights[:, k, None] * (x * (ids[:, k, None] + 1))
    assert torch.equal(y, expected)
    assert y.dtype == torch.float32
    lying = placed(received.x * (expert_of_row[:, None] + 1))
    assert torch.equal(dispatcher.combine(lying, handle).wait(), y)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_rows_reach_the_experts_in_the_form_in_which_they_would_travel(dtype):
    x, ids, weights = random_exchange(2, hidden=130)
    plain = LocalDispatcher(num_experts=7).dispatch(x, ids, weights).wait()
    formed = LocalDispatcher(num_experts=7, row_format=RowFormat(dtype)).dispatch(x, ids, weights).wait()
    expected, expected_scales = RowFormat(dtype).unpack(RowFormat(dtype).pack(plain.x), 130)
    assert torch.equal(formed.x.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(formed.num_rows_E, plain.num_rows_E)
    if dtype == "fp8":
        assert torch.equal(formed.scales, expected_scales)
    else:
        assert formed.scales is None


def test_a_token_s_sum_does_not_depend_on_the_other_tokens():
    generator = torch.Generator().manual_seed(0)
    rows, weights = torch.randn(120, 37, generator=generator), torch.rand(40, 3, generator=generator)
    place = torch.randperm(120, generator=generator)
    together = sum_per_token(rows, place, weights)
    for t in range(40):
        alone = sum_per_token(rows[place[3 * t : 3 * t + 3]], torch.arange(3), weights[t : t + 1])
        assert torch.equal(alone[0], together[t])


def test_no_tokens_and_two_exchanges_under_way():
    dispatcher = LocalDispatcher(num_experts=7)
    none = dispatcher.dispatch(torch.zeros(0, 5), torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3))
    x, ids, weights = random_exchange(1)
    some = dispatcher.dispatch(x, ids, weights)
    assert none.wait().x.shape == (0, 5)
    assert none.wait().num_rows_E.tolist() == [0] * 7
    assert dispatcher.combine(none.wait().x, none).wait().shape == (0, 5)
    assert torch.allclose(dispatcher.combine(some.wait().x, some).wait(), x * weights.sum(1, keepdim=True))


def test_bfloat16_rows_are_summed_in_float32():
    rows = torch.tensor([[256.0], [1.0]], dtype=torch.bfloat16)  # bfloat16 has no 257
    assert sum_per_token(rows, torch.arange(2), torch.ones(1, 2)).tolist() == [[257.0]]


def test_counts_name_every_expert():
    assert count_rows(torch.tensor([3, 1, 3]), 5).tolist() == [0, 1, 0, 2, 0]
