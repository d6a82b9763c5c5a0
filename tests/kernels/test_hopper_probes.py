"""Reasons why the operations for Hopper GPUs cannot run, and the choice where they can."""

from __future__ import annotations

import inspect
import re
import tomllib
from dataclasses import replace
from functools import partial

import pytest
import torch

from batchinfer.model.ops import Ops
from batchinfer.records import ModelError
from batchinfer_kernels import registry
from batchinfer_kernels.hopper import invariant, libraries
from batchinfer_kernels.hopper import ops as hopper
from batchinfer_kernels.triton import probe as triton_probe
from batchinfer_kernels.triton.ops import Kernel
from support import hopper_stand_ins as stand_ins
from support.hopper_cases import OPS, forget
from support.paths import ROOT
from support.triton_device import needs_triton

REASONS = [
    ({}, None, None),
    ({"cuda": None}, "built without CUDA", "built without CUDA"),
    ({"available": False}, "no GPU that this torch", "no GPU that this torch"),
    ({"capability": (8, 0)}, "GPU X has compute capability 8.0", "Hopper GPUs have 9.0"),
    ({"capability": (10, 0)}, "GPU X has compute capability 10.0", "10.0"),
    ({"home": False}, "no compiler .*/cuda/bin/nvcc", None),
    ({"deep_gemm": None, "flash_mla": None}, "deep_gemm is not installed", "flash_mla is not installed"),
    ({"deep_gemm": stand_ins.deep_gemm_1_0}, "deep_gemm of unknown version has no fp8_gemm_nt", None),
    ({"flash_mla": stand_ins.flash_mla_without_hopper}, None, "2026.9.30 has no dense decode"),
    ({"flash_mla": partial(stand_ins.flash_mla_sgl, legacy=False)}, None, "no dense decode for Hopper"),
    ({"deep_gemm": stand_ins.deep_gemm_upstream, "flash_mla": stand_ins.flash_mla_first}, None, None),
]


@pytest.mark.parametrize(("changes", "deep_gemm", "flash_mla"), REASONS)
def test_a_probe_says_what_is_missing(machine, changes, deep_gemm, flash_mla):
    machine(**changes)
    for reason, expected in (
        (libraries.why_not_deep_gemm(), deep_gemm),
        (libraries.why_not_flash_mla(), flash_mla),
    ):
        if expected is None:
            assert reason is None
        else:
            assert re.search(expected, reason), reason
    rows = {row.op: row for row in registry.explain(device="cuda") if row.candidate == "hopper"}
    over_fp8_pages = rows.pop("mla_decode_fp8")
    assert not over_fp8_pages.chosen
    if flash_mla is None:
        assert "longest one of its step, so only by name" in over_fp8_pages.reason
        assert registry.select("mla_decode_fp8", "hopper", torch.bfloat16, "cuda").name == "hopper"
    own_cuts = rows.pop("mla_decode")
    assert not own_cuts.chosen
    if flash_mla is None:
        assert "depend on the other requests of its batch, so only by name" in own_cuts.reason
        assert registry.select("mla_decode", "hopper", torch.bfloat16, "cuda").name == "hopper"
    assert set(rows) == {*OPS, "choose_keys", "mla_sparse"} - {"mla_decode"}
    for op, row in rows.items():
        assert row.chosen == ((flash_mla if op == "mla_sparse" else deep_gemm) is None)
    chosen = registry.select("mla_decode", dtype=torch.bfloat16, device="cuda")
    assert (chosen.name == "hopper-invariant") == (invariant.why_not() is None)
    assert chosen.name != "hopper"


def test_a_library_that_cannot_be_imported_is_named_with_its_error(machine, tmp_path, monkeypatch):
    machine(deep_gemm=None)
    (tmp_path / "deep_gemm.py").write_text("raise OSError('libnvrtc.so.13: cannot\\nopen')")
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    reason = libraries.why_not_deep_gemm()
    assert reason == "deep_gemm cannot be imported here (OSError: libnvrtc.so.13: cannot open)"


def test_toolkits_are_looked_for_where_the_library_looks(machine, tmp_path, monkeypatch):
    machine(home=False)
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "1")  # compiles without nvcc
    assert libraries._why_no_toolkit() is None
    monkeypatch.delenv("DG_JIT_USE_NVRTC")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    assert "no CUDA toolkit in" in libraries._why_no_toolkit()
    machine()
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path / "cuda" / "bin"))
    assert libraries._why_no_toolkit() is None


