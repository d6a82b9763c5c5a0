"""Experts spread over ranks against the oracle, one rank that has them all: equal bit for bit, whatever the placement.

Ranks are threads (exchanges.py). Experts are functions of a row alone, so a row's answer must be the same wherever it
is computed; each rank's sums are then compared with those of a LocalDispatcher over its own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from batchinfer.parallel.all_to_all import AllToAllDispatcher
from batchinfer.parallel.dispatch import Dispatcher, ExpertInput, LocalDispatcher
from batchinfer.parallel.overlap import run_decode_pair, run_prefill_pair, run_to_end
from batchinfer.parallel.placement import Placement
from batchinfer.parallel.row_format import RowFormat
from batchinfer.records import PeerLostError
from batchinfer_kernels import reference
from batchinfer_kernels.reference.gating import GateRule
from support.exchanges import ThreadedMesh
from support.placed_rows import placed
from support.random_placements import random_placement

# form of the rows -> dtype of the model that sends them
MODEL_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.bfloat16}


@dataclass(frozen=True)
class Tokens:
    """Rows of one rank to send."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def random_tokens(random, num_tokens, *, topk=3, num_experts=7, hidden=5, dtype="float32"):
    generator = torch.Generator().manual_seed(int(random.integers(2**31)))
    return Tokens(
        torch.randn(num_tokens, hidden, generator=generator).to(MODEL_DTYPE[dtype]),
        torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=-1)[:, :topk],
        torch.rand(num_tokens, topk, generator=generator),
    )


def answer(received: ExpertInput, experts, dtype: torch.dtype) -> torch.Tensor:
    """Return expert e's result z / (1 + |z|) with z = (e + 1) × row: not linear, and independent of other rows."""
    assert received.layout == "contiguous"
    rows = received.x.float()
    if received.scales is not None:
        rows = rows * received.scales.repeat_interleave(128, dim=1)[:, : rows.shape[1]]
    expert_of_row = torch.repeat_interleave(torch.tensor(experts), received.num_rows_E)
    z = rows * (expert_of_row[:, None] + 1)
    return (z / (1 + z.abs())).to(dtype)


def layer(dispatcher: Dispatcher, experts, tokens: Tokens, num_layers=1, lying=lambda y: y):
    """Layers of experts as the model runs them: a generator that can be left while rows travel."""
    x = tokens.x
    for _ in range(num_layers):
        handle = dispatcher.dispatch(x, tokens.ids, tokens.weights)
        yield
        y = answer(handle.wait(), experts, x.dtype)
        future = dispatcher.combine(lying(y), handle)
        yield
        sums = future.wait()
        x = sums.to(x.dtype)
    return sums


def alone(tokens: Tokens, num_experts, dtype="float32", num_layers=1):
    dispatcher = LocalDispatcher(num_experts, RowFormat(dtype))
    return run_to_end(layer(dispatcher, range(num_experts), tokens, num_layers))


def spread(placement: Placement, tokens_of_rank, dtype="float32", **form):
    """The sums of each rank."""

    def work(exchange):
        dispatcher = AllToAllDispatcher(exchange, placement, RowFormat(dtype))
        own = placement.experts_of_rank(exchange.rank), tokens_of_rank[exchange.rank]
        return run_to_end(layer(dispatcher, *own, **form))

    return ThreadedMesh(placement.num_ranks).run(work)


def check(placement: Placement, tokens_of_rank, dtype="float32", **form):
    results = spread(placement, tokens_of_rank, dtype, **form)
    for rank, (result, tokens) in enumerate(zip(results, tokens_of_rank, strict=True)):
        assert result.dtype == torch.float32
        assert torch.equal(result, alone(tokens, placement.num_experts, dtype)), f"rank {rank}"


# --- what travels -----------------------------------------------------------------------------------------------------


