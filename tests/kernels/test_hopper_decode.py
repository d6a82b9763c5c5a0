"""Decode attention on Hopper GPUs against stand-ins for the library: with its own cuts, and of whole requests."""

from __future__ import annotations

import pytest
import torch

from batchinfer.model.ops import Ops
from batchinfer.records import ModelError
from batchinfer_kernels import registry
from batchinfer_kernels.hopper import cuts as hopper_cuts
from batchinfer_kernels.hopper import invariant
from batchinfer_kernels.hopper import ops as hopper
from batchinfer_kernels.reference import mla as reference_mla
from batchinfer_kernels.reference.mla import PagedKeys
from support import hopper_stand_ins as stand_ins
from support.hopper_cases import FLASH_MLA, close, decode_case, with_reference


@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("library", FLASH_MLA)
def test_decode_attention_is_that_of_the_reference(gpu, library, heads, num_queries):
    gpu(FLASH_MLA[library]())
    q, keys, options = decode_case(num_queries, heads)
    y, expected = hopper.mla_decode(q, keys, **options), reference_mla.mla_decode(q, keys, **options)
    assert y.shape == expected.shape
    assert close(y, expected)
    nothing = PagedKeys(keys.pages, *(tensor[:0] for tensor in keys[1:4]))
    assert hopper.mla_decode(q[:0], nothing, **options).shape == (0, heads, 512)


@pytest.mark.parametrize("library", FLASH_MLA)
def test_metadata_is_made_once_per_schedule_and_never_used_for_other_lengths(gpu, library):
    flash_mla = gpu(FLASH_MLA[library]())
    q, keys, options = decode_case()
    schedule = {}
    for layer in range(3):
        y = hopper.mla_decode(q * layer, keys._replace(schedule=schedule), **options)
        assert close(y, reference_mla.mla_decode(q * layer, keys, **options))
    assert flash_mla.num_schedules == 1
    longer = keys._replace(kv_tokens_B=keys.kv_tokens_B + 1, positions_T=keys.kv_tokens_B, schedule={})
    hopper.mla_decode(q, longer, **options)
    assert flash_mla.num_schedules == 2
    with pytest.raises(AssertionError, match="serves one step"):
        hopper.mla_decode(q, longer._replace(schedule=schedule), **options)


# ---- decode attention with each request in one piece


@pytest.mark.parametrize("num_parts", [1, 33, 66, 132])
def test_parts_get_whole_requests_and_none_much_more_than_its_share(num_parts):
    generator = torch.Generator().manual_seed(num_parts)
    for count, longest in ((1, 9000), (5, 1), (128, 4989), (128, 40_000), (300, 2000)):
        lengths = torch.randint(0, longest + 1, (count,), generator=generator, dtype=torch.int32)
        cuts, splits = hopper_cuts.cut_between_requests(lengths, num_parts)
        assert (cuts.dtype, cuts.shape, splits.tolist()) == (torch.int32, (num_parts, 8), list(range(count + 1)))
        pages = [-(-length // 64) for length in lengths.tolist()]
        assert stand_ins.pieces_of(cuts, splits, lengths) == [[(0, number)] for number in pages]
        costs = [max(1, number) + 5 for number in pages]
        loads = [sum(costs[begin : end + 1]) for begin, end, *_ in cuts.tolist() if begin < count]
        assert max(loads) <= sum(costs) / num_parts + max(costs)


@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("library", ["later", "sgl"])
def test_each_request_is_one_piece_and_the_result_that_of_the_reference(gpu, one_hopper, library, heads, num_queries):
    flash_mla = gpu(FLASH_MLA[library]())
    q, keys, options = decode_case(num_queries, heads)
    schedule = {}
    keys = keys._replace(schedule=schedule)
    for layer in range(2):
        y = invariant.mla_decode(q * layer, keys, **options)
        assert close(y, reference_mla.mla_decode(q * layer, keys, **options))
    metadata, _ = schedule["hopper"][-1]
    assert all(len(pieces) == 1 for pieces in metadata.pieces)
    assert flash_mla.num_schedules == 1
    equal = torch.full((3,), 40 * 64, dtype=torch.int32)  # left to itself it cuts the one in the middle
    assert [len(one) for one in stand_ins.pieces_of(*stand_ins.equal_shares(equal, 2), equal)] == [1, 2, 1]


def test_cuts_that_are_described_otherwise_are_never_given(machine, monkeypatch):
    """Before a model is loaded, "auto" finds the difference and takes the next candidate."""
    shares = stand_ins.equal_shares
    machine()
    assert registry.select("mla_decode", dtype=torch.bfloat16, device="cuda").name == "hopper-invariant"
    monkeypatch.setattr(stand_ins, "equal_shares", lambda *given: (shares(*given)[0].flip(0), shares(*given)[1]))
    machine()
    assert registry.select("mla_decode", dtype=torch.bfloat16, device="cuda").name == "reference"
    with pytest.raises(
        ModelError, match=r"hopper-invariant cannot run here: flash_mla 1\.0\.0 describes its cuts otherwise"
    ):
        Ops.select("hopper-invariant", torch.bfloat16, device="cuda")
    machine(flash_mla=stand_ins.flash_mla_first)
    assert invariant.why_not().startswith("flash_mla 1.0.0 describes its cuts otherwise; another version is needed")


def test_a_library_that_fails_when_it_is_asked_for_its_cuts_is_passed_over(machine, monkeypatch):
    monkeypatch.setattr(stand_ins, "dense_decode", lambda *_: 1 // 0)
    machine()
    assert invariant.why_not().startswith("flash_mla 1.0.0 cannot be asked for its cuts here (ZeroDivisionError: ")


@pytest.mark.parametrize("change", ["width", "latent", "float32"])
def test_attention_that_the_library_does_not_take_goes_to_the_one_behind(gpu, change):
    gpu(stand_ins.flash_mla_sgl())
    q, keys, options = decode_case()
    if change == "width":
        q, keys = q[..., :560].contiguous(), keys._replace(pages=keys.pages[..., :560].contiguous())
    elif change == "latent":
        options["latent_dim"] = 448
    else:
        q, keys = q.float(), keys._replace(pages=keys.pages.float())
    y = with_reference("mla_decode")(q, keys._replace(schedule={}), **options)
    assert torch.equal(y, reference_mla.mla_decode(q, keys, **options))


def test_more_requests_than_the_library_can_cut_for_are_refused(gpu):
    """The rows of a scored prompt come like this, in the last layer of its prefill."""
    gpu(stand_ins.flash_mla_sgl())
    q, keys, options = decode_case(heads=1, kv_tokens=(1,))
    for count, reason in ((11_622, None), (11_623, "there are more requests than flash_mla can cut a step for")):
        many = PagedKeys(keys.pages, *(tensor.expand(count, *tensor.shape[1:]) for tensor in keys[1:4]))
        assert hopper.mla_decode.rejects(q.expand(count, -1, -1), many, **options) == reason
    stand_ins.equal_shares(torch.ones(11_622, dtype=torch.int32), 66)  # as the library would
    with pytest.raises(AssertionError, match="the process exits"):
        stand_ins.equal_shares(torch.ones(11_623, dtype=torch.int32), 66)
