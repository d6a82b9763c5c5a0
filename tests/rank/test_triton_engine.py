"""Triton operations in a model, in the choice of operations, and compiled for a GPU that is not here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from batchinfer.model.ops import Ops, op_names
from batchinfer.model.transformer import Transformer
from batchinfer_kernels import registry
from batchinfer_kernels.triton import ops, probe
from support.checkpoints import MISTRAL, edit_config, make_checkpoint
from support.compile_triton import COMMAND, RECORDED, worse
from support.jobs import answers, batchinfer, write_job, write_shard
from support.paged_steps import PagedRequests
from support.paths import RANDOM_MODEL, SAMPLE_MODEL
from support.triton_device import DEVICE, needs_triton

COMPILE = Path(__file__).parents[1] / "support" / "compile_triton.py"
SHARED_BYTES = 227 * 1024  # of one Hopper multiprocessor for one block of threads
MATRIX_KERNELS = {
    "_product",
    "_attend_part",
    "_attend_tile",
    "_attend_tiles",
    "_part_of_logits",
    "_score",
    "_hadamard_fp8",
    "_attend_entries",
    "_tiles_of_experts",
}

interpreted = pytest.mark.skipif(not probe.interprets(), reason="Triton is not interpreted: it runs on the GPU here")


@pytest.mark.all  # make test: logits, below
@needs_triton
@interpreted
def test_the_sample_model_answers_as_with_the_reference(tmp_path):
    write_shard(tmp_path / "prompts" / "part-0.parquet", {"prompt": ["What is 2 plus 3?"]})
    for name in ("triton", "reference"):
        job = write_job(
            tmp_path,
            name=f"{name}.toml",
            output={"dir": name},
            model={"path": str(SAMPLE_MODEL), "dtype": "bfloat16"},
            sampling={"max_tokens": 2},
            cluster={"backend": name},
        )
        ended = batchinfer("run", job)
        assert ended.code == 0, ended.err
    assert answers(tmp_path / "triton") == answers(tmp_path / "reference")


@needs_triton
@interpreted
@pytest.mark.parametrize("eight_bit", [pytest.param(False, marks=pytest.mark.slow), True])
def test_logits_are_as_good_as_those_of_the_reference(eight_bit):
    prompt = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(0))
    exact = logits_of(prompt, dtype=torch.float32, backend="reference")
    ours, plain = (
        logits_of(prompt, dtype=torch.bfloat16, eight_bit=eight_bit, backend=name) for name in ("triton", "reference")
    )
    # both round at other places than float32 does, neither much more than the other
    assert (ours - exact).abs().mean() < 1.25 * (plain - exact).abs().mean()


@pytest.mark.slow
@needs_triton
@interpreted
def test_queries_grow_with_their_position_as_with_the_reference(tmp_path):
    make_checkpoint(tmp_path, "mistral4")
    prompt = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(0))  # the factor changes at 24
    options = {"dtype": torch.bfloat16, "folder": tmp_path}
    exact = logits_of(prompt, **options | {"dtype": torch.float32}, backend="reference")
    ours, plain = (logits_of(prompt, **options, backend=name) for name in ("triton", "reference"))
    assert (ours - exact)[24:].abs().mean() < 1.25 * (plain - exact)[24:].abs().mean()
    edit_config(tmp_path, rope_parameters=MISTRAL["rope_parameters"] | {"llama_4_scaling_beta": 0.0})
    constant = logits_of(prompt, **options, backend="reference")
    assert (ours - constant)[24:].abs().mean() > 2 * (ours - plain)[24:].abs().mean()


def logits_of(prompt, folder=RANDOM_MODEL, **options):
    """The logits of a prompt alone."""
    requests = PagedRequests(Transformer.load(folder, **options), [prompt], max_new_tokens=0)
    requests.prefill([0], [1000])
    return requests.all_logits(0)


# no kernels of their own on GPUs
PLAIN = {"apply_token_bitmask", "cos_sin", "copy_rows", "gather_rows", "log_sum_exp", "most_likely"}


@pytest.mark.all  # make test: logits, above
@needs_triton
def test_triton_by_name_is_triton_for_every_operation():
    chosen = Ops.select("triton", torch.bfloat16, device=DEVICE)
    assert {getattr(chosen, name).name for name in op_names() if name not in PLAIN} == {"triton"}
    assert f"triton.ops-{probe.version()}" in chosen.names()
    # blocks of the KV store are kept under these names: index keys that another version makes are others
    assert "reference" not in chosen.names().split()
    assert "reference" in replace(chosen, index_cache=registry.select("index_cache", "reference")).names().split()


@needs_triton
@interpreted
def test_auto_never_takes_the_interpreter():
    rows = [row for row in registry.explain() if row.candidate == "triton"]
    assert {row.op for row in rows} == set(registry.ops()) - PLAIN
    assert not any(row.chosen for row in rows)
    assert all("interpreter" in row.reason for row in rows)
    assert registry.select("linear", dtype=torch.bfloat16).name != "triton"


def test_without_a_gpu_triton_is_refused_with_the_reason_and_never_imported():
    code = (
        "import sys, torch\n"
        "torch.cuda.is_available = lambda: False\n"
        "from batchinfer_kernels import registry\n"
        "registry.explain()\n"
        "assert 'triton' not in sys.modules\n"
        "registry.select('linear', 'triton', device='cuda')\n"
    )
    ended = run_python("-c", code)
    assert ended.returncode == 1
    assert "linear: triton cannot run here: no CUDA GPU that this torch can use" in ended.stderr


def test_it_says_when_triton_is_not_installed(monkeypatch):
    monkeypatch.setattr(probe.importlib.util, "find_spec", lambda name: None)
    assert "not installed" in probe.why_not.__wrapped__()


def test_it_says_what_a_gpu_lacks(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    gpu = SimpleNamespace(shared_memory_per_multiprocessor=99 * 1024)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: gpu)
    for capability, shared_kb, reason, fp8_reason in (
        ((7, 5), 64, "7.5, bfloat16 needs 8.0", "7.5, E4M3 needs 8.9"),
        ((8, 9), 99, "99 KB of shared memory", None),
        ((8, 0), 164, None, "8.0, E4M3 needs 8.9"),
        ((9, 0), 228, None, None),
    ):
        gpu.shared_memory_per_multiprocessor = shared_kb * 1024
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        for found, expected in ((probe.why_not.__wrapped__(), reason), (probe.why_no_fp8(), fp8_reason)):
            assert found is None if expected is None else expected in found
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(ops, "_runs_on", lambda x: True)
    with pytest.raises(RuntimeError, match=r"E4M3 needs 8\.9; use bfloat16"):
        ops.pack(torch.zeros(1, 1), eight_bit=True)


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory):
    """Compile all kernels and return the results; the compiler's cache keeps them."""
    cache = getattr(request.config, "cache", None)
    folder = cache.mkdir("triton") if cache else tmp_path_factory.mktemp("triton")
    ended = run_python(COMPILE, TRITON_CACHE_DIR=str(folder))
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_it_says_which_numpy_an_old_interpreter_needs(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for triton, numpy, is_taken in (("3.6.0", "2.3.5", True), ("3.6.0", "2.4.0", False), ("3.7.1", "2.4.6", True)):
        versions = {"triton": triton, "numpy": numpy}
        monkeypatch.setattr(probe, "installed_version", versions.__getitem__)
        reason = probe.why_not.__wrapped__()
        assert reason is None if is_taken else "the interpreter of Triton 3.6.0 needs numpy before 2.4" in reason


@needs_triton
def test_no_kernel_is_refused_because_a_number_is_one(compiled):
    """One row, one expert, one page: the interpreter takes what the compiler does not."""
    for kernel in compiled:
        assert not kernel["refused_ones"], kernel


@pytest.mark.all  # make test: test_no_kernel_is_refused_because_a_number_is_one
@needs_triton
def test_every_kernel_compiles_for_hopper_at_the_shapes_of_v3(compiled):
    assert len({kernel["name"] for kernel in compiled}) >= 20
    for kernel in compiled:
        assert kernel["shared_bytes"] <= SHARED_BYTES, kernel
        # products on Hopper's own matrix unit, not on the older one or on none
        assert bool(kernel["matrix_instructions"]) == (kernel["name"] in MATRIX_KERNELS), kernel
    # steps of few rows take other tiles than those of many
    dense = [kernel for kernel in compiled if not re.search(r"\bi32\b", kernel["key"])]  # without a list of tiles
    for name in ("_product", "_part_of_logits"):
        heights = {re.search(r" ROWS=(\d+)", kernel["key"]).group(1) for kernel in dense if kernel["name"] == name}
        assert heights == {"64", "128"}, name
    # experts' rows meet the same instruction in tiles of 64 and of 128 rows: both layouts give the same bits
    products = [kernel for kernel in compiled if kernel["name"] == "_product"]
    shapes = {
        is_wide: {
            word.split(".")[4]
            for kernel in products
            if ("COLUMNS=256" in kernel["key"]) is is_wide
            for word in kernel["matrix_instructions"]
        }
        for is_wide in (False, True)
    }
    assert shapes[False] <= {"m64n64k16", "m64n128k16", "m64n64k32", "m64n128k32"}
    assert shapes[True] == {"m64n256k16"}  # of the vocabulary


@pytest.mark.all  # make test: test_no_kernel_is_refused_because_a_number_is_one
@needs_triton
def test_no_kernel_takes_more_of_a_gpu_than_is_written_down(compiled):
    """Registers, stack, shared memory and instructions, by the version of Triton."""
    recorded = json.loads(RECORDED.read_text()).get(version("triton"))
    if recorded is None:
        pytest.skip(f"nothing is written down of Triton {version('triton')}: {COMMAND}")
    sentences = worse({kernel["key"]: kernel for kernel in compiled}, recorded)
    assert not sentences, "\n".join([*sentences, f"if that is meant: {COMMAND}"])


@pytest.mark.all  # make test: test_no_kernel_is_refused_because_a_number_is_one
def test_a_kernel_that_got_worse_is_named_with_both_numbers():
    before = {"registers": 100, "stack_bytes": 0, "shared_bytes": 1024, "instructions": 500}
    recorded = {"_same()": before, "_spills()": before, "_longer()": before, "_gone()": before}
    found = {
        "_same()": before | {"registers": 116, "instructions": 550},
        "_spills()": before | {"registers": 117, "stack_bytes": 8},
        "_longer()": before | {"instructions": 551, "shared_bytes": 1025},
        "_new()": before,
    }
    assert worse(found, recorded) == [
        "_gone(): it is not compiled any more",
        "_longer(): instructions 551, before 500",
        "_longer(): shared_bytes 1025, before 1024",
        "_new(): nothing is written down of it",
        "_spills(): registers 117, before 100",
        "_spills(): stack_bytes 8, before 0",
    ]


def run_python(*args, **environment):
    """A process without the interpreter."""
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *map(str, args)],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
