"""A row has the same bits whatever it is computed with: models of random shapes, all dtypes, all instruction sets."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys

import pytest
import torch

from batchinfer.model.transformer import Transformer
from batchinfer_kernels.cpu import build, ops
from batchinfer_kernels.cpu.instructions import FOR_X86, slowest
from support import carried_out
from support.instructions import run_code_with, variables_for
from support.random_shapes import DTYPES, GROUPED, computed, make_model, make_prompts
from support.tiers import first_in_make_test

# of models with grouped-query attention gpt-oss, of an odd width, Qwen3-MoE, and Qwen3 with windows; then all families
GROUPED_SEEDS = range(GROUPED + 6, GROUPED + 9)
MORE_SEEDS = [*range(4, 40), *range(GROUPED, GROUPED + 6), *range(GROUPED + 9, GROUPED + 18)]
SEEDS = [*range(4), *GROUPED_SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MORE_SEEDS)]
PROCESS_SEEDS = [
    *(range(3), GROUPED_SEEDS),
    *(pytest.param(seeds, marks=pytest.mark.slow) for seeds in (range(3, 6), range(GROUPED + 9, GROUPED + 12))),
]

pytestmark = pytest.mark.usefixtures("cpp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_row_alone_is_the_row_among_others_at_every_place_in_chunks_of_any_size(seed, dtype, folder, threads):
    model = Transformer.load(make_model(folder, seed), backend="cpu", **DTYPES[dtype])
    draw, prompts = random.Random(seed), make_prompts(seed)
    order = draw.sample(range(len(prompts)), len(prompts))
    threads(draw.choice([2, 3, 4]))
    together = computed(model, prompts, order, [draw.choice([1, 5, 48, 64, 100, 1000]) for _ in range(5)])
    turned = computed(model, prompts, order[1:] + order[:1], [1000])
    threads(1)
    for i, prompt in enumerate(prompts):
        alone = computed(model, [prompt], [0], [1000]).all_logits(0)
        assert alone.isfinite().all()
        assert torch.equal(together.all_logits(i), alone), f"prompt {i} of {order}"
        assert torch.equal(turned.all_logits(i), alone), f"prompt {i}, one place on"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_at_every_place_among_up_to_seventy_others(dtype, threads):
    draw, generator = random.Random(7), torch.Generator().manual_seed(7)
    narrowest = next((bits for bits in ("four_bit", "eight_bit") if bits in DTYPES[dtype]), None)
    for num_in, num_out in [(draw.randrange(64, 1025), draw.randrange(1, 300)) for _ in range(4)]:
        values = [torch.randn(shape, generator=generator) for shape in ((71, num_in), (num_out, num_in))]
        x, weight = (value.to(DTYPES[dtype]["dtype"]) for value in values)
        weight = ops.pack(weight, **({narrowest: True} if narrowest else {}))
        row, others = x[:1], x[1:]
        threads(1)
        alone = ops.linear(row, weight)
        threads(draw.choice([2, 3, 4]))
        for num_others in (2, 7, 31, 70):
            for place in range(num_others + 1):
                rows = torch.cat([others[:place], row, others[place:num_others]])
                assert torch.equal(ops.linear(rows, weight)[place : place + 1], alone), (place, num_others)


PROGRAM = "from support.random_shapes import program; program()"
PERMITTED = f"from support.carried_out import permit; permit(); {PROGRAM}"


def results_of_a_process(name, folder, seeds, **environment):
    """Return the output of random_shapes.py with these instructions and variables."""
    return json.loads(run_code_with(name, PROGRAM, str(folder), *map(str, seeds), **environment).splitlines()[-1])


def results_with_preloaded(library, name, folder, seeds, **environment):
    """Return results_of_a_process of a process that starts with a preloaded library."""
    ended = subprocess.run(
        [sys.executable, "-c", PERMITTED if name == carried_out.NAME else PROGRAM, str(folder), *map(str, seeds)],
        env=variables_for(name, LD_PRELOAD=str(library), **environment),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="module", params=PROCESS_SEEDS, ids=str)
def results(request, folder):
    """Return a function for the results with some instructions; those without pairs have nothing to choose."""
    for seed in request.param:
        make_model(folder, seed)

    @functools.cache
    def get(name, pairs=1, preloaded=None):
        if preloaded is not None:
            return results_with_preloaded(preloaded, name, folder, request.param, PAIRS=str(pairs))
        return results_of_a_process(name, folder, request.param, PAIRS=str(pairs))

    return get


def of_dtype(dtype, found):
    chosen = {key: value for key, value in found.items() if key.endswith(dtype)}
    assert chosen
    return chosen


LEAST = slowest(build.INSTRUCTION_SETS).name
BUILT_ANYWAY = ("amx", "avx512", "amx-plain")


@pytest.mark.parametrize(
    "name",
    first_in_make_test(
        [
            pytest.param(known.name, marks=() if known.name in BUILT_ANYWAY else pytest.mark.slow)
            for known in build.INSTRUCTION_SETS
        ]
    ),
)
def test_all_instruction_sets_compute_the_same_bits(name, results):
    (chosen,) = [known for known in build.INSTRUCTION_SETS if known.name == name]
    reason = build.why_not_for(chosen)
    if reason:
        pytest.skip(reason)
    found = results(name)
    assert found["finite"]
    if chosen.tiles:  # a separate family, which plain C++ computes, too; but for float32
        assert found == results("amx-plain")
        others = results(LEAST)
        assert of_dtype("float32", found) == of_dtype("float32", others)
        assert of_dtype("bfloat16", found) != of_dtype("bfloat16", others)
    else:
        assert found == results(LEAST)


@pytest.mark.slow  # the quick share: test_products_of_the_instructions_have_the_promised_order_of_sums
def test_models_have_the_bits_of_plain_tiles_when_the_instructions_are_carried_out_one_by_one(results, tmp_path):
    carries_out = tmp_path / "tile_instructions.so"
    carried_out.compile_with("-shared", "-o", str(carries_out))
    assert results(carried_out.NAME, preloaded=carries_out) == results("amx-plain")


@pytest.mark.all  # make test: all instruction sets, above
def test_pairs_by_their_instruction_and_in_float32_have_the_same_bits(results):
    (chosen,) = [known for known in FOR_X86 if known.name == "avx512"]
    if reason := build.why_not_for(chosen):
        pytest.skip(reason)
    assert results("avx512", pairs=1) == results("avx512", pairs=0)


# Every allocated byte is 255, so that float32 and bfloat16 values that were not written are NaN.
FILL = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
void *malloc(size_t size) {
  static void *(*next)(size_t);
  if (!next) next = dlsym(RTLD_NEXT, "malloc");
  void *found = next(size);
  return found ? memset(found, 255, size) : found;
}
int posix_memalign(void **found, size_t alignment, size_t size) {
  static int (*next)(void **, size_t, size_t);
  if (!next) next = dlsym(RTLD_NEXT, "posix_memalign");
  const int code = next(found, alignment, size);
  if (!code) memset(*found, 255, size);
  return code;
}
void *aligned_alloc(size_t alignment, size_t size) {
  static void *(*next)(size_t, size_t);
  if (!next) next = dlsym(RTLD_NEXT, "aligned_alloc");
  void *found = next(alignment, size);
  return found ? memset(found, 255, size) : found;
}
"""
FILLED = "import torch; assert all(torch.empty(size).isnan().all() for size in (7, 1000, 10**6)); print('filled')"


@pytest.mark.all  # make test: a row alone, above
@pytest.mark.parametrize("name", ["", "amx-plain"], ids=["best instructions", "tiles"])
def test_memory_that_nobody_has_written_changes_no_bit(name, results, tmp_path):
    source, library = tmp_path / "fill.c", tmp_path / "fill.so"
    source.write_text(FILL)
    command = [*build._compiler(), "-x", "c", "-shared", "-fPIC", "-O1", str(source), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True)
    filled = {**os.environ, "LD_PRELOAD": str(library)}
    said = subprocess.run([sys.executable, "-c", FILLED], env=filled, capture_output=True, check=True)
    assert said.stdout == b"filled\n"
    name = name or build.instructions().name
    assert results(name, preloaded=library) == results(name)
