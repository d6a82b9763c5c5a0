"""Tokens by screening: those of the exact product, whatever the words; and bounds that cannot be smaller."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from batchinfer_kernels.cpu import build, ops, packed
from batchinfer_kernels.cpu.screened import Screen
from support.random_tensors import random

REASON = build.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no C++ operations on this machine: {REASON}")

NORM, ERROR = 1, 2  # parts of a screen's columns


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def dtype(request):
    return request.param


def screen_of(weight):
    screen = Screen.of(packed.pack(weight))
    assert screen is not None
    return screen


def settings_of(rows, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0):
    """Settings of a draw, alike in all rows: temperature, top_k, top_p, min_p."""
    shares = [torch.full((rows,), value, dtype=torch.float64) for value in (temperature, top_p, min_p)]
    return shares[0], torch.full((rows,), top_k), *shares[1:]


def largest(screen, x, allowed=None):
    """[T] the greedy column of each row, [T] whether it is certain."""
    columns, products, is_certain = screen.candidates(x, *settings_of(len(x)), allowed)
    return columns.gather(1, ops.argmax(products)[0][:, None])[:, 0], is_certain


def exact_columns(x, weight):
    return ops.argmax(ops.linear(x, packed.pack(weight), float32_out=True))


def check_equal(x, weight, *, least_certain=1.0):
    """Compare with the exact product; return whether rows are certain."""
    columns, is_certain = largest(screen_of(weight), x)
    expected, is_finite = exact_columns(x, weight)
    assert torch.equal(columns[is_certain], expected[is_certain])
    assert is_finite[is_certain].all()
    assert is_certain.float().mean() >= least_certain
    return is_certain


@pytest.mark.parametrize(
    ("rows", "words", "depth"),
    [(1, 1, 1), (1, 5000, 64), (7, 4097, 33), (40, 3000, 130), (64, 2050, 256), (100, 1000, 512), (3, 200, 7168)],
)
def test_tokens_are_those_of_the_exact_product(rows, words, depth, dtype, threads):
    weight = random(words, depth, dtype=dtype)
    for number, scale in enumerate((1.0, 1e-3, 300.0)):
        x = scale * random(rows, depth, seed=1 + number, dtype=dtype)
        for num_threads in (1, 2):
            threads(num_threads)
            check_equal(x, weight, least_certain=0.9 if words > 500 else 0.0)


def test_a_row_does_not_depend_on_the_others(dtype):
    weight, x = random(4096, 128, dtype=dtype), random(70, 128, seed=1, dtype=dtype)
    screen = screen_of(weight)
    columns, is_certain = largest(screen, x)
    for rows in (slice(0, 1), slice(69, 70), slice(3, 50)):
        some, certain = largest(screen, x[rows])
        assert torch.equal(some, columns[rows])
        assert torch.equal(certain, is_certain[rows])


def test_the_first_of_equal_words_is_taken(dtype):
    weight, x = random(3000, 128, dtype=dtype), random(40, 128, seed=1, dtype=dtype)
    best = exact_columns(x, weight)[0]
    for shift in (1, 16, 700, 2999):
        others = (best + shift) % 3000
        weight[others] = weight[best].clone()
    check_equal(x, weight, least_certain=0.9)
    check_equal(x, weight[:512].repeat(8, 1), least_certain=0.9)


def bitmask(may_come):
    """[T, ceil(V / 32)] int32 from [T, V] bool."""
    places = torch.arange(32)
    padded = torch.nn.functional.pad(may_come.long(), (0, -may_come.shape[1] % 32)).view(len(may_come), -1, 32)
    words = (padded << places).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).int()


DRAWS = {
    "top 1": {"top_k": 1},
    "top 20": {"top_k": 20},
    "top 20 and top_p": {"top_k": 20, "top_p": 0.9},
    "top 20 and min_p": {"top_k": 20, "min_p": 0.2},
    "all three": {"top_k": 50, "top_p": 0.8, "min_p": 0.05},
    "min_p": {"min_p": 0.3},
    "tiny min_p": {"top_k": 60, "min_p": 1e-13},
}


def check_drawn(x, weight, settings, *, least_certain, allowed=None):
    """Compare draws from candidates with those from all products, at several places of each row's distribution."""
    logits = ops.linear(x, packed.pack(weight), float32_out=True)
    if allowed is not None:
        ops.apply_token_bitmask(logits, torch.arange(len(x)), allowed)
    columns, products, is_certain = screen_of(weight).candidates(x, *settings, allowed)
    for share in (0.0, 0.3, 0.7, 0.999999):
        uniform = torch.full((len(x),), share, dtype=torch.float64)
        places = ops.draw(products, *settings, uniform)
        expected = ops.draw(logits, *settings, uniform)
        assert torch.equal(columns.gather(1, places[:, None])[is_certain, 0], expected[is_certain])
    assert is_certain.float().mean() >= least_certain
    return columns, products, is_certain


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("temperature", [1e-9, 0.3, 1.0, 8.0])
def test_draws_are_those_from_all_products(name, temperature, dtype, threads):
    """Flat distributions, peaked ones, and such of which all weights but a few are 0."""
    weight = random(3000, 128, dtype=dtype)
    for scale in (0.05, 1.0, 10.0):
        x = scale * random(40, 128, seed=1, dtype=dtype)
        settings = settings_of(len(x), temperature, **DRAWS[name])
        for num_threads in (1, 2):
            threads(num_threads)
            is_flat = name == "min_p" and scale / temperature < 1
            _, products, _ = check_drawn(x, weight, settings, least_certain=0.0 if is_flat else 0.9)
            if "top_k" in DRAWS[name]:
                num_candidates = (products > -1e30).sum(1)
                assert (num_candidates <= DRAWS[name]["top_k"] + 1).float().mean() > 0.9


