"""The exchange through DeepEP against the local one, with a stand-in for the library.

Nowhere else does a stand-in replace what is tested against; here it is right, because the library runs on GPUs only and
what can go wrong without one is how it is called: keywords, types, slots, where weights enter, who waits for what.
Whether the real library agrees with the stand-in (tests/support/deep_ep_stand_in.py) only a machine with GPUs can say.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
import torch

from batchinfer.config import load_job
from batchinfer.config.rank_layout import rank_places
from batchinfer.model.moe import MoeMlp, Routing, YieldPoint
from batchinfer.model.ops import Ops
from batchinfer.parallel.deepep.dispatcher import open_dispatchers, why_not
from batchinfer.parallel.dispatch import LocalDispatcher
from batchinfer.parallel.exchange_rules import DEEPEP as KINDS
from batchinfer.parallel.exchange_rules import check_group, check_rows
from batchinfer.parallel.placement import Placement
from batchinfer.parallel.row_format import RowFormat
from batchinfer.parallel.spans import MicroBatchSpans, SpanLog
from batchinfer.rank.load import load_model
from batchinfer.records import ConfigError
from batchinfer_kernels import reference
from support import deep_ep_stand_in
from support.deep_ep_stand_in import Group, World
from support.jobs import write_job, write_questions
from support.placed_rows import placed

HIDDEN, TOPK, NUM_EXPERTS, MAX_TOKENS = 2048, 3, 6, 20
SENDING = {
    "deepep": ["dispatch"],
    "deepep-v1": ["get_dispatch_layout", "dispatch"],
    "deepep-low-latency": ["low_latency_dispatch"],
}


@pytest.fixture(autouse=True)
def deep_ep(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", deep_ep_stand_in)
    return deep_ep_stand_in


def opened(kind, group, placements, dtype="bfloat16", **changes):
    options = {"max_tokens": MAX_TOKENS, "hidden": HIDDEN, "topk": TOPK, "device": torch.device("cpu")} | changes
    return open_dispatchers(kind, group, placements, RowFormat(dtype), **options)


def in_tiles(dispatcher, tile_rows=8):
    """Have rows arrive in whole tiles, as on a GPU."""
    dispatcher.tile_rows = tile_rows
    return dispatcher


def random_tokens(seed, num_tokens=MAX_TOKENS):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(dim=-1)[:, :TOPK]
    return x, ids, torch.rand(num_tokens, TOPK, generator=generator) + 0.1


def wide(x, scales):
    """The values of rows in float32."""
    return x.float() if scales is None else x.float() * scales.repeat_interleave(128, dim=-1)


def answer(received, experts):
    """Expert e answers (e + 1) × row in bfloat16, in the layout of the rows; what holds no row is answered with NaN."""
    x = wide(received.x, received.scales)
    factors = torch.tensor(experts, dtype=torch.float32) + 1
    if received.layout == "masked":
        is_row = torch.arange(x.shape[1]) < received.num_rows_E[:, None]
        return torch.where(is_row[:, :, None], factors[:, None, None] * x, torch.nan).bfloat16()
    if received.tokens_M is not None:
        x = x[received.tokens_M]
    y, start = torch.full_like(x, torch.nan), 0
    for factor, num_rows in zip(factors, received.num_rows_E.tolist(), strict=True):
        start += -start % received.tile_rows
        y[start : start + num_rows] = factor * x[start : start + num_rows]
        start += num_rows
    assert len(x) == start + -start % received.tile_rows
    return y.bfloat16()


def exchanged(dispatcher, tokens, experts, lying=lambda y: y):
    handle = dispatcher.dispatch(*tokens)
    return dispatcher.combine(lying(answer(handle.wait(), experts)), handle).wait()


def local_sums(tokens, dtype):
    """Return the sums without rounding, and the sums of absolute values, which bound the error of rounding."""
    dispatcher, experts = LocalDispatcher(NUM_EXPERTS, RowFormat(dtype)), range(NUM_EXPERTS)
    handle = dispatcher.dispatch(*tokens)
    received = handle.wait()
    factors = torch.tensor(experts, dtype=torch.float32).repeat_interleave(received.num_rows_E)[:, None] + 1
    rows = factors * wide(received.x, received.scales)
    return dispatcher.combine(rows, handle).wait(), dispatcher.combine(rows.abs(), handle).wait()


def assert_close(sums, tokens, dtype):
    expected, magnitude = local_sums(tokens, dtype)
    assert sums.dtype == torch.float32
    assert sums.shape == expected.shape
    # answers, weighted rows, partial sums and sums are each rounded to 8 bits, at most 2^-8 of their size
    assert ((sums - expected).abs() <= 4 * 2**-8 * magnitude).all()


@pytest.mark.parametrize("kind", KINDS)
def test_worked_example(kind):
    # token 0 goes to experts 4 and 0, token 1 to experts 4 and 1; expert e answers with (e + 1) * its row
    x = torch.tensor([[1.0], [8.0]]).bfloat16().expand(2, HIDDEN)
    tokens = x, torch.tensor([[4, 0], [4, 1]]), torch.tensor([[0.5, 2.0], [1.0, 0.25]])
    (dispatcher,) = opened(kind, Group(World(1), 0), [Placement.in_order(NUM_EXPERTS, 1)], topk=2)
    handle = dispatcher.dispatch(*tokens)
    received = handle.wait()
    assert received.num_rows_E.dtype == torch.int64
    assert received.num_rows_E.tolist() == [1, 1, 0, 0, 2, 0]
    assert (handle.arrived_s, received.scales) == (None, None)
    future = dispatcher.combine(answer(received, range(NUM_EXPERTS)), handle)
    # each weight enters once: 0.5 * 5 + 2 * 1 and 1 * 40 + 0.25 * 16
    assert future.wait().unique(dim=1).tolist() == [[4.5], [44.0]]
    assert future.arrived_s is None


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_equal_those_of_the_local_exchange(kind, dtype, num_ranks, seed):
    world = World(num_ranks)
    placement = Placement((5, 0, 1, 0, 2, 3, 4, 0), (1.0, 0.5, 1.0, 0.2, 1.0, 1.0, 1.0, 0.3), NUM_EXPERTS, num_ranks)
    # rank 1 has no tokens
    tokens = [random_tokens(10 * seed + rank, 0 if rank == 1 else MAX_TOKENS - 5 * rank) for rank in range(num_ranks)]

    def run(rank):
        (dispatcher,) = opened(kind, Group(world, rank), [placement], dtype)
        return exchanged(dispatcher, tokens[rank], placement.experts_of_rank(rank))

    with ThreadPoolExecutor(num_ranks) as threads:
        for rank, sums in enumerate(threads.map(run, range(num_ranks))):
            assert_close(sums, tokens[rank], dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("seed", range(3))
def test_rows_in_whole_tiles_have_the_same_sums(seed, dtype):
    world, placement = World(2), Placement.in_order(NUM_EXPERTS, 2)
    tokens = [random_tokens(10 * seed + rank, MAX_TOKENS - 5 * rank) for rank in range(2)]

    def run(rank):
        (dispatcher,) = opened("deepep", Group(world, rank), [placement], dtype)
        return exchanged(in_tiles(dispatcher), tokens[rank], placement.experts_of_rank(rank))

    with ThreadPoolExecutor(2) as threads:
        for rank, sums in enumerate(threads.map(run, range(2))):
            assert_close(sums, tokens[rank], dtype)


def test_tiles_are_those_of_the_grouped_product_and_scales_lie_as_it_reads_them():
    (dispatcher,) = opened("deepep", Group(World(1), 0), [Placement.in_order(NUM_EXPERTS, 1)], "fp8")
    received = in_tiles(dispatcher).dispatch(*random_tokens(0)).wait()
    assert received.scales.stride(0) == 1
    assert received.scales.stride(1) % 4 == 0
    # nothing runs on "meta" but the choice of a form
    (on_gpu,) = opened("deepep", Group(World(1), 0), [Placement.in_order(NUM_EXPERTS, 1)], device=torch.device("meta"))
    assert (dispatcher.tile_rows, on_gpu.tile_rows) == (8, 128)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "deepep-low-latency"])
def test_results_are_sent_from_where_they_lie(kind):
    placement, tokens = Placement.in_order(NUM_EXPERTS, 2), [random_tokens(rank) for rank in range(2)]

    def sums(lying):
        world = World(2)

        def run(rank):
            (dispatcher,) = opened(kind, Group(world, rank), [placement])
            return exchanged(dispatcher, tokens[rank], placement.experts_of_rank(rank), lying)

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(run, range(2)))

    for moved, placed_ones in zip(sums(lambda y: y), sums(placed), strict=True):
        assert torch.equal(moved, placed_ones)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_no_number_spoils_the_sums_of_no_other_token(kind):
    x, ids, weights = random_tokens(0)
    x[3] = torch.nan
    world, placement = World(2), Placement.in_order(NUM_EXPERTS, 2)

    def run(rank):
        (dispatcher,) = opened(kind, Group(world, rank), [placement])
        tokens = (x, ids, weights) if rank == 0 else random_tokens(1, 0)
        return exchanged(dispatcher, tokens, placement.experts_of_rank(rank))

    with ThreadPoolExecutor(2) as threads:
        sums = next(threads.map(run, range(2)))
    assert sums.isnan().any(dim=1).tolist() == [token == 3 for token in range(len(x))]


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_arrive_sorted_by_slot_in_the_form_that_was_asked_for(kind, dtype):
    tokens = random_tokens(0)
    (dispatcher,) = opened(kind, Group(World(1), 0), [Placement.in_order(NUM_EXPERTS, 1)], dtype)
    received = dispatcher.dispatch(*tokens).wait()
    expected = LocalDispatcher(NUM_EXPERTS, RowFormat(dtype)).dispatch(*tokens).wait()
    assert received.num_rows_E.tolist() == expected.num_rows_E.tolist()
    assert received.x.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float8_e4m3fn)
    assert received.layout == ("masked" if kind == "deepep-low-latency" else "contiguous")
    starts = expected.num_rows_E.cumsum(0) - expected.num_rows_E
    for slot, (start, num_rows) in enumerate(zip(starts.tolist(), expected.num_rows_E.tolist(), strict=True)):
        rows = slice(start, start + num_rows)
        block = (slot, slice(num_rows)) if received.layout == "masked" else rows
        if received.tokens_M is not None:
            block = received.tokens_M[rows]
        got = wide(received.x[block], None if received.scales is None else received.scales[block])
        want = wide(expected.x[rows], None if expected.scales is None else expected.scales[rows])
        assert sorted(got.tolist()) == sorted(want.tolist())  # DeepEP promises no order within a slot


@pytest.mark.parametrize("kind", KINDS)
def test_communication_is_waited_for_in_wait_and_not_before(kind):
    world = World(1)
    (dispatcher,) = opened(kind, Group(world, 0), [Placement.in_order(NUM_EXPERTS, 1)])
    del world.calls[:]
    handle = dispatcher.dispatch(*random_tokens(0))
    waiting = "hook" if kind == "deepep-low-latency" else "current_stream_wait"
    assert world.names() == SENDING[kind]
    y = answer(handle.wait(), range(NUM_EXPERTS))
    assert world.names() == [*SENDING[kind], waiting]
    future = dispatcher.combine(y, handle)
    assert world.names()[len(SENDING[kind]) + 1 :] == [SENDING[kind][-1].replace("dispatch", "combine")]
    future.wait()
    assert world.names()[len(SENDING[kind]) + 2 :] == [waiting]


@pytest.mark.parametrize("kind", KINDS)
def test_two_micro_batches_in_the_order_of_overlapped_decode(kind):
    world, placement = World(1), Placement.in_order(NUM_EXPERTS, 1)
    first, second = opened(kind, Group(world, 0), [placement, placement])
    tokens = [random_tokens(seed) for seed in range(4)]
    experts = range(NUM_EXPERTS)
    # micro-batch 0: layers 0 and 1; micro-batch 1 half a layer behind, its dispatch under way before 0's combine is in
    handle = first.dispatch(*tokens[0])
    future_0 = first.combine(answer(handle.wait(), experts), handle)
    handle_1 = first.dispatch(*tokens[1])
    assert_close(future_0.wait(), tokens[0], "bfloat16")
    handle_0 = second.dispatch(*tokens[2])
    future_1 = first.combine(answer(handle_1.wait(), experts), handle_1)
    future_0 = second.combine(answer(handle_0.wait(), experts), handle_0)
    handle_1 = second.dispatch(*tokens[3])
    assert_close(future_1.wait(), tokens[1], "bfloat16")
    assert_close(future_0.wait(), tokens[2], "bfloat16")
    assert_close(second.combine(answer(handle_1.wait(), experts), handle_1).wait(), tokens[3], "bfloat16")


def test_low_latency_receives_what_is_under_way_before_it_sends():
    world = World(1)
    (dispatcher,) = opened("deepep-low-latency", Group(world, 0), [Placement.in_order(NUM_EXPERTS, 1)])
    del world.calls[:]
    first, second = dispatcher.dispatch(*random_tokens(0)), dispatcher.dispatch(*random_tokens(1))
    assert world.names() == ["low_latency_dispatch", "hook", "low_latency_dispatch"]
    with pytest.raises(AssertionError, match="a third dispatch"):
        dispatcher.dispatch(*random_tokens(2))
    first.wait()
    assert len(world.names()) == 3  # received already
    second.wait()
    assert world.names()[3:] == ["hook"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_goes_to_a_slot_of_its_expert_by_share_and_never_to_none(kind):
    world = World(1)
    placement = Placement((0, 1, 2, 3, 4, 5, 2, 2), (1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 0.25, 0.25), NUM_EXPERTS, 1)
    (dispatcher,) = opened(kind, Group(world, 0), [placement])
    x, ids, weights = random_tokens(3)
    dispatcher.dispatch(x, ids, weights)
    arguments = world.arguments(SENDING[kind][-1])[0]
    slots = arguments["topk_idx"]
    assert slots.min() >= 0
    assert torch.equal(torch.tensor(placement.expert_of_slot)[slots], ids)
    num_rows = (ids == 2).sum().item()
    for slot in (2, 6, 7):
        assert abs((slots == slot).sum().item() - placement.share_of_slot[slot] * num_rows) <= 1
    if kind != "deepep-v1":
        assert arguments["num_experts"] == placement.num_slots
    else:
        assert world.arguments("get_dispatch_layout")[0]["num_experts"] == placement.num_slots


@pytest.mark.parametrize("kind", KINDS)
def test_slot_numbers_have_the_type_that_the_library_was_built_for(kind, deep_ep, monkeypatch):
    monkeypatch.setattr(deep_ep, "topk_idx_t", torch.int32)
    (dispatcher,) = opened(kind, Group(World(1), 0), [Placement.in_order(NUM_EXPERTS, 1)])
    tokens = random_tokens(0)
    assert_close(exchanged(dispatcher, tokens, range(NUM_EXPERTS)), tokens, "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_one_buffer_of_the_right_size_for_all_layers(dtype):
    placements = [Placement.in_order(NUM_EXPERTS, 2, num_redundant=2)] * 5
    world = World(2)
    assert len(opened("deepep", Group(world, 0), placements, dtype)) == 5
    assert world.names() == ["allreduce", "ElasticBuffer"]
    options = world.arguments("ElasticBuffer")[0]
    assert (options["num_max_tokens_per_rank"], options["hidden"], options["num_topk"]) == (MAX_TOKENS, HIDDEN, TOPK)
    assert options["use_fp8_dispatch"] == (dtype == "fp8")

    world = World(2)
    assert len(opened("deepep-v1", Group(world, 0), placements, dtype)) == 5
    (options,) = world.arguments("Buffer")
    assert (options["num_nvl_bytes"], options["num_rdma_bytes"]) == (2000 * HIDDEN, 0)
    assert not options["low_latency_mode"]

    world = World(2)
    assert len(opened("deepep-low-latency", Group(world, 0), placements, dtype)) == 5
    (options,) = world.arguments("Buffer")
    # 64 tokens of each of the 2 ranks fill a tile of 128 rows
    assert (options["num_nvl_bytes"], options["num_rdma_bytes"]) == (0, 2 * 64 * HIDDEN * 8)
    assert (options["low_latency_mode"], options["num_qps_per_rank"]) == (True, 4)
    assert opened("deepep", Group(World(2), 0), []) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_library_that_cannot_be_used_is_refused_with_its_reason(kind, deep_ep, monkeypatch):
    placements = [Placement.in_order(NUM_EXPERTS, 1)]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "deep_ep", None)  # what `import` makes an ImportError of
        with pytest.raises(ConfigError, match=f"'{kind}', but DeepEP .*deep_ep.*; use cluster.exchange = 'nccl'"):
            opened(kind, Group(World(1), 0), placements)
    with monkeypatch.context() as patch:
        patch.delattr(deep_ep, "ElasticBuffer" if kind == "deepep" else "Buffer")  # a version without it
        with pytest.raises(ConfigError, match=r"AttributeError: .*Buffer.*; use cluster.exchange = 'nccl'"):
            opened(kind, Group(World(1), 0), placements)


def of_the_first_version(deep_ep):
    """A module like the package deep_ep 1.0.0: one class, whose low-latency dispatch has no `use_fp8`."""

    class Buffer(deep_ep.Buffer):
        def low_latency_dispatch(
            self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, async_finish=False, return_recv_hook=False
        ):
            raise AssertionError("called")

    return Buffer


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_version_is_refused(deep_ep, monkeypatch, kind):
    monkeypatch.setattr(deep_ep, "Buffer", of_the_first_version(deep_ep))
    monkeypatch.delattr(deep_ep, "ElasticBuffer")
    with pytest.raises(ConfigError, match=r"Buffer.*; use cluster.exchange = 'nccl'"):
        opened(kind, Group(World(1), 0), [Placement.in_order(NUM_EXPERTS, 1)])


def test_what_keeps_deepep_from_running_is_said_without_waking_a_gpu(deep_ep, monkeypatch):
    for name in ("is_available", "device_count", "init"):
        monkeypatch.setattr(torch.cuda, name, partial(pytest.fail, f"torch.cuda.{name} was called"))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert why_not("deepep") == "this torch is built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "deep_ep")
        assert "deep_ep is not installed" in why_not("deepep")
    monkeypatch.setattr(deep_ep, "__spec__", ModuleSpec("deep_ep", None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why_not("deepep") == "no GPU that this torch can use"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [why_not(kind) for kind in KINDS] == [None] * 3
    monkeypatch.setattr(deep_ep, "Buffer", of_the_first_version(deep_ep))
    assert why_not("deepep") is None
    for kind in ("deepep-v1", "deepep-low-latency"):
        assert "of a version before use_fp8" in why_not(kind)


def test_a_group_or_a_row_that_the_library_does_not_take_is_refused_before_it_is_opened():
    with pytest.raises(ConfigError, match=r"3 ranks share the experts, not 2, 4, .* or 160; use .* 'nccl'"):
        opened("deepep-v1", Group(World(3), 0), [Placement.in_order(NUM_EXPERTS, 3)])
    with pytest.raises(ConfigError, match="hidden size 1536 is none of"):
        opened("deepep-low-latency", Group(World(2), 0), [Placement.in_order(NUM_EXPERTS, 2)], hidden=1536)


SIZES = {
    "deepep": range(256, 8193, 256),
    "deepep-v1": range(128, 8192, 128),
    "deepep-low-latency": (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_rows_that_deepep_carries_are_accepted(kind, dtype):
    # rows of normal mode are half as long in FP8
    longest = [8192] if (kind, dtype) == ("deepep-v1", "fp8") else []
    for hidden in range(64, 8193, 64):
        if hidden in [*SIZES[kind], *longest]:
            check_rows(kind, dtype, hidden)
        else:
            with pytest.raises(ConfigError, match=f"'{kind}', but .* hidden size {hidden} .*; use .* = 'nccl'"):
                check_rows(kind, dtype, hidden)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_float32_are_refused(kind):
    with pytest.raises(ConfigError, match=r"bfloat16 or FP8 rows, not float32; set model.dtype = 'bfloat16'"):
        check_rows(kind, "float32", HIDDEN)


def test_the_sentence_names_the_sizes_that_the_low_latency_mode_has():
    with pytest.raises(ConfigError) as refused:
        check_rows("deepep-low-latency", "fp8", 1536)
    assert str(refused.value) == (
        "cluster.exchange is 'deepep-low-latency', but the model's hidden size 1536 is none of 2048, 2560, 3072, 4096, "
        "5120, 6144, 7168 or 8192; use cluster.exchange = 'nccl'"
    )


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("deepep-low-latency", {"topk": 11}, None),
        ("deepep-low-latency", {"topk": 12}, "12 experts per token, more than 11"),
        ("deepep", {"topk": 32}, None),
        ("deepep", {"topk": 33}, "33 experts per token, more than 32"),
        ("deepep-v1", {"topk": 33}, "33 experts per token, more than 32"),
        ("deepep", {"slots_per_rank": 256}, None),
        ("deepep", {"slots_per_rank": 257}, "a rank has 257 experts, more than 256"),
        ("deepep-v1", {"slots_per_rank": 1025}, "a rank has 1025 experts, more than 1024"),
        ("deepep-v1", {"num_ranks": 8, "hidden": 1920}, None),
        (
            "deepep-v1",
            {"num_ranks": 16, "hidden": 1920},
            "hidden size 1920 is not a multiple of 256, which more than 8",
        ),
        ("deepep-v1", {"num_ranks": 144}, None),
        ("deepep-v1", {"num_ranks": 40}, "40 ranks share the experts, not 2, 4, 8, 16, "),
        ("deepep-v1", {"num_ranks": 6}, "6 ranks share the experts, not 2, 4, 8, 16, "),
        ("deepep-low-latency", {"num_ranks": 6}, None),
        ("deepep-low-latency", {"num_ranks": 144}, None),
        ("deepep-low-latency", {"num_ranks": 12}, "12 ranks share the experts, not a multiple of 8"),
        ("deepep", {"num_ranks": 12}, None),
        ("nccl", {"topk": 99, "num_ranks": 3, "slots_per_rank": 5000, "hidden": 7}, None),
        ("deepep-v1", {"num_ranks": 1, "topk": 99}, None),
    ],
)
def test_groups_that_deepep_does_not_serve_are_refused(kind, changes, words):
    group = {"num_ranks": 2, "slots_per_rank": 8, "topk": 8, "hidden": 7168} | changes
    if words is None:
        check_group(kind, **group)
        return
    with pytest.raises(ConfigError, match=f"cluster.exchange is '{kind}', but .*{words}.*; use .* = 'nccl'"):
        check_group(kind, **group)


def test_low_latency_refuses_more_tokens_than_its_queues_take(monkeypatch):
    placements = [Placement.in_order(8, 8)]
    opened("deepep-low-latency", Group(World(8), 0), placements, max_tokens=490)
    with pytest.raises(ConfigError, match=r"512 tokens per rank at once.*: 511; .*NVSHMEM_QP_DEPTH = 2048"):
        opened("deepep-low-latency", Group(World(8), 0), placements, max_tokens=500)
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "2048")
    opened("deepep-low-latency", Group(World(8), 0), placements, max_tokens=500)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("colocated", [("deepep-low-latency", 300)] * 2),
        ("disaggregated", [("deepep-v1", 300)] * 2 + [("deepep-low-latency", 40)] * 2),
    ],
)
def test_the_low_latency_mode_serves_decode_with_room_for_its_rows_alone(tmp_path, mode, expected):
    cluster = {"mode": mode, "prefill_ranks": 2, "decode_ranks": 2, "exchange": "deepep-low-latency"}
    write_questions(tmp_path / "prompts", (1,))
    job = load_job(write_job(tmp_path, cluster=cluster | {"prefill_tokens": 300, "decode_requests": 40}))
    found = []
    for place in rank_places(job.cluster):

        def dispatchers(placements, row_format, *, max_tokens, hidden, topk, place=place):
            found.append((place.exchange(job.cluster), max_tokens))
            return [LocalDispatcher(placement.num_experts) for placement in placements]

        mesh = SimpleNamespace(size=2, rank=place.group_rank, dispatchers=dispatchers)
        load_model(job, mesh, place, None, torch.device("cpu"))
    assert found == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "fp8, experts too"])
@pytest.mark.parametrize("kind", [*KINDS, "deepep, in tiles"])
def test_a_mixture_of_experts_gives_the_same_over_deepep(kind, dtype):
    generator = torch.Generator().manual_seed(0)
    gate_up = 0.05 * torch.randn(NUM_EXPERTS, 64, HIDDEN, generator=generator)
    down = 0.1 * torch.randn(NUM_EXPERTS, HIDDEN, 32, generator=generator)
    dtype, _, in_fp8 = dtype.partition(",")
    gate_up, down = (reference.pack(weight.bfloat16(), eight_bit=bool(in_fp8)) for weight in (gate_up, down))
    biases = {"gate_up_bias_EF": None, "down_bias_ED": None}
    weights = SimpleNamespace(gate_up_EFD=gate_up, down_EDF=down, shared=None, **biases)
    x, ids, topk_weights = random_tokens(0)
    row_format = RowFormat(dtype)
    config = SimpleNamespace(num_experts_per_tok=ids.shape[1], n_routed_experts=NUM_EXPERTS, expert_clamp=None)

    def masked_mlp(x_ECD, *args, expected_rows, **options):
        # room for MAX_TOKENS or a little more; an even share of them, and a fifth more
        assert expected_rows == round(1.2 * x_ECD.shape[1] * ids.shape[1] / NUM_EXPERTS)
        return reference.masked_mlp(x_ECD, *args, **options)

    def run(dispatcher):
        mlp = MoeMlp(
            replace(Ops.select("reference"), masked_mlp=masked_mlp), config, weights, torch.ones(x.shape[1]), dispatcher
        )
        stream, spans = torch.zeros_like(x), MicroBatchSpans(SpanLog())
        points = mlp.points(stream, Routing(x, ids, topk_weights), spans, shared_under=YieldPoint.COMBINE)
        assert [next(points), next(points)] == [YieldPoint.DISPATCH, YieldPoint.COMBINE]
        with pytest.raises(StopIteration) as end:
            next(points)
        assert mlp.num_local_rows + int(mlp.num_device_rows) == ids.numel()
        return end.value.value

    kind, _, has_tiles = kind.partition(",")
    (dispatcher,) = opened(kind, Group(World(1), 0), [Placement.in_order(NUM_EXPERTS, 1)], dtype)
    got, expected = (
        run(in_tiles(dispatcher) if has_tiles else dispatcher),
        run(LocalDispatcher(NUM_EXPERTS, row_format)),
    )
    assert got.dtype == torch.bfloat16
    assert (got - expected).abs().max() < 2**-6 * expected.abs().max()


def test_low_latency_sends_no_token_that_is_not_counted():
    world = World(1)
    placement = Placement((5, 0, 1, 0, 2, 3, 4, 0), (1.0, 0.5, 1.0, 0.2, 1.0, 1.0, 1.0, 0.3), NUM_EXPERTS, 1)
    (dispatcher,) = opened("deepep-low-latency", Group(world, 0), [placement])
    x, ids, weights = random_tokens(0)
    is_counted = torch.arange(MAX_TOKENS) % 3
    counted = is_counted > 0
    handle = dispatcher.dispatch(x, ids, weights, is_counted)
    received = handle.wait()
    assert int(received.num_rows_E.sum()) == int(counted.sum()) * TOPK
    slots = world.arguments("low_latency_dispatch")[0]["topk_idx"]
    assert set(slots[~counted].flatten().tolist()) == {-1}
    sums = dispatcher.combine(answer(received, placement.expert_of_slot), handle).wait()
    assert_close(sums[counted], (x[counted], ids[counted], weights[counted]), "bfloat16")
    assert not sums[~counted].any()


def test_the_turn_of_replicas_goes_on_where_a_dispatch_is_recorded():
    """The turn is a tensor that each dispatch adds to, so that a graph, which runs no Python, adds to it, too."""
    placement = Placement((0, 1, 2, 3, 4, 5, 0, 0), (0.4, 1.0, 1.0, 1.0, 1.0, 1.0, 0.3, 0.3), NUM_EXPERTS, 1)
    (dispatcher,) = opened("deepep-low-latency", Group(World(1), 0), [placement])
    one = torch.tensor([[0]])
    expected = [placement.slots_for(one.flatten(), 0, turn).tolist() for turn in range(20)]
    found, turn = [], None
    for _ in range(20):
        found.append(dispatcher.slots(one).flatten().tolist())
        assert turn is None or dispatcher.turn is turn
        turn = dispatcher.turn
    assert found == expected
    assert {slot for (slot,) in found} == {0, 6, 7}


@pytest.mark.parametrize("kind", KINDS)
def test_the_low_latency_mode_alone_can_be_recorded(kind):
    (dispatcher,) = opened(kind, Group(World(1), 0), [Placement.in_order(NUM_EXPERTS, 1)])
    assert not dispatcher.stays_here
    assert (dispatcher.why_not_recorded is None) == (kind == "deepep-low-latency")