def test_worked_example():
    # rank 0 holds experts 0 1, rank 1 experts 2 3
    #   rank 0   token 1.0  to experts 2 0
    #   rank 1   token 10.0 to experts 2 3, token 100.0 to experts 0 2
    tokens_of_rank = [
        Tokens(torch.tensor([[1.0]]), torch.tensor([[2, 0]]), torch.tensor([[0.5, 2.0]])),
        Tokens(torch.tensor([[10.0], [100.0]]), torch.tensor([[2, 3], [0, 2]]), torch.tensor([[1.0, 0.25]] * 2)),
    ]
    placement = Placement.in_order(4, num_ranks=2)

    def work(exchange):
        dispatcher = AllToAllDispatcher(exchange, placement, RowFormat("float32"))
        tokens = tokens_of_rank[exchange.rank]
        handle = dispatcher.dispatch(tokens.x, tokens.ids, tokens.weights)
        received = handle.wait()
        # expert e answers (e + 1) × row
        factors = torch.repeat_interleave(torch.tensor(placement.experts_of_rank(exchange.rank)), received.num_rows_E)
        sums = dispatcher.combine(received.x * (factors[:, None] + 1), handle).wait()
        return received.x.flatten().tolist(), received.num_rows_E.tolist(), sums.flatten().tolist()

    first, second = ThreadedMesh(2).run(work)
    # sorted by expert, within one by rank and token        sums: 0.5 × 3 + 2 × 1
    assert first == ([1.0, 100.0], [2, 0], [3.5])
    # expert 2: one row of rank 0, two of rank 1; expert 3     1 × 30 + 0.25 × 40, 1 × 100 + 0.25 × 300
    assert second == ([1.0, 10.0, 100.0, 10.0], [3, 1], [40.0, 175.0])


def test_arrival_times_are_known_after_waiting():
    tokens = random_tokens(np.random.default_rng(0), 4)

    def work(exchange):
        dispatcher = AllToAllDispatcher(exchange, Placement.in_order(7, 1), RowFormat("float32"))
        handle = dispatcher.dispatch(tokens.x, tokens.ids, tokens.weights)
        assert handle.arrived_s is None
        future = dispatcher.combine(handle.wait().x, handle)
        assert future.arrived_s is None
        future.wait()
        return handle.arrived_s, future.arrived_s

    ((dispatched_s, combined_s),) = ThreadedMesh(1).run(work)
    assert 0 < dispatched_s <= combined_s


# --- equal to one rank that has all experts ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", MODEL_DTYPE)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_sums_equal_those_of_one_rank_bit_for_bit(num_ranks, dtype, seed):
    random = np.random.default_rng([seed, num_ranks])
    hidden = int(random.choice([1, 5, 128, 130, 300]))
    topk = int(random.integers(1, 7))
    # some ranks have nothing to send
    num_tokens = [int(random.choice([0, 1, 2, 40], p=[0.25, 0.1, 0.15, 0.5])) for _ in range(num_ranks)]
    tokens_of_rank = [
        random_tokens(random, count, topk=topk, num_experts=24, hidden=hidden, dtype=dtype) for count in num_tokens
    ]
    check(Placement.in_order(24, num_ranks), tokens_of_rank, dtype)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", MODEL_DTYPE)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_redundant_experts_change_no_bit(num_ranks, dtype, seed):
    random = np.random.default_rng([seed, num_ranks])
    num_experts = int(random.integers(3, 20))
    num_redundant = -num_experts % num_ranks + num_ranks * int(random.integers(0, 3))
    placement = random_placement(random, num_experts, num_ranks, num_redundant)
    tokens_of_rank = [
        random_tokens(random, int(random.integers(0, 30)), num_experts=num_experts, hidden=20, dtype=dtype)
        for _ in range(num_ranks)
    ]
    check(placement, tokens_of_rank, dtype)


@pytest.mark.parametrize("dtype", MODEL_DTYPE)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_results_are_sent_from_where_they_lie(num_ranks, dtype):
    random = np.random.default_rng(0)
    tokens_of_rank = [random_tokens(random, 9 * rank, hidden=20, dtype=dtype) for rank in range(num_ranks)]
    placement = random_placement(random, 7, num_ranks, num_redundant=-7 % num_ranks + num_ranks)
    check(placement, tokens_of_rank, dtype, lying=placed)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("busy", [None, 0, -1], ids=["nobody", "first", "last"])
