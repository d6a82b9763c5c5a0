"""Agreement of a group's ranks on graphs: on the same size, recorded in the same step, or on none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batchinfer.config import PAGE_TOKENS
from batchinfer.model.fused.graph_size import DecodeBatch, GraphSize, num_filler_pages
from batchinfer.model.fused.graphs import DecodeGraphs
from batchinfer.model.step import StepHalves, StepInput
from batchinfer.model.transformer import Transformer
from batchinfer.parallel.spans import SpanLog
from batchinfer.rank.decode_table import decode_rows
from batchinfer.rank.step_vote import CANNOT, NO_MEMORY, TOO_LARGE, Agreed, Kind, StepVote, agree
from support.paths import RANDOM_MODEL
from support.plain_rows import skip_unless_equal

MOST = 40
FILLER = 20  # the first of the pages of rows that fill up


class Mesh:
    """A group of which all votes are known."""

    def __init__(self, votes, rank):
        self.votes, self.rank, self.size = votes, rank, len(votes)

    def agree(self, values):
        assert values == self.votes[self.rank].to_ints()
        return [vote.to_ints() for vote in self.votes]


class Group:
    """Ranks with separate graphs, which record the sizes that they agree on."""

    def __init__(self, num_ranks):
        self.graphs = [DecodeGraphs(FILLER, lambda work: work, most_rows=MOST) for _ in range(num_ranks)]

    def step(self, *batches, overlap=False) -> Agreed:
        """Return the step that all ranks agree on; record new sizes."""
        votes = [
            StepVote(decode=batch.num_requests > 0, fills_both_halves=batch.num_requests > 1, batch=batch)
            for batch in batches
        ]
        found = {
            agree(Mesh(votes, rank), votes[rank], overlap=overlap, graphs=graphs)
            for rank, graphs in enumerate(self.graphs)
        }
        (agreed,) = found
        assert agreed.kind is Kind.DECODE
        if agreed.graph is not None:
            for graphs in self.graphs:
                graphs._graphs.setdefault(agreed.graph, None)
        return agreed


def batch(num_requests, num_pages=1, **changes) -> DecodeBatch:
    return DecodeBatch(num_requests, num_pages, 1, 0, 1, 1)._replace(**changes)


@pytest.fixture(scope="module")
def model():
    model = Transformer.load(RANDOM_MODEL, dtype=torch.float32, backend="reference")
    skip_unless_equal(model)
    return model


def test_votes_arrive_as_they_were_sent():
    vote = StepVote(decode=True, place=True, batch=DecodeBatch(300, 17, 1, 1, 1, 0))
    assert StepVote.of_ints(vote.to_ints()) == vote


def test_the_largest_batch_of_the_group_decides_the_size():
    group = Group(3)
    # 5 requests of at most 3 pages, none, 9 of 1: 16 rows of 4 pages
    agreed = group.step(batch(5, 3), batch(0, 0, sees_all=0), batch(9))
    assert (agreed.graph, agreed.records) == (GraphSize(16, 4, True, False), True)
    # the same size with others in it is there
    assert not group.step(batch(0, 0), batch(16, 4), batch(1)).records
    assert group.step(batch(17), batch(1), batch(1, 5)).graph == GraphSize(32, 8, True, False)
    # no graph is larger than what a rank should decode at most
    assert group.step(batch(MOST), batch(1), batch(1)).graph == GraphSize(MOST, 4, True, False)
    assert group.step(batch(1), batch(MOST + 1), batch(1)).no_graph == TOO_LARGE
    in_halves = group.step(batch(1), batch(MOST + 1), batch(1), overlap=True).graph
    assert in_halves == GraphSize(32, 4, True, False, in_pairs=True)


def test_halves_have_a_size_of_their_own():
    group = Group(2)
    assert group.step(batch(5), batch(1), overlap=True).graph == GraphSize(4, 4, True, False, in_pairs=True)
    assert group.step(batch(4), batch(1)).graph == GraphSize(4, 4, True, False, in_pairs=False)


def test_rows_of_both_kinds_on_different_ranks_take_the_graph_of_both():
    group = Group(2)
    assert group.step(batch(1), batch(1, sees_all=0, chooses=1)).graph[2:4] == (True, True)
    assert group.step(batch(1, sees_all=0, chooses=1), batch(0, 0, sees_all=0)).graph[2:4] == (False, True)
    assert GraphSize(1, 4, True, True).position_range(64) == (0, 64)
    assert GraphSize(1, 4, False, True).position_range(64) == (64, 64)
    assert GraphSize(1, 4, True, False).position_range(64) == (0, 0)


def test_one_rank_that_cannot_keeps_all_from_a_graph():
    group = Group(2)
    assert group.step(batch(1), batch(2, captures=0)) == Agreed(Kind.DECODE, False, no_graph=NO_MEMORY)
    assert group.step(batch(1, captures=0), batch(2)).no_graph == NO_MEMORY
    assert group.step(batch(1), batch(2)).records
    # what all have needs no memory
    assert group.step(batch(2), batch(1, captures=0)).graph is not None
    assert group.step(batch(2), DecodeBatch()).no_graph == CANNOT
    votes = [StepVote(decode=True, batch=batch(2)), StepVote(decode=True)]
    assert agree(Mesh(votes, 1), votes[1], overlap=False).no_graph == CANNOT


def test_after_experts_have_moved_all_graphs_are_new():
    group = Group(2)
    group.step(batch(2), batch(1))
    for graphs in group.graphs:
        graphs.clear()
    assert group.step(batch(2), batch(1)).records


@pytest.mark.parametrize(
    ("most", "num_ranks", "expected"), [(256, 1, 1), (5, 4, 1), (64, 2, 1), (65, 2, 2), (200, 2, 4)]
)
def test_every_filler_row_of_a_group_has_a_slot(most, num_ranks, expected):
    assert num_filler_pages(most, num_ranks) == expected


def rows(kv_tokens, first_page=0) -> StepInput:
    """Return a row for requests of these KV lengths, each with separate pages."""
    num_pages = [-(-length // PAGE_TOKENS) for length in kv_tokens]
    pages = np.zeros((len(kv_tokens), max(num_pages, default=1)), dtype=np.int64)
    for row, count in enumerate(num_pages):
        pages[row, :count] = first_page + np.arange(count)
        first_page += count
    return decode_rows(np.arange(3, 3 + len(kv_tokens)), np.array(kv_tokens, dtype=np.int64), pages)


def run(model, graphs, step, size, pages):
    return graphs.schedule(size).run(model, step, pages, SpanLog())


@pytest.mark.parametrize("lengths", [[], [70, 3, 130]])
def test_a_rank_with_nothing_to_decode_runs_filler_that_nobody_counts(model, lengths):
    pages = model.new_pages(FILLER + 1)
    graphs, size = DecodeGraphs(FILLER, lambda work: work), GraphSize(8, 4, True, False)
    before = pages.clone()
    for _ in range(2):  # recorded, replayed
        output = run(model, graphs, rows(lengths), size, pages)
        assert len(output.logits) == len(lengths)
        topk, num_layers = model.config.num_experts_per_tok, model.num_moe_layers
        assert int(output.expert_counts.sum()) == len(lengths) * topk * num_layers
    used = sum(-(-length // PAGE_TOKENS) for length in lengths)
    assert torch.equal(pages[:, used:FILLER], before[:, used:FILLER]), "filler writes to its own pages"


def test_halves_in_one_graph_have_the_results_of_plain_halves(model):
    pages = model.new_pages(FILLER + 1)
    pages.normal_(generator=torch.Generator().manual_seed(1))
    plain_pages = pages.clone()
    graphs, size = DecodeGraphs(FILLER, lambda work: work), GraphSize(4, 4, True, False, in_pairs=True)
    for first, second in ([70, 3, 130], [9]), ([5, 6], [80, 66]), ([70], []), ([], []):
        step = StepHalves(rows(first), rows(second, first_page=8))
        output = run(model, graphs, step, size, pages)
        expected = model.forward(step, plain_pages)
        assert torch.equal(output.logits, expected.logits)
        assert torch.equal(output.expert_counts, expected.expert_counts)
        assert torch.equal(pages[:, :FILLER], plain_pages[:, :FILLER])
    assert graphs.has(size)