def test_candidates_are_ascending_columns_with_their_products_and_no_more_than_may_be_drawn(dtype):
    weight, x = random(3000, 128, dtype=dtype), random(40, 128, seed=1, dtype=dtype)
    logits = ops.linear(x, packed.pack(weight), float32_out=True)
    temperature, top_k, top_p, min_p = settings_of(len(x), 8.0, top_k=7)
    temperature[::2], top_k[5] = 0.0, 40
    columns, products, is_certain = screen_of(weight).candidates(x, temperature, top_k, top_p, min_p)
    assert is_certain.float().mean() >= 0.9
    for row in torch.nonzero(is_certain)[:, 0].tolist():
        count = 1 if temperature[row] == 0 else int(top_k[row])
        own = sorted(logits[row].topk(count).indices.tolist())
        assert columns[row].tolist() == own + [0] * (columns.shape[1] - count)
        assert torch.equal(products[row, :count], logits[row, own])
        assert (products[row, count:] == -1e30).all()


def test_words_that_weigh_the_same_come_by_their_numbers(dtype):
    """Twins of the words around the last that top_k keeps, and words whose weights differ by less than a unit."""
    weight, x = random(3000, 128, dtype=dtype), random(40, 128, seed=1, dtype=dtype)
    order = ops.linear(x, packed.pack(weight), float32_out=True).argsort(descending=True)
    for row in range(0, 40, 2):
        weight[(order[row, 4] + 1500) % 3000] = weight[order[row, 4]].clone()
    for top_k in (4, 5, 6):
        check_drawn(x, weight, settings_of(40, 1.0, top_k=top_k), least_certain=0.9)
    # products of the first words are far above the others', which differ by little: 24 to 33 temperatures below
    for below in (24, 27.5, 29, 30.4, 30.6, 33):
        steep = 1e-3 * random(3000, 128, dtype=dtype)
        steep[:, 0] = 0
        steep[1000:1003, 0] = 1
        y = random(40, 128, seed=2, dtype=dtype)
        y[:, 0] = below
        check_drawn(y, steep, settings_of(40, 1.0, top_k=5), least_certain=0.0)


def test_draws_among_words_that_may_come(dtype):
    weight, x = random(3000, 130, dtype=dtype), random(40, 130, seed=1, dtype=dtype)
    may_come = torch.rand(40, 3000, generator=torch.Generator().manual_seed(2)) < 0.3
    may_come[0], may_come[1], may_come[2] = True, False, False
    may_come[1, [3, 40, 2999]] = True
    for name, settings in DRAWS.items():
        of_rows = settings_of(40, 1.0, **settings)
        for rows, share in ((slice(0, 2), 1.0), (slice(3, 40), 0.0 if name == "min_p" else 0.9)):
            some, allowed = tuple(values[rows] for values in of_rows), bitmask(may_come[rows])
            check_drawn(x[rows], weight, some, least_certain=share, allowed=allowed)
        assert screen_of(weight).candidates(x, *of_rows, bitmask(may_come))[2][2], "no word may come in it"


