"""The question whether plain PyTorch's rows keep their bits: it finds what does not, as trying everything does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from batchinfer.model.row_computations import plain_computations
from batchinfer.model.transformer import Transformer
from batchinfer.rank.bit_equality import equal_rows
from batchinfer_kernels import reference, registry, row_check, row_survey
from batchinfer_kernels.reference import mla as reference_mla
from batchinfer_kernels.row_check import AttentionShape, RowComputation, why_rows_differ
from support.paths import RANDOM_MODEL

SHAPE = AttentionShape(num_heads=3, nope_dim=8, rotary_dim=4, value_dim=8, latent_dim=16)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_one_order(x, weight):
    """Each sum from its first product to its last, whatever rows there are."""
    y = torch.zeros(*x.shape[:-1], weight.shape[-2])
    for depth in range(x.shape[-1]):
        y += x[..., depth, None] * weight[..., None, :, depth]
    return y


def in_two_halves(x, weight):
    """Other sums, as libraries make them when they share a product's depth out among threads."""
    half = x.shape[-1] // 2
    return in_one_order(x[..., :half], weight[..., :half]) + in_one_order(x[..., half:], weight[..., half:])


def varies(when):
    """A product that takes the other order when `when(number of rows)`."""
    return lambda x, weight: (in_two_halves if when(x.shape[-2]) else in_one_order)(x, weight)


def test_a_product_in_one_order_keeps_the_bits_of_its_rows():
    assert why_rows_differ([row_check.product(random(7, 40), in_one_order)]) is None
    assert why_rows_differ([row_check.batched_product(random(3, 7, 40), in_one_order)]) is None


@pytest.mark.parametrize("threads_used", [1, 2])
def test_what_differs_is_named_with_its_shape_rows_and_threads(threads, threads_used):
    threads(threads_used)
    computations = [
        row_check.product(random(9, 40), in_one_order),
        row_check.product(random(7, 40), varies(lambda num_rows: num_rows == 1)),
    ]
    assert why_rows_differ(computations) == (
        "a product with a weight of 7 x 40 gives a row other bits among 71 rows than alone "
        f"({threads_used} thread{'s' if threads_used == 2 else ''})"
    )


@pytest.mark.parametrize("multiple", [8, 16, 24, 32, 40, 48, 56, 64])
def test_an_order_that_is_taken_for_one_number_of_tiles_alone_is_found(multiple):
    # the plain operations hand rows to the library in multiples of 8, so these are all that it sees up to 72
    def padded(x, weight):
        rows = x.shape[-2]
        whole = torch.nn.functional.pad(x, (0, 0, 0, -rows % reference.products.ROW_MULTIPLE))
        return varies(lambda num_rows: num_rows == multiple)(whole, weight)[..., :rows, :]

    assert "a weight of 7 x 40" in why_rows_differ([row_check.product(random(7, 40), padded)])
    assert "3 weights of 7 x 40" in why_rows_differ([row_check.batched_product(random(3, 7, 40), padded)])


def test_keys_that_are_chosen_by_the_company_of_a_query_are_found():
    def choose(queries, keys, **options):
        slots = reference.choose_keys(queries, keys, **options)
        return slots.flip(0) if len(slots) == 2 else slots

    indexer = row_check.IndexerShape(num_heads=3, head_dim=8, topk=16)
    assert why_rows_differ([row_check.sparse_attention(SHAPE, indexer, torch.float32)]) is None
    found = why_rows_differ([row_check.sparse_attention(SHAPE, indexer, torch.float32, choose)])
    assert found is not None
    assert "keys chosen by 3 gives a row other bits among 71 rows than among 2" in found


def test_attention_that_looks_at_the_other_requests_is_found():
    def decode(q, keys, **options):
        y = reference_mla.mla_decode(q, keys, **options)
        return y * (1 + 2**-20) if keys.page_table_BP.shape[1] > 2 else y  # another sum when any prompt is long

    found = why_rows_differ([row_check.decode_attention(SHAPE, torch.float32, decode)])
    assert found.startswith("attention of 3 heads over latents of 20 gives a row other bits among 71 rows than alone")

    def prefill(q, *rest, **options):
        y = reference_mla.mla_prefill(q, *rest, **options)
        return y * (1 + 2**-20) if len(q) == 8 else y

    found = why_rows_differ([row_check.prefill_attention(SHAPE, random(3, 16, 16), prefill)])
    assert found.startswith("attention of 3 heads over keys of 12 gives a row other bits among 71 rows than among 8")


def test_a_large_product_is_asked_a_few_times_only():
    asked = []

    def compute(start, stop):
        asked.append(stop - start)
        return torch.zeros(stop - start)

    assert why_rows_differ([RowComputation("a large one", compute, cost=10**9)]) is None
    large = len(asked)
    assert why_rows_differ([RowComputation("a small one", compute, cost=1)]) is None
    assert asked[0] == 71
    assert {1, 8, 56} <= set(asked[:large])  # what tells most is asked in any case
    assert large < 10 < len(asked) - large
    assert sum(asked[:large]) < 150


