"""Decode over FP8 pages by flash_mla's sparse decode, against stand-ins with its signatures."""

from __future__ import annotations

import pytest
import torch

from batchinfer_kernels import registry
from batchinfer_kernels.hopper import fp8_pages as hopper
from batchinfer_kernels.reference import fp8_pages
from batchinfer_kernels.reference.mla import PagedKeys
from support import hopper_stand_ins as stand_ins
from support.hopper_cases import SPARSE_FLASH_MLA, close
from support.random_tensors import random

OPTIONS = {"latent_dim": 512, "scale": 0.1352}


@pytest.fixture
def gpu(monkeypatch, install):
    """Tensors here count as those of a GPU."""
    monkeypatch.setattr(hopper, "is_on_gpu", lambda *tensors: True)
    return install


def decode_case(num_queries=1, heads=64, kv_tokens=(1, 64, 150, 200, 7)):
    """Requests of a step; what lies behind their tokens, and in the page that none of them has, is no number."""
    table = torch.randperm(20, generator=torch.Generator().manual_seed(0)).view(5, 4)
    lengths = torch.tensor(kv_tokens) + num_queries - 1
    wide = random(21, 64, 576)
    wide[20] = torch.nan
    for pages, length in zip(table, lengths.tolist(), strict=True):
        wide[pages[length // 64], length % 64 :] = torch.nan
        wide[pages[length // 64 + 1 :]] = torch.nan
    pages = fp8_pages.narrow(wide.flatten(0, 1), 512).view(21, 64, 656)
    positions = (lengths[:, None] - num_queries + torch.arange(num_queries)).flatten()
    q = random(5 * num_queries, heads, 576, seed=1)
    return q, PagedKeys(pages, table, lengths, positions)


@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("library", SPARSE_FLASH_MLA)
def test_decode_over_fp8_pages_is_that_of_the_reference(gpu, library, heads, num_queries):
    gpu(SPARSE_FLASH_MLA[library]())
    q, keys = decode_case(num_queries, heads)
    y, expected = hopper.mla_decode_fp8(q, keys, **OPTIONS), fp8_pages.mla_decode_fp8(q, keys, **OPTIONS)
    assert y.shape == expected.shape
    assert expected.isfinite().all()
    assert close(y, expected)
    nothing = PagedKeys(keys.pages, *(tensor[:0] for tensor in keys[1:4]))
    assert hopper.mla_decode_fp8(q[:0], nothing, **OPTIONS).shape == (0, heads, 512)


def test_a_request_without_tokens_gives_zeros_and_a_larger_table_changes_nothing(gpu):
    gpu(stand_ins.flash_mla_sgl())
    q, keys = decode_case()
    y = hopper.mla_decode_fp8(q, keys, **OPTIONS)
    more = torch.cat([keys.page_table_BP, torch.full((5, 4), 20)], dim=1)  # as a graph has room for
    assert torch.equal(hopper.mla_decode_fp8(q, keys._replace(page_table_BP=more), **OPTIONS), y)
    empty = keys._replace(kv_tokens_B=torch.tensor([0, 64, 150, 200, 7]))
    assert (hopper.mla_decode_fp8(q, empty, **OPTIONS)[0] == 0).all()


@pytest.mark.parametrize("library", SPARSE_FLASH_MLA)
def test_lists_and_metadata_are_made_once_per_schedule(gpu, library):
    flash_mla = gpu(SPARSE_FLASH_MLA[library]())
    q, keys = decode_case()
    schedule = {}
    for layer in range(3):
        y = hopper.mla_decode_fp8(q * layer, keys._replace(schedule=schedule), **OPTIONS)
        assert close(y, fp8_pages.mla_decode_fp8(q * layer, keys, **OPTIONS))
    assert flash_mla.num_schedules == 1
    longer = keys._replace(kv_tokens_B=keys.kv_tokens_B + 1, schedule=schedule)
    with pytest.raises(AssertionError, match="serves one step"):
        hopper.mla_decode_fp8(q, longer, **OPTIONS)


@pytest.mark.parametrize("change", ["heads", "width", "gaps", "first version"])
def test_what_the_library_does_not_take_goes_to_the_one_behind(gpu, change):
    gpu(stand_ins.flash_mla_first() if change == "first version" else stand_ins.flash_mla_sgl())
    (q, keys), options = decode_case(heads=16 if change == "heads" else 64), dict(OPTIONS)
    if change == "width":
        pages = fp8_pages.narrow(random(21 * 64, 320), 256).view(21, 64, -1)
        q, keys, options["latent_dim"] = random(5, 64, 320), keys._replace(pages=pages), 256
    elif change == "gaps":
        keys = keys._replace(pages=torch.nn.functional.pad(keys.pages, (0, 16))[..., :656])
    before = registry.num_fallbacks()
    y = registry.bind("mla_decode_fp8", ["hopper", "reference"])(q, keys, **options)
    assert torch.equal(y, fp8_pages.mla_decode_fp8(q, keys, **options))
    assert registry.num_fallbacks() == before + 1


def test_nothing_waits_for_the_device(gpu, monkeypatch):
    gpu(stand_ins.flash_mla_sgl())
    monkeypatch.setattr(stand_ins.FlashMLASchedMeta, "decode", lambda self, q, *_: (q[..., :512], None))
    q, keys = decode_case(2)
    on_meta = PagedKeys(*(tensor.to("meta") for tensor in keys[:4]), schedule={})
    assert hopper.mla_decode_fp8(q.to("meta"), on_meta, **OPTIONS).shape == (10, 64, 512)
