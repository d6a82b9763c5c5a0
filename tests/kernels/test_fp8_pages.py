"""Pages in FP8: layout, rounding by hand, and attention that is that over widened bfloat16 pages to the bit."""

from __future__ import annotations

import math

import pytest
import torch

from batchinfer_kernels import registry
from batchinfer_kernels.cpu import build
from batchinfer_kernels.reference import fp8_pages
from batchinfer_kernels.reference.mla import PagedKeys
from batchinfer_kernels.reference.rows import NewKeys

LATENT, ROTARY = 192, 6  # a whole tile, and a part of one
WIDTH = LATENT + ROTARY
CANDIDATES = ["reference", pytest.param("cpu", marks=pytest.mark.skipif(build.why_not() is not None, reason="no C++"))]


def random(*shape, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def e4m3_values():
    """All that E4M3 can hold (arXiv 2209.05433, table 1): a sign, 4 bits of exponent, 3 of mantissa."""
    small = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    normal = [(1 + mantissa / 8) * 2.0 ** (power - 7) for power in range(1, 16) for mantissa in range(8)]
    return sorted({sign * value for value in small + normal[:-1] for sign in (-1, 1)})


def by_hand(row, latent_dim):
    """A row rounded and widened value by value, in Python's floats; of two values that are as near the even one."""
    held, found = e4m3_values(), []
    for start in range(0, latent_dim, 128):
        tile = row[start : min(start + 128, latent_dim)]
        scale = 2.0 ** math.ceil(math.log2(max(max(map(abs, tile)) / 448, 1e-4)))
        for value in tile:
            near = sorted(held, key=lambda one, value=value: (abs(one - value / scale), held.index(one)))[:2]
            if abs(near[0] - value / scale) == abs(near[1] - value / scale):  # as near: the even mantissa
                near.sort(key=lambda one: abs(one) / 2.0 ** (max(-6, math.frexp(one)[1] - 1) - 3) % 2)
            found.append(near[0] * scale)
    return found + row[latent_dim:]


def test_a_row_has_the_layout_of_flash_mla():
    assert fp8_pages.row_bytes(512, 64) == 656
    row = torch.zeros(1, 576).bfloat16()
    row[0, [0, 127, 128, 511]] = torch.tensor([448.0, -1.0, 896.0, 3.0]).bfloat16()
    row[0, 512:] = torch.arange(64).bfloat16()
    (held,) = fp8_pages.narrow(row, 512)
    assert held[[0, 127, 128, 511]].tolist() == [0x7E, 0xB8, 0x7E, 0x7C]  # 448, -1, 448 x 2, 384 x 2^-7
    assert held[512:528].view(torch.float32).tolist() == [1.0, 2.0, 2.0**-13, 2.0**-7]
    assert held[528:].view(torch.bfloat16).tolist() == list(range(64))


@pytest.mark.parametrize("scale", [1e-6, 0.3, 1.0, 448.0, 1e30])
def test_rows_are_rounded_as_by_hand_and_widened_without_rounding(scale):
    given = random(5, WIDTH, scale=scale)
    given[1, :128], given[2, 5] = 0, 448 * scale
    widened = fp8_pages.widen(fp8_pages.narrow(given, LATENT), LATENT)
    assert widened.double().tolist() == [by_hand(row, LATENT) for row in given.double().tolist()]
    again = fp8_pages.narrow(widened, LATENT)
    assert torch.equal(fp8_pages.widen(again, LATENT), widened)
    assert (widened[:, LATENT:] == given[:, LATENT:]).all()


def test_what_is_no_number_stays_none():
    given = random(2, WIDTH)
    given[0, 3], given[1, 130] = torch.inf, torch.nan
    widened = fp8_pages.widen(fp8_pages.narrow(given, LATENT), LATENT)
    for row, broken in ((0, slice(128)), (1, slice(128, LATENT))):
        assert widened[row, broken].isnan().all()
    assert widened[0, 128:].isfinite().all()
    assert widened[1, :128].isfinite().all()


def keys_of(lengths, positions, pages, *, seed=3):
    most = -(-max(lengths) // 64)
    ids = torch.randperm(len(pages), generator=torch.Generator().manual_seed(seed))
    table = torch.stack([ids.roll(-request)[:most] for request in range(len(lengths))])
    return PagedKeys(pages, table, torch.tensor(lengths), torch.tensor(positions), {})


@pytest.mark.parametrize("name", CANDIDATES)
def test_attention_is_that_over_widened_pages_to_the_bit(name, monkeypatch):
    monkeypatch.setattr(fp8_pages, "_MOST_PAGES", 6)  # some requests at a time
    held = fp8_pages.narrow(random(9 * 64, WIDTH), LATENT).view(9, 64, -1)
    wide = fp8_pages.widen(held, LATENT)
    ops = {op: registry.select(op, name, torch.bfloat16) for op in ("mla_decode", "mla_prefill")}
    ops_fp8 = {op: registry.select(f"{op}_fp8", name, torch.bfloat16) for op in ops}
    assert {op.name for op in (*ops.values(), *ops_fp8.values())} == {name}

    lengths = [1, 64, 65, 190, 7]
    keys = keys_of(lengths, [length - 1 for length in lengths], held)
    q = random(5, 3, WIDTH, seed=1)
    options = {"latent_dim": LATENT, "scale": 0.1}
    decoded = ops_fp8["mla_decode"](q, keys, **options)
    assert torch.equal(decoded, ops["mla_decode"](q, keys._replace(pages=wide), **options))

    chunks, positions = torch.tensor([1, 10, 65]), [0, *range(54, 64), *range(65)]
    keys = keys_of([1, 64, 65], positions, held)
    q, kv_b = random(76, 3, 8 + ROTARY, seed=2), random(3, 8 + 16, LATENT, seed=3, scale=0.1)
    options = {"v_dim": 16, "scale": 0.2}
    attended = ops_fp8["mla_prefill"](q, keys, kv_b, chunks, **options)
    plain = keys._replace(pages=wide, schedule={})
    assert torch.equal(attended, ops["mla_prefill"](q, plain, kv_b, chunks, **options))


@pytest.mark.parametrize("name", CANDIDATES)
def test_what_is_written_is_the_plain_row_rounded(name):
    angles, slots = torch.randn(70, ROTARY // 2), torch.randperm(3 * 64)[:70]
    q, latents, norm = random(70, 2, 8 + ROTARY), random(70, WIDTH, seed=1), random(LATENT, seed=2)

    def run(op, pages, some):
        new = NewKeys(latents[some], norm, 1e-6, angles.cos()[some], angles.sin()[some], pages, slots[some], True)
        return registry.select(op, name, torch.bfloat16)(q[some].clone(), new), pages.view(3 * 64, -1)

    every = slice(None)
    turned, plain = run("rope_and_cache", torch.zeros(3, 64, WIDTH).bfloat16(), every)
    empty = torch.full((3, 64, fp8_pages.row_bytes(LATENT, ROTARY)), 7, dtype=torch.uint8)
    turned_fp8, held = run("rope_and_cache_fp8", empty.clone(), every)
    assert torch.equal(turned, turned_fp8)
    assert torch.equal(held[slots], fp8_pages.narrow(plain[slots], LATENT))
    others = torch.ones(3 * 64, dtype=torch.bool)
    others[slots] = False
    assert (held[others] == 7).all()
    for some in (slice(0, 1), slice(3, 40)):
        assert torch.equal(run("rope_and_cache_fp8", empty.clone(), some)[1][slots[some]], held[slots[some]])


@pytest.mark.parametrize("latent_dim", [16, 128, 512])
def test_no_rows_are_none(latent_dim):
    held = fp8_pages.narrow(random(0, latent_dim + 8), latent_dim)
    assert held.shape == (0, fp8_pages.row_bytes(latent_dim, 8))
    assert fp8_pages.widen(held, latent_dim).shape == (0, latent_dim + 8)


def test_rows_of_other_widths_are_refused():
    with pytest.raises(ValueError, match="latents of 30 and rotary keys of 4 values are not whole steps"):
        fp8_pages.row_bytes(30, 4)