def test_a_cpu_user_pays_nothing(monkeypatch):
    """A torch without CUDA is asked nothing else, and nothing is imported."""
    for name in ("is_available", "get_device_capability", "init", "device_count"):
        monkeypatch.setattr(torch.cuda, name, partial(pytest.fail, f"torch.cuda.{name} was called"))
    monkeypatch.setattr(libraries.importlib, "import_module", partial(pytest.fail, "a library was imported"))
    monkeypatch.setattr(torch.version, "cuda", None)
    forget()
    assert libraries.why_not_deep_gemm() == libraries.why_not_flash_mla() == "this torch is built without CUDA"
    forget()


def test_a_hopper_gpu_gets_its_libraries_first(machine):
    machine()
    ops = Ops.select("auto", torch.bfloat16, eight_bit=True, device="cuda")
    expected = [invariant.mla_decode if name == "mla_decode" else getattr(hopper, name) for name in OPS]
    assert [getattr(ops, name).implementation for name in OPS] == expected
    assert "hopper-deep_gemm-0.1.2" in ops.names()
    assert "hopper-invariant-flash_mla-1.0.0" in ops.names()
    assert ops.reads_on_host, "without Triton what these do not take goes to the reference"
    assert Ops.select("auto", torch.float32, device="cuda").linear.name == "reference"
    assert [candidate.name for candidate in ops.linear.candidates] == ["hopper", "reference"]
    with pytest.raises(registry.BackendError, match="hopper cannot run here: it is for GPUs, not for cpu tensors"):
        registry.select("linear", "hopper", torch.bfloat16)
    machine(available=False)
    with pytest.raises(registry.BackendError, match="hopper cannot run here: no GPU that this torch can use"):
        registry.select("linear", "hopper", torch.bfloat16, "cuda")


# no kernels of their own on GPUs
PLAIN = ("apply_token_bitmask", "cos_sin", "copy_rows", "gather_rows", "log_sum_exp", "most_likely")


def test_tensors_of_a_device_never_go_to_operations_for_another(machine, monkeypatch):
    """Also on a machine where all of them can run."""
    machine()
    monkeypatch.setattr(triton_probe, "why_not", lambda: None)
    monkeypatch.setattr(triton_probe, "interprets", lambda: False)
    listed = {
        op: tuple(
            replace(candidate, probe=lambda: None, probe_auto=lambda: None) if candidate.name == "triton" else candidate
            for candidate in candidates
        )
        for op, candidates in registry._CANDIDATES.items()
    }
    monkeypatch.setattr(registry, "_CANDIDATES", listed)
    on_gpus = {"hopper-invariant", "hopper", "triton"}
    for device, names in (("cpu", {"cpu", "reference"}), ("cuda:1", on_gpus), ("meta", {"reference"})):
        chosen = {op: registry.select(op, dtype=torch.bfloat16, device=device).name for op in registry.ops()}
        assert {name for op, name in chosen.items() if op not in PLAIN} <= names, device
        assert {row.candidate for row in registry.explain(device=device) if row.chosen} <= names | {"reference"}
    assert not Ops.select("auto", torch.bfloat16, device="cuda").reads_on_host
    assert Ops.select("reference", torch.bfloat16, device="cuda").reads_on_host
    for choice, device in (("cpu", "cuda"), ("triton", "cpu"), ("hopper", "cpu")):
        with pytest.raises(ModelError, match=f"backend '{choice}': .* it is for .*, not for {device} tensors"):
            Ops.select(choice, torch.bfloat16, device=device)


@needs_triton
def test_all_implementations_take_what_the_reference_takes():
    def parameters(run):
        return [(name.rstrip("ABCDEFHKMNPTW_"), it.kind) for name, it in inspect.signature(run).parameters.items()]

    for op, listed in registry._CANDIDATES.items():
        for candidate in listed:
            implementation = candidate.implementation
            run = implementation.run.function if isinstance(implementation.run, Kernel) else implementation.run
            found = [it for it in parameters(run) if it[0] not in implementation.uses]
            assert found == parameters(listed[-1].implementation.run), (op, candidate.name)


def test_the_page_on_gpus_names_the_versions_that_are_installed():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["hopper"]
    page = (ROOT / "docs" / "gpus.md").read_text()  # what the reasons point to
    pinned = dict(requirement.split("==") for requirement in extra if "==" in requirement)
    assert set(pinned) == {"sgl-deep-gemm", "apache-tvm-ffi"}
    for name, version in pinned.items():
        assert f"{name} {version}" in page
    # flash_mla's package asks for a newer torch than its kernels need, so it goes in apart
    assert "pip install --no-deps sgl-flash-mla==1.0.0" in page
    (torch_needed,) = [requirement for requirement in extra if requirement.startswith("torch")]
    assert torch_needed == "torch>=2.11,<2.12"
    assert "| torch | 2.11.0, built for CUDA 13.0 |" in page
    assert "are written and checked against their interfaces" in page
