"""What a rank does with orders of its controller."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.model.transformer import Transformer
from batchinfer.protocol.feed import Inbox
from batchinfer.protocol.messages import ExpertSlots
from batchinfer.rank.context import RankContext
from batchinfer.rank.load import _placements
from batchinfer.rank.worker import RankWorker
from support.paths import RANDOM_MODEL

SLOTS = ExpertSlots([[0, 1, 0, 2]], [[0.3, 1.0, 0.7, 1.0]])


class Feed:
    """One order after the other, an order to leave at the end."""

    def __init__(self, *inboxes: Inbox):
        self._inboxes = [*inboxes, Inbox(leave=True)]

    def receive(self, wait_s=0.0):
        return self._inboxes.pop(0)

    def want_requests(self):
        pass


def test_a_rank_moves_its_experts_once_when_it_is_told_where_to():
    model = Transformer.load(RANDOM_MODEL, dtype=torch.float32)
    context = RankContext(model, load_tokenizer(RANDOM_MODEL), num_pages=4, prefill_tokens=64, decode_requests=4)
    placed = []
    RankWorker(context, place_experts=placed.append).run(Feed(Inbox(), Inbox(expert_slots=SLOTS), Inbox()))
    assert placed == [SLOTS]


def test_a_rank_takes_slots_and_shares_as_it_is_told():
    (placement,) = _placements(SLOTS, 3, SimpleNamespace(size=2))
    assert placement.expert_of_slot == (0, 1, 0, 2)
    assert placement.share_of_slot == (0.3, 1.0, 0.7, 1.0)
    assert placement.experts_of_rank(1) == (0, 2)