def test_a_row_of_draws_does_not_depend_on_the_others(dtype):
    weight, x = random(4096, 128, dtype=dtype), random(70, 128, seed=1, dtype=dtype)
    screen, settings = screen_of(weight), settings_of(70, 0.8, top_k=20)
    columns, products, is_certain = screen.candidates(x, *settings)
    for rows in (slice(0, 1), slice(69, 70), slice(3, 50)):
        some = screen.candidates(x[rows], *(values[rows] for values in settings))
        width = some[0].shape[1]
        assert torch.equal(some[0], columns[rows, :width])
        assert torch.equal(some[1], products[rows, :width])
        assert torch.equal(some[2], is_certain[rows])


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.9, 1.0])
@pytest.mark.parametrize("words", [30, 2050, 4097])
def test_words_that_may_not_come_are_left_out(words, share, dtype, threads):
    """In most rows a part of the words may come, in some rows all, in some one, in some none."""
    weight, x = random(words, 130, dtype=dtype), random(40, 130, seed=1, dtype=dtype)
    may_come = torch.rand(40, words, generator=torch.Generator().manual_seed(2)) < share
    best = exact_columns(x, weight)[0]
    may_come[torch.arange(20), best[:20]] = False  # the best word of all
    may_come[20:30] = True
    may_come[30:34], may_come[34:38] = False, False
    may_come[torch.arange(30, 34), torch.tensor([0, 7, words // 2, words - 1])] = True
    logits = ops.linear(x, packed.pack(weight), float32_out=True)
    ops.apply_token_bitmask(logits, torch.arange(40), bitmask(may_come))
    expected, _ = ops.argmax(logits)
    for num_threads in (1, 2):
        threads(num_threads)
        columns, is_certain = largest(screen_of(weight), x, bitmask(may_come))
        assert torch.equal(columns[is_certain], expected[is_certain])
        assert is_certain[30:38].all()
        assert is_certain.float().mean() >= (0.9 if words > 500 else 0.0)
    assert columns[34:38].tolist() == [0] * 4


def test_a_bitmask_of_another_size_is_refused(dtype):
    weight, x = random(300, 64, dtype=dtype), random(4, 64, seed=1, dtype=dtype)
    for shape in ((4, 9), (3, 10), (4, 11)):
        with pytest.raises(RuntimeError, match="allowed tokens must be contiguous int32, 4 x 10"):
            largest(screen_of(weight), x, torch.full(shape, -1, dtype=torch.int32))


@pytest.mark.parametrize("shift", [1, 40, 1500])
def test_words_that_nearly_tie_are_told_apart(shift, dtype):
    """The best word of each row gets a twin that differs in the last bit of one value, upwards or downwards."""
    weight, x = random(3000, 128, dtype=dtype), random(40, 128, seed=1, dtype=dtype)
    bits = torch.int16 if dtype is torch.bfloat16 else torch.int32
    for row, best in enumerate(exact_columns(x, weight)[0].tolist()):
        twin = weight[best].clone()
        twin.view(bits)[row] += 1 if row % 2 else -1
        weight[(best + shift) % 3000] = twin
    check_equal(x, weight, least_certain=0.9)


def test_rows_and_words_with_few_large_values(dtype):
    """Values that are many times the others, as models' states have them, make rounding to 8 bits coarse."""
    weight, x = random(4096, 256, dtype=dtype), random(40, 256, seed=1, dtype=dtype)
    for factor in (10, 1000):
        wide = x.clone()
        wide[:, ::100] *= factor
        check_equal(wide, weight, least_certain=0.0)
        rare = weight.clone()
        rare[::7] *= factor
        rare[:, 5] *= factor
        check_equal(x, rare, least_certain=0.0)
        check_equal(wide, rare, least_certain=0.0)


def misleading(dtype):
    """Return two vectors whose rounded sums are in the wrong order: 10.4375 and below become 10, 10.5625 becomes 11.

    Each ends with a value that fixes the scale of the rounding, in units of 1 / 128, and that is to be multiplied by 0.
    """
    larger, smaller = torch.full((256,), 10.4375), torch.full((256,), 10.5625)
    smaller[:38] = 9.625
    assert smaller[:255].sum() < larger[:255].sum()
    assert smaller[:255].round().sum() > larger[:255].round().sum() + 0.8 * 255
    larger[255] = smaller[255] = 127
    return (larger / 128).to(dtype), (smaller / 128).to(dtype)


def test_words_whose_rounding_misleads(dtype):
    """Their rounded products are in the wrong order by nearly as much as the bounds allow."""
    larger, smaller = misleading(dtype)
    weight = torch.zeros(640, 256, dtype=dtype)
    weight[300], weight[40] = larger, smaller
    x = torch.ones(1, 256, dtype=dtype)
    x[0, 255] = 0
    assert exact_columns(x, weight)[0] == 300
    screen = screen_of(weight)
    assert largest(screen, x)[0] == 300
    assert largest(screen, x)[1]
    columns = screen.columns.clone()
    columns[:, ERROR] *= 0.9
    assert largest(replace(screen, columns=columns), x)[0] == 40, "with smaller bounds the wrong word is found"


def test_rows_whose_rounding_misleads(dtype):
    larger, smaller = misleading(dtype)
    x = torch.cat([larger, smaller])[None]
    weight = torch.zeros(640, 512, dtype=dtype)
    weight[300, :255], weight[40, 256:511] = 1, 1
    assert exact_columns(x, weight)[0] == 300
    screen = screen_of(weight)
    assert largest(screen, x)[0] == 300
    assert largest(screen, x)[1]
    columns = screen.columns.clone()
    columns[:, NORM] *= 0.5
    assert largest(replace(screen, columns=columns), x)[0] == 40, "with smaller bounds the wrong word is found"


def test_bounds_are_above_what_rounding_lost(dtype):
    """Of each word the norm and the error, in float64 from the rounded values."""
    weight = random(200, 130, dtype=dtype)
    weight[3], weight[4, 0], weight[5] = 0, 100, 1e-36
    screen = screen_of(weight)
    scale, norm, error, _ = (screen.columns[:, part].flatten()[:200].double() for part in range(4))
    words = screen.values.view(torch.int8).view(-1, 64, 64, 4)  # [panels, words, columns, 4]
    rounded = words.permute(0, 2, 1, 3).reshape(-1, 256)[:200, :130].double() * scale[:, None]
    wide = weight.double()
    assert (norm >= wide.norm(dim=1)).all()
    assert (norm <= 1.01 * wide.norm(dim=1) + 1e-15).all()
    assert (error >= (wide - rounded).norm(dim=1)).all()
    assert (error <= 1.01 * (wide - rounded).norm(dim=1) + 1e-8 * wide.norm(dim=1) + 1e-15).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38])
def test_rows_that_may_not_be_finite_are_not_certain(value, dtype):
    weight, x = random(1000, 64, dtype=dtype), random(5, 64, seed=1, dtype=dtype)
    x[2, 7] = value
    is_certain = check_equal(x, weight, least_certain=0.8)
    assert is_certain.tolist() == [True, True, False, True, True]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_words_that_are_not_finite_are_not_screened(value, dtype):
    weight = random(1000, 64, dtype=dtype)
    weight[999, 63] = value
    assert Screen.of(packed.pack(weight)) is None


def test_a_row_of_which_all_words_are_alike_is_not_certain(dtype):
    x = torch.zeros(2, 64, dtype=dtype)
    x[1] = random(64, dtype=dtype)
    is_certain = check_equal(x, random(5000, 64, seed=1, dtype=dtype), least_certain=0.5)
    assert not is_certain[0]


def test_small_numbers(dtype):
    """Products of subnormal numbers and of numbers near them count as zero: nothing is ruled out by them."""
    weight, x = random(1000, 64, dtype=dtype), random(5, 64, seed=1, dtype=dtype)
    for scale in (1e-20, 1e-30, 1e-38):
        check_equal(scale * x, weight, least_certain=0.0)
        check_equal(x, scale * weight, least_certain=0.0)
        check_equal(scale * x, scale * weight, least_certain=0.0)


def test_a_mismatch_is_refused():
    screen = screen_of(random(100, 64))
    with pytest.raises(RuntimeError, match="x is 62 wide, weight 64"):
        largest(screen, random(2, 62))
    with pytest.raises(RuntimeError, match="do not take rows"):
        largest(screen, random(2, 64, dtype=torch.float32))
    with pytest.raises(RuntimeError, match="the screen of another weight"):
        largest(replace(screen, weight=packed.pack(random(200, 64))), random(2, 64))
    with pytest.raises(RuntimeError, match="are not screened"):
        Screen.of(packed.pack(random(128, 128), is_int8=True))