def test_at_most_one_rank_has_tokens(busy, num_ranks):
    random = np.random.default_rng(0)
    tokens_of_rank = [random_tokens(random, 0, num_experts=8) for _ in range(num_ranks)]
    if busy is not None:
        tokens_of_rank[busy] = random_tokens(random, 30, num_experts=8)
    check(Placement.in_order(8, num_ranks), tokens_of_rank)


def test_all_tokens_want_the_experts_of_one_rank():
    random = np.random.default_rng(0)
    tokens_of_rank = [random_tokens(random, 20, topk=2, num_experts=2) for _ in range(4)]
    check(Placement.in_order(8, num_ranks=4), tokens_of_rank)


# --- the shapes that DeepSeek-V3 is served with -----------------------------------------------------------------------


@pytest.mark.parametrize(("num_ranks", "most_tokens"), [(32, 64), (144, 16)])
@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_256_experts_in_288_slots(num_ranks, most_tokens, dtype):
    random = np.random.default_rng(num_ranks)
    generator = torch.Generator().manual_seed(num_ranks)
    bias_E = 0.1 * torch.randn(256, generator=generator)
    tokens_of_rank = []
    for _ in range(num_ranks):
        num_tokens = int(random.integers(most_tokens // 2, most_tokens + 1))
        ids, weights = reference.gate(
            torch.randn(num_tokens, 256, generator=generator),
            bias_E,
            GateRule("noaux_tc", topk=8, num_groups=8, topk_groups=4, normalize=True, scale=2.5),
        )
        x = torch.randn(num_tokens, 32, generator=generator).to(MODEL_DTYPE[dtype])
        tokens_of_rank.append(Tokens(x, ids, weights))
    check(random_placement(random, 256, num_ranks, num_redundant=32), tokens_of_rank, dtype)


# --- two micro-batches in turn ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("run_pair", [run_prefill_pair, run_decode_pair])
def test_two_micro_batches_in_turn_equal_each_alone(run_pair, num_ranks, seed):
    num_layers = 3
    random = np.random.default_rng([seed, num_ranks])
    placement = random_placement(random, 10, num_ranks, num_redundant=-10 % num_ranks + num_ranks)
    tokens = [  # of each rank's two micro-batches, either of which may be empty
        [random_tokens(random, int(random.choice([0, 1, 17])), num_experts=10) for _ in range(2)]
        for _ in range(num_ranks)
    ]

    def work(exchange):
        # a dispatcher serves both micro-batches, as that of a model's layer does
        dispatcher = AllToAllDispatcher(exchange, placement, RowFormat("float32"))
        experts = placement.experts_of_rank(exchange.rank)
        return run_pair(*(layer(dispatcher, experts, half, num_layers) for half in tokens[exchange.rank]))

    for results, halves in zip(ThreadedMesh(num_ranks).run(work), tokens, strict=True):
        for result, half in zip(results, halves, strict=True):
            assert torch.equal(result, alone(half, 10, num_layers=num_layers))


# --- a rank is lost ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["dispatch", "combine"])
def test_a_lost_rank_is_noticed_by_all_that_wait_for_its_rows(stage):
    tokens = random_tokens(np.random.default_rng(0), 9, num_experts=6)
    placement = Placement.in_order(6, num_ranks=3)

    def work(exchange):
        dispatcher = AllToAllDispatcher(exchange, placement, RowFormat("float32"))
        points = layer(dispatcher, placement.experts_of_rank(exchange.rank), tokens)
        if exchange.rank == 1:
            if stage == "combine":
                next(points)
            exchange.close()
            return "lost"
        with pytest.raises(PeerLostError, match="rank 1 has ended"):
            run_to_end(points)
        return stage

    assert ThreadedMesh(3).run(work) == [stage, "lost", stage]
