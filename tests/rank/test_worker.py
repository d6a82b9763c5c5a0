"""A rank's reactions to orders of its controller."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.model.fused.graph_size import GraphSize
from batchinfer.model.fused.graphs import DecodeGraphs
from batchinfer.model.transformer import Transformer
from batchinfer.protocol.feed import Inbox
from batchinfer.protocol.messages import ExpertSlots
from batchinfer.rank.context import RankContext
from batchinfer.rank.load import _placements
from batchinfer.rank.worker import RankWorker, count_experts
from support.paths import RANDOM_MODEL

SLOTS = ExpertSlots([[0, 1, 0, 2]], [[0.3, 1.0, 0.7, 1.0]], 3)


class Feed:
    """One order after the other, an order to leave at the end; keeps what the rank says."""

    def __init__(self, *inboxes: Inbox):
        self._inboxes = [*inboxes, Inbox(leave=True)]
        self.said = []

    def receive(self, wait_s=0.0):
        return self._inboxes.pop(0)

    def ask_for_requests(self, num_pages):
        pass

    def send_experts(self):
        self.said.append("counts")

    def send_calibrated(self, num_tokens, tokens):
        self.said.append((num_tokens, tokens))

    def send_placed(self, seconds):
        self.said.append("placed")


def context(**settings):
    model = Transformer.load(RANDOM_MODEL, dtype=torch.float32)
    sizes = {"num_pages": 4, "prefill_tokens": 64, "decode_requests": 4, **settings}
    return RankContext(model, load_tokenizer(RANDOM_MODEL), **sizes)


def test_a_rank_moves_its_experts_once_when_it_is_told_where_to():
    placed = []
    feed = Feed(Inbox(), Inbox(expert_slots=SLOTS), Inbox())
    worker = RankWorker(context(), place_experts=placed.append)
    assert worker.telemetry.expert_counts().placement == 0
    worker.run(feed)
    assert placed == [SLOTS]
    # earlier counts are reported first, and counting restarts
    assert feed.said == ["counts", "placed"]
    assert worker.telemetry.expert_counts().placement == SLOTS.placement


def test_graphs_end_when_experts_move():
    rank, graphs, size = context(), DecodeGraphs(4, lambda work: work), GraphSize(1, 4, True, False)
    vars(rank)["graphs"] = graphs  # as on a GPU
    graphs._graphs[size] = SimpleNamespace()
    RankWorker(rank, place_experts=lambda slots: None).run(Feed(Inbox(), Inbox(expert_slots=SLOTS)))
    assert not graphs.has(size), "it would send rows to where experts were"


def test_a_calibration_counts_every_token_in_every_layer_and_is_of_no_step():
    rank = context()
    pieces = [[9, 17, 33], [40], [7, 7, 8, 200, 5]]
    worker, feed = RankWorker(rank), Feed(Inbox(calibrate=pieces))
    worker.run(feed)
    ((num_tokens, counts),) = feed.said
    assert num_tokens == 9
    topk = rank.model.config.num_experts_per_tok
    assert [sum(of_layer) for of_layer in counts] == [9 * topk] * rank.model.num_moe_layers
    alone = np.sum([count_experts(rank, [piece])[1] for piece in pieces], axis=0)
    assert counts == alone.tolist()
    assert not any(map(sum, worker.telemetry.expert_counts().rows.values()))


def test_a_calibration_runs_what_fits_a_step_and_the_pages():
    assert count_experts(context(), [[9] * 30, [9] * 30, [9] * 30])[0] == 60
    assert count_experts(context(num_pages=2), [[9], [8], [7]])[0] == 2
    assert count_experts(context(), [])[0] == 0


def test_a_rank_takes_slots_and_shares_as_it_is_told():
    (placement,) = _placements(SLOTS, 3, SimpleNamespace(size=2))
    assert placement.expert_of_slot == (0, 1, 0, 2)
    assert placement.share_of_slot == (0.3, 1.0, 0.7, 1.0)
    assert placement.experts_of_rank(1) == (0, 2)
