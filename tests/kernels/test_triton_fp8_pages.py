"""FP8 pages in Triton: written with the reference's bits, read as the widened rows in bfloat16 are, to the bit."""

from __future__ import annotations

import pytest
import torch

from batchinfer_kernels.reference import fp8_pages
from batchinfer_kernels.reference.mla import PagedKeys
from batchinfer_kernels.reference.rows import NewKeys
from batchinfer_kernels.triton import decode, ops, prefill
from support.triton_device import DEVICE, TOLERANCE, needs_triton, random, relative_error

pytestmark = needs_triton
WIDTHS = [(16, 6), (80, 64), (192, 10), (512, 64)]  # less than a tile, part of one, one and a half, DeepSeek-V3's


def held_pages(count, latent_dim, rotary):
    """Return FP8 pages with infinities where they must not be read, and the same widened."""
    rows = random(count * 64, latent_dim + rotary, seed=7)
    rows[:64] = torch.nan
    held = fp8_pages.narrow(rows, latent_dim).view(count, 64, -1)
    return held, fp8_pages.widen(held, latent_dim)


@pytest.mark.parametrize(("latent_dim", "rotary"), WIDTHS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_what_is_written_is_the_plain_kernels_row_rounded(latent_dim, rotary, interleaved):
    q, latents = random(37, 3, 8 + rotary), random(37, latent_dim + rotary, seed=1)
    norm, angles = random(latent_dim, seed=2), random(37, rotary // 2, seed=3, dtype=torch.float32)
    norm[:16] *= 1e-3
    slots = torch.randperm(4 * 64, generator=torch.Generator().manual_seed(4))[:37].to(DEVICE)

    def run(op, pages, rows):
        places = angles.cos()[rows], angles.sin()[rows], pages, slots[rows]
        turned = op(q[rows].clone(), NewKeys(latents[rows], norm, 1e-6, *places, interleaved))
        return turned, pages.view(4 * 64, -1)

    every = slice(None)
    turned, plain = run(ops.rope_and_cache, random(4, 64, latent_dim + rotary, seed=5), every)
    empty = torch.full((4, 64, fp8_pages.row_bytes(latent_dim, rotary)), 7, dtype=torch.uint8, device=DEVICE)
    turned_fp8, held = run(ops.rope_and_cache_fp8, empty.clone(), every)
    assert torch.equal(turned, turned_fp8)
    assert torch.equal(held[slots], fp8_pages.narrow(plain[slots], latent_dim))
    others = torch.ones(256, dtype=torch.bool, device=DEVICE)
    others[slots] = False
    assert (held[others] == 7).all()
    for rows in (slice(0, 1), slice(5, 30)):
        assert torch.equal(run(ops.rope_and_cache_fp8, empty.clone(), rows)[1][slots[rows]], held[slots[rows]])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
def test_what_is_no_number_stays_none():
    latents, norm = random(2, 258), torch.ones(256, device=DEVICE).bfloat16()
    latents[0, 3] = torch.nan
    pages = torch.zeros(1, 64, fp8_pages.row_bytes(256, 2), dtype=torch.uint8, device=DEVICE)
    angles = torch.zeros(2, 1, device=DEVICE)
    slots = torch.arange(2, device=DEVICE)
    reference = pages.clone()
    for op, target in ((ops.rope_and_cache_fp8, pages), (fp8_pages.rope_and_cache_fp8, reference)):
        op(random(2, 1, 8), NewKeys(latents, norm, 1e-6, angles, angles, target, slots, False))
    widened, expected = (fp8_pages.widen(some[0, :2], 256) for some in (pages, reference))
    assert widened[0, :256].isnan().all()
    assert expected[0, :256].isnan().all()
    assert torch.equal(widened[1], expected[1])


@pytest.mark.parametrize(("latent_dim", "rotary"), WIDTHS)
def test_decode_is_that_over_widened_pages_to_the_bit(latent_dim, rotary, monkeypatch):
    monkeypatch.setattr(decode, "SPLIT_TOKENS", 128)
    held, wide = held_pages(6, latent_dim, rotary)
    lengths = torch.tensor([1, 64, 65, 190, 300], device=DEVICE)
    table = torch.stack([torch.arange(5).roll(-request) + 1 for request in range(5)]).to(DEVICE)
    q = random(5, 3, latent_dim + rotary, seed=1)
    options = {"latent_dim": latent_dim, "scale": 0.1}
    keys = PagedKeys(held, table, lengths, lengths - 1)
    decoded = ops.mla_decode_fp8(q, keys, **options)
    assert torch.equal(decoded, ops.mla_decode(q, keys._replace(pages=wide), **options))
    on_cpu = PagedKeys(*(item.cpu() for item in keys[:4]))
    exact = fp8_pages.mla_decode_fp8(q.cpu(), on_cpu, **options)
    assert relative_error(decoded.cpu(), exact.double()) < TOLERANCE["bf16"]


@pytest.mark.parametrize(("latent_dim", "rotary"), WIDTHS[:3])
def test_prefill_is_that_over_widened_pages_to_the_bit(latent_dim, rotary):
    held, wide = held_pages(5, latent_dim, rotary)
    table = torch.tensor([[3, 1, 2], [4, 0, 0]], device=DEVICE)
    contexts, chunks = torch.tensor([130, 20]), torch.tensor([70, 20])
    positions = torch.cat([torch.arange(60, 130), torch.arange(20)]).to(DEVICE)
    q, kv_b = random(90, 2, 8 + rotary, seed=2), random(2, 8 + 16, latent_dim, seed=3)
    options = {"v_dim": 16, "scale": 0.1}
    schedule = {}
    keys = PagedKeys(held, table, contexts, positions, schedule)
    plain = ops.mla_prefill(q, keys._replace(pages=wide, schedule=None), kv_b, chunks, **options)
    for _ in range(2):  # a layer, and one that finds the step's work cut already
        assert torch.equal(ops.mla_prefill_fp8(q, keys, kv_b, chunks, **options), plain)
    assert set(schedule) == {prefill.SCHEDULE}