def test_every_plain_product_of_a_model_is_asked_about_once():
    # hidden 128, 4 heads of 32 + 16 and 32, latents 64 + 16, experts 64 wide, a vocabulary of 1024
    model = Transformer.load(RANDOM_MODEL, dtype=torch.float32, backend="reference")
    names = [computation.name for computation in plain_computations(model)]
    assert len(names) == len(set(names))
    assert {name.removeprefix("a product with a weight of ") for name in names if " a weight of " in name} == {
        *("1024 x 128", "192 x 64", "64 x 128", "80 x 128", "128 x 128"),  # head, queries twice, latents, output
        *("768 x 128", "128 x 384", "16 x 128", "128 x 64"),  # dense MLP, router, experts down
    }
    assert {name for name in names if " weights of " in name} == {
        "a product with 4 weights of 64 x 32",
        "a product with 4 weights of 32 x 64",
    }
    assert names[-2:] == ["attention of 4 heads over latents of 80", "attention of 4 heads over keys of 48"]


@pytest.mark.usefixtures("cpp")
def test_what_runs_in_cpp_is_equal_by_construction_and_not_asked_about():
    model = Transformer.load(RANDOM_MODEL, dtype=torch.bfloat16, backend="cpu")
    assert list(plain_computations(model)) == []
    said = equal_rows(model)
    assert (said.bit_equal, said.bit_equal_reason) == (True, None)
    assert said.numerics == model.kernels


def test_a_model_whose_products_vary_says_so_and_what_to_do(monkeypatch):
    model = Transformer.load(RANDOM_MODEL, dtype=torch.float32, backend="reference")
    monkeypatch.setattr(torch.nn.functional, "linear", varies(lambda num_rows: num_rows == 8))
    monkeypatch.delenv("MKL_CBWR", raising=False)
    said = equal_rows(model, "reference")
    assert said.bit_equal is False
    assert said.bit_equal_reason == (
        "in plain PyTorch a product with a weight of 1024 x 128 gives a row other bits among 71 rows than alone "
        '(1 thread); set cluster.backend = "auto", which takes the C++ operations where it can'
    )
    assert "(" in said.processor
    assert said.numerics.startswith("plain PyTorch")


@pytest.mark.parametrize("choice", ["auto", "reference"])
def test_the_survey_asks_what_is_chosen_for_each_dtype(monkeypatch, choice):
    found = {one.dtype: one for one in row_survey.survey_rows(choice)}
    assert list(found) == ["float32", "bfloat16", "fp8"]
    for dtype, one in found.items():
        chosen = registry.select("linear", choice, row_survey.DTYPES[dtype])
        assert one.implementation.startswith("C++ for " if chosen.name == "cpu" else "plain PyTorch"), dtype
        assert chosen.name != "cpu" or one.why_unequal is None, dtype
    # the function that the model calls is asked, not another product
    monkeypatch.setattr(torch.nn.functional, "linear", varies(lambda num_rows: num_rows == 8))
    (plain, *_) = row_survey.survey_rows("reference")
    assert plain.why_unequal.startswith("a product with a weight of 512 x 2048 gives a row other bits")


# Every number of rows up to 71 at all starts that are multiples of 5 or 8, and the message.
TRY_ALL = """
import sys, torch
from batchinfer_kernels import reference, row_check
torch.set_num_threads(int(sys.argv[1]))
generator = torch.Generator().manual_seed(3)
wrong = []
for num_columns, depth in [(16, 128), (24, 33), (8, 256), (64, 512), (192, 200), (512, 256), (1024, 128), (5, 7)]:
    weight = torch.randn(num_columns, depth, generator=generator)
    x = torch.randn(71, depth, generator=generator)
    whole = reference.linear(x, weight)
    is_equal = all(
        torch.equal(reference.linear(x[start : start + count], weight), whole[start : start + count])
        for count in range(1, 72)
        for start in sorted({0, 71 - count, *range(5, 72 - count, 40), *range(8, 72 - count, 24)})
    )
    said = row_check.why_rows_differ([row_check.product(weight)])
    print(num_columns, depth, is_equal, said)
    if is_equal != (said is None):
        wrong.append((num_columns, depth))
sys.exit(bool(wrong))
"""


@pytest.mark.parametrize(
    ("mkl", "threads_used"),
    [
        (None, "2"),
        ("AVX2,STRICT", "1"),
        pytest.param(None, "1", marks=pytest.mark.slow),
        pytest.param("AVX2,STRICT", "2", marks=pytest.mark.slow),
    ],
)
def test_the_answer_is_that_of_trying_everything(mkl, threads_used):
    variables = {name: value for name, value in os.environ.items() if name not in ("MKL_CBWR", "OMP_NUM_THREADS")}
    variables |= {} if mkl is None else {"MKL_CBWR": mkl}
    done = subprocess.run(
        [sys.executable, "-c", TRY_ALL, threads_used], env=variables, capture_output=True, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
