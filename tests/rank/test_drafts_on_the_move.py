"""Drafted tokens of requests that pause or go on elsewhere: equal rows, whatever a rank still has of their drafts."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from batchinfer.model.transformer import Transformer
from batchinfer.protocol.messages import Adoption
from batchinfer.rank import drafter
from support.drafted import PLAIN_WAYS, TOKENIZER, WAYS, Always, InTurn, counts, everything, sample_requests, with_mtp
from support.one_rank import GivingAway, Taking, run_rank
from support.paths import SAMPLE_MODEL


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer.load(SAMPLE_MODEL, dtype=torch.float32, mtp=True)


@pytest.mark.parametrize("ways", [WAYS, PLAIN_WAYS], ids=["all ways", "ways of one call"])
@pytest.mark.parametrize("make_rule", [lambda: Always(2), InTurn], ids=["two", "in turn"])
def test_requests_given_away_with_drafts_go_on_elsewhere(model, make_rule, ways, monkeypatch):
    monkeypatch.setattr(drafter, "_MICROSECONDS", 0)  # a step in each call, however quick this machine is
    requests = sample_requests(24, ways=ways, max_tokens=40)

    def go_on(adoptions: list[Adoption]) -> Taking:
        # room for two of them: the others wait until pages come free
        taking = Taking(adoptions)
        requests = [adoption.request for adoption in adoptions]
        return run_rank(model, TOKENIZER, requests, feed=taking, make_drafter=with_mtp(Always(3)), num_pages=22)

    plain = run_rank(model, TOKENIZER, requests, decode_requests=6)
    feed = GivingAway(requests, go_on)
    run_rank(model, TOKENIZER, requests, feed=feed, decode_requests=6, make_drafter=with_mtp(make_rule()))
    assert everything(feed) == everything(plain)
    assert feed.num_given > 4
    assert counts(feed)[0] > 0
    assert counts(feed.taken[-1])[0] > 0


@pytest.mark.parametrize("ways", [WAYS, PLAIN_WAYS], ids=["all ways", "ways of one call"])
def test_requests_that_pause_for_the_prompts_of_others_keep_their_drafts(model, ways, monkeypatch):
    """Prompts are cut to fit small prefill steps, few pages make requests wait, and slots go from one to the next."""
    monkeypatch.setattr(drafter, "_MICROSECONDS", 10**9)
    requests = sample_requests(24, ways=ways, max_tokens=40)
    plain = run_rank(model, TOKENIZER, requests)
    drafted = run_rank(
        *(model, TOKENIZER, requests),
        make_drafter=with_mtp(Always(3)),
        num_pages=30,
        prefill_tokens=64,
        share_prefixes=False,
        decode_requests=3,
    )
    assert everything(drafted) == everything(plain)
    kinds = [record.kind for record in drafted.records]
    assert sum(one != other for one, other in pairwise(kinds)) > 10
    assert counts(drafted)[1] > 0
