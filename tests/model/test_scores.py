"""Log-probabilities of given tokens: the same however many rows of logits are made at once, and ties in order."""

import pytest
import torch

from batchinfer.model.scores import ROWS, _largest_keys, most_likely, score
from batchinfer_kernels.reference import rows as reference_rows


def test_scores_are_those_of_a_softmax_and_few_rows_are_made_at_once():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3 * ROWS + 5, 40, generator=generator)
    tokens = torch.randint(40, (len(logits),), generator=generator)
    made = []

    def logits_of(part):
        made.append(len(logits[part]))
        return logits[part]

    found = score(logits_of, 0, tokens, reference_rows.log_sum_exp, 3)
    assert made == [ROWS, ROWS, ROWS, 5]
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(found.logprobs, expected[torch.arange(len(tokens)), tokens])
    torch.testing.assert_close(found.top_logprobs, expected.topk(3).values)
    assert torch.equal(found.top_tokens, expected.topk(3).indices)


@pytest.mark.parametrize("count", range(0, 9))
def test_equal_logits_are_told_by_their_ids_however_many_are_asked_for(count):
    generator = torch.Generator().manual_seed(count)
    logits = torch.randint(3, (50, 8), generator=generator).float()
    tokens, values = most_likely(logits, count)
    for row, (of_row, chosen) in enumerate(zip(tokens.tolist(), values.tolist(), strict=True)):
        in_order = sorted(range(8), key=lambda token: (-logits[row, token].item(), token))
        assert of_row == in_order[:count]
        assert chosen == logits[row, of_row].tolist()


def test_no_more_tokens_are_told_than_there_are():
    assert most_likely(torch.zeros(2, 3), 9)[0].tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("count", [0, 1, 5, 40])
def test_on_a_device_they_are_found_by_keys_and_are_the_same(count):
    generator = torch.Generator().manual_seed(count)
    logits = torch.cat([torch.randn(20, 40, generator=generator), torch.randint(-2, 3, (20, 40)) * 1.5])
    logits[3, 7], logits[4, 2], logits[5] = -torch.inf, torch.inf, 0.0
    logits[6], logits[6, ::2] = 0.0, -0.0
    for ours, expected in zip(_largest_keys(logits, count), most_likely(logits, count), strict=True):
        assert torch.equal(ours, expected)
