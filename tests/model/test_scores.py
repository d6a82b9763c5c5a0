"""Log-probabilities of given tokens: the same however many rows of logits are made at once."""

import torch

from batchinfer.model.sampling import LogitOps
from batchinfer.model.scores import ROWS, score


def test_scores_are_those_of_a_softmax_and_few_rows_are_made_at_once():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3 * ROWS + 5, 40, generator=generator)
    tokens = torch.randint(40, (len(logits),), generator=generator)
    made = []

    def logits_of(part):
        made.append(len(logits[part]))
        return logits[part]

    found = score(logits_of, 0, tokens, 3, LogitOps())
    assert made == [ROWS, ROWS, ROWS, 5]
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(found.logprobs, expected[torch.arange(len(tokens)), tokens])
    torch.testing.assert_close(found.top_logprobs, expected.topk(3).values)
    assert torch.equal(found.top_tokens, expected.topk(3).indices)
