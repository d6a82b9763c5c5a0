"""Decode attention on Hopper GPUs of long requests, which are cut into pieces by their own lengths alone."""

from __future__ import annotations

import sys

import pytest
import torch

from batchinfer_kernels import reference, registry
from batchinfer_kernels.hopper import invariant, ops
from batchinfer_kernels.hopper.cuts import MOST_PIECES, PIECE_PAGES, Cuts, cut_between_requests, cut_into_pieces
from batchinfer_kernels.reference import mla as reference_mla
from batchinfer_kernels.reference.mla import PagedKeys
from batchinfer_kernels.triton import ops as triton_ops
from support import hopper_stand_ins as stand_ins
from support.cuda_stand_ins import hopper_on_the_cpu
from support.triton_device import DEVICE, TOLERANCE, needs_triton, random, relative_error

PAGE = 64
OPTIONS = {"latent_dim": 512, "scale": 0.1352}


def lengths_of(count, longest, seed=0):
    return torch.randint(0, longest + 1, (count,), generator=torch.Generator().manual_seed(seed))


def table_of(count, pages):
    return torch.arange(count * pages).view(count, pages)


def own_cuts(length, piece_pages):
    """Return the first page and the end page of each piece, by the rule in words."""
    pages = max(1, -(-length // PAGE))
    size = max(piece_pages, -(-pages // MOST_PIECES))
    return [(first, min(first + size, pages)) for first in range(0, pages, size)]


@pytest.mark.parametrize(
    ("count", "longest", "piece_pages"),
    [
        *((*of, PIECE_PAGES) for of in [(1, 9000), (5, 100_000), (64, 20_000), (128, 30_000), (40, 8192)]),
        (64, 5000, 40),
    ],
)
@pytest.mark.parametrize("num_parts", [1, 66, 132])
def test_a_request_is_cut_by_its_own_length_and_every_page_is_read_once(num_parts, count, longest, piece_pages):
    lengths, most_pages = lengths_of(count, longest), -(-longest // PAGE)
    table = table_of(count, most_pages)
    pieces = cut_into_pieces(lengths, table, num_parts, piece_pages)
    cuts, starts = pieces.cuts
    assert (cuts.dtype, cuts.shape) == (torch.int32, (num_parts, 8))
    assert starts.tolist() == list(range(len(pieces.request_V) + 1))
    read = stand_ins.pieces_of(cuts, starts, pieces.kv_tokens_V)  # each place once, by one part
    places = []
    for request, length in enumerate(lengths.tolist()):
        own, expected = (
            [place for place in pieces.place_BK[request].tolist() if place >= 0],
            own_cuts(length, piece_pages),
        )
        assert len(own) == len(expected)
        assert pieces.place_BK[request, : len(own)].tolist() == own, "behind the last there is none"
        for place, (first, behind) in zip(own, expected, strict=True):
            tokens = min(length, behind * PAGE) - first * PAGE
            num_pages = -(-tokens // PAGE)
            assert (pieces.request_V[place], pieces.kv_tokens_V[place]) == (request, tokens)
            assert torch.equal(pieces.page_table_VW[place, :num_pages], table[request, first:behind][:num_pages].int())
            assert read[place] == [(0, num_pages)]
        places += own
    assert len(set(places)) == len(places)
    nobodys = sorted(set(range(len(pieces.request_V))) - set(places))
    assert (pieces.request_V[nobodys] == -1).all()
    assert [read[place] for place in nobodys] == [[]] * len(nobodys)


def most_of(cuts, kv_tokens):
    """Return the work of the busiest part, as flash_mla counts it: its pages, and five for each piece."""
    pages = [-(-length // PAGE) for length in kv_tokens.tolist()]
    return max(
        sum(
            (end_page if request == end else pages[request]) - (first_page if request == begin else 0) + 5
            for request in range(begin, end + 1)
        )
        for begin, end, first_page, end_page, *_ in cuts.parts_P8.tolist()
        if begin < len(pages)
    )


def most_of_pieces(lengths, num_parts, piece_pages=PIECE_PAGES):
    table = table_of(len(lengths), -(-int(lengths.max()) // PAGE))
    pieces = cut_into_pieces(lengths, table, num_parts, piece_pages)
    return most_of(pieces.cuts, pieces.kv_tokens_V)


@pytest.mark.parametrize(
    ("count", "length", "times"),
    [
        (1, 4989, 12),
        (16, 4989, 3.2),
        (32, 4989, 1.8),
        (128, 4989, 1.0),
        (133, 4989, 1.44),
        (1, 32_768, 10),
        (16, 32_768, 1.0),
    ],
)
def test_what_equal_requests_cost_is_as_the_docs_say(count, length, times):
    """The cost is compared with that of the library's own cuts."""
    lengths = torch.full((count,), length, dtype=torch.int32)
    own = Cuts(*stand_ins.equal_shares(lengths, 66))
    is_cut = length > PIECE_PAGES * PAGE
    ours = most_of_pieces(lengths, 66) if is_cut else most_of(cut_between_requests(lengths, 66), lengths)
    assert ours / most_of(own, lengths) == pytest.approx(times, rel=0.03)


@pytest.mark.parametrize(
    ("count", "whole", "cut"), [(64, 1.71, 0.98), (128, 0.99, 1.01), (192, 1.27, 1.03), (256, 1.01, 1.03)]
)
def test_what_mixed_lengths_cost_in_pieces_of_40_pages_is_as_the_docs_say(count, whole, cut):
    """The cost is compared with that of the library's own cuts; whole requests are long and short ones by turns."""
    lengths = (5000 * torch.arange(1, count + 1) // count).int()
    by_turns = torch.stack([lengths[: count // 2], lengths.flip(0)[: count // 2]], dim=1).flatten()
    own = most_of(Cuts(*stand_ins.equal_shares(lengths, 66)), lengths)
    found = most_of(cut_between_requests(by_turns, 66), by_turns) / own, most_of_pieces(lengths, 66, 40) / own
    assert found == pytest.approx((whole, cut), rel=0.03)


@pytest.mark.parametrize(
    ("count", "spread", "whole", "cut"),
    [(64, 0.6, 3.7, 1.6), (128, 0.3, 1.36, 1.1), (128, 0.6, 2.1, 1.2), (128, 1.0, 4.5, 1.2), (256, 1.0, 2.8, 1.1)],
)
def test_what_lognormal_lengths_cost_is_as_the_docs_say(count, spread, whole, cut):
    """The cost is compared with an equal share for each part: means of 20 batches of long and short requests."""
    found = {"whole": 0.0, "cut": 0.0}
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        lengths = (torch.randn(count, generator=generator) * spread - spread**2 / 2).exp() * 5000
        longest_first = lengths.long().clamp_min(1).sort(descending=True).values
        lengths = torch.stack([longest_first[: count // 2], longest_first.flip(0)[: count // 2]], dim=1).flatten()
        share = float((-(-lengths // PAGE) + 5).sum()) / 66
        found["cut"] += most_of_pieces(lengths, 66) / share / 20
        found["whole"] += most_of(cut_between_requests(lengths, 66), lengths) / share / 20
    assert found == {"whole": pytest.approx(whole, rel=0.05), "cut": pytest.approx(cut, rel=0.05)}


@pytest.fixture
def attend(monkeypatch):
    """Decode attention as a Hopper GPU's rank has it, with a stand-in for the library."""
    hopper_on_the_cpu(monkeypatch)
    return registry.bind("mla_decode", [registry.INVARIANT, "triton", "reference"])


def decode_case(lengths, heads=16):
    lengths = torch.tensor(lengths)
    table = torch.randint(0, 300, (len(lengths), -(-int(lengths.max()) // PAGE)))
    keys = PagedKeys(random(300, PAGE, 576).cpu(), table, lengths, lengths - 1, {})
    return random(len(lengths), heads, 576, seed=1).cpu(), keys


LENGTHS = [70, 8192, 8193, 1, 0, 20_000, 8256, 16_385, 3, 12_000]


def test_results_are_those_of_the_reference_and_keep_their_bits_in_any_company(attend):
    q, keys = decode_case(LENGTHS)
    for layer in (1, 2):  # the second one takes the pieces of the first
        together = attend(layer * q, keys, **OPTIONS)
        expected = reference_mla.mla_decode(layer * q, keys._replace(schedule=None), **OPTIONS)
        has_keys = keys.kv_tokens_B > 0
        assert relative_error(together[has_keys], expected[has_keys]) < TOLERANCE["bf16"]
    assert sys.modules["flash_mla"].num_schedules == 1
    assert list(keys.schedule) == ["hopper-invariant"]
    assert (together[4] == 0).all()
    for some in ([5], [7, 2], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [0, 1, 3], [4, 2]):
        most_pages = max(1, -(-max(LENGTHS[one] for one in some) // PAGE))  # some tables are wide, some are not
        own = PagedKeys(keys.pages, keys.page_table_BP[some, :most_pages], keys.kv_tokens_B[some], None, {})
        assert torch.equal(attend(2 * q[some], own, **OPTIONS), together[some])
    with pytest.raises(AssertionError, match="serves one step"):
        attend(q, keys._replace(kv_tokens_B=keys.kv_tokens_B + 1), **OPTIONS)


@pytest.mark.usefixtures("attend")
def test_shorter_pieces_give_results_that_keep_their_bits_too():
    lengths = [70, 300, 128, 1, 0, 129]

    def attend(q, keys):
        return invariant.decode_in_pieces(q, keys, 2, **OPTIONS)

    q, keys = decode_case(lengths)
    together = attend(q, keys)
    expected = reference_mla.mla_decode(q, keys._replace(schedule=None), **OPTIONS)
    has_keys = keys.kv_tokens_B > 0
    assert relative_error(together[has_keys], expected[has_keys]) < TOLERANCE["bf16"]
    for some in ([1], [3, 5, 0]):
        own = PagedKeys(keys.pages, keys.page_table_BP[some], keys.kv_tokens_B[some], None, {})
        assert torch.equal(attend(q[some], own), together[some])


def test_there_may_be_no_request(attend):
    q, keys = decode_case([9000])
    nobody = PagedKeys(keys.pages, keys.page_table_BP[:0], keys.kv_tokens_B[:0], keys.positions_T[:0], {})
    assert attend(q[:0], nobody, **OPTIONS).shape == (0, 16, 512)


def test_of_many_requests_in_long_tables_some_go_after_others_as_memory_has_room(attend, monkeypatch):
    """The rows of a scored prompt come like this, in the last layer of its prefill."""
    num_requests, given, plain = 600, [], ops.call_decode

    def call_decode(q_VQHW, *arguments):
        given.append(len(q_VQHW))
        return plain(q_VQHW, *arguments)

    q, keys = decode_case([*range(1, num_requests), 8193], heads=2)
    keys = keys._replace(page_table_BP=torch.nn.functional.pad(keys.page_table_BP, (0, 1000)))
    monkeypatch.setattr(ops, "call_decode", call_decode)
    together = attend(q, keys, **OPTIONS)
    assert len(given) == 3
    assert max(given) < 2048 + stand_ins.NUM_SMS
    some = [0, 255, 256, num_requests - 1]
    own = PagedKeys(keys.pages, keys.page_table_BP[some], keys.kv_tokens_B[some], None, {})
    assert torch.equal(attend(q[some], own, **OPTIONS), together[some])


def test_a_request_of_several_pieces_that_is_not_finite_stays_so_and_alone(attend):
    q, keys = decode_case([20_000, 9000, 30])
    clean = attend(q, keys, **OPTIONS)
    q[1, 3] = torch.nan
    found = attend(q, keys._replace(schedule={}), **OPTIONS)
    assert found[1, 3].isnan().all()
    assert torch.equal(found[[0, 2]], clean[[0, 2]])
    assert torch.equal(found[1, 4:], clean[1, 4:])


@needs_triton
@pytest.mark.parametrize(("heads", "width"), [(1, 1), (5, 96), (16, 512)])
@pytest.mark.parametrize("most_pieces", [1, 2, 5])
def test_pieces_in_triton_are_those_of_the_reference(most_pieces, heads, width):
    generator = torch.Generator().manual_seed(most_pieces)
    counts = torch.randint(1, most_pieces + 1, (7,), generator=generator)
    is_piece = torch.arange(most_pieces) < counts[:, None]
    place = torch.full((7, most_pieces), -1, dtype=torch.int32)
    place[is_piece] = torch.randperm(50, generator=generator)[: int(is_piece.sum())].int()
    request = torch.full((50,), -1, dtype=torch.int32)
    request[place[is_piece].long()] = torch.where(is_piece)[0].int()
    place, request = place.to(DEVICE), request.to(DEVICE)

    q = random(7, heads, width)
    taken = request >= 0
    spread = triton_ops.spread_queries(q, request)
    assert torch.equal(spread[taken], reference.spread_queries(q, request)[taken])

    parts, log_sums = random(50, heads, width, seed=1), 5 * random(50, heads, seed=2, dtype=torch.float32)
    parts[~taken], log_sums[~taken] = torch.nan, torch.nan
    log_sums[place[counts == 1, 0].long()] = torch.inf  # not looked at
    merged = triton_ops.merge_pieces(parts, log_sums, place)
    assert relative_error(merged, reference.merge_pieces(parts, log_sums, place)) < TOLERANCE["bf16"]
    alone = place[counts == 1, 0].long()
    assert torch.equal(merged[counts == 1], parts[alone])
    for one in range(7):
        assert torch.equal(triton_ops.merge_pieces(parts, log_sums, place[one : one + 1]), merged[one : one + 1])
    assert triton_ops.merge_pieces(parts, log_sums, place[:0]).shape == (0, heads, width)
    assert triton_ops.spread_queries(q, request[:0]).shape == (0, heads, width)
