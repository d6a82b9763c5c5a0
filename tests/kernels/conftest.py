"""Operations by implementation; stand-ins for the libraries of Hopper GPUs, and machines that seem to have them."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec

import pytest
import torch

from batchinfer_kernels import registry
from batchinfer_kernels.cpu import build
from batchinfer_kernels.hopper import ops as hopper
from support import hopper_stand_ins as stand_ins
from support.cuda_stand_ins import own_cuts_on_the_cpu
from support.hopper_cases import forget
from support.triton_device import DEVICE, REASON


@pytest.fixture(params=["reference", "cpu", "triton"])
def ops(request):
    """Return a function for an operation of one implementation, if that can run here."""
    if request.param == "cpu" and build.why_not() is not None:
        pytest.skip(f"no C++ operations on this machine: {build.why_not()}")
    if request.param == "triton":
        if DEVICE.type != "cpu" or REASON is not None:
            pytest.skip("Triton's interpreter is not on")
        if request.node.callspec.params.get("dtype") is torch.float32:
            pytest.skip("Triton runs bfloat16")

    def bound(name):
        operation = registry.bind(name, [request.param])
        assert operation.name == request.param
        return operation

    bound.is_triton = request.param == "triton"
    return bound


@pytest.fixture
def install(monkeypatch):
    """Puts stand-ins in the libraries' places."""

    def put(*modules):
        forget()
        for module in modules:
            module.__spec__ = ModuleSpec(module.__name__, None)
            monkeypatch.setitem(sys.modules, module.__name__, module)
        return modules[0]

    yield put
    forget()


@pytest.fixture
def gpu(monkeypatch, install):
    """Treat tensors as those of a GPU; the libraries are replaced by the reference."""
    monkeypatch.setattr(hopper, "is_on_gpu", lambda *tensors: True)
    stand_ins.COPIED.clear()
    return install


@pytest.fixture
def one_hopper(monkeypatch):
    own_cuts_on_the_cpu(monkeypatch)


GPU = {
    "cuda": "13.0",
    "available": True,
    "capability": (9, 0),
    "home": True,
    "deep_gemm": stand_ins.deep_gemm_sgl,
    "flash_mla": stand_ins.flash_mla_sgl,
}


@pytest.fixture
def machine(monkeypatch, install, tmp_path):
    """A machine as a Hopper node is, but for some changes."""

    def make(**changes):
        facts = GPU | changes
        own_cuts_on_the_cpu(monkeypatch)
        monkeypatch.setattr(torch.version, "cuda", facts["cuda"])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: facts["available"])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: facts["capability"])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU X")
        monkeypatch.delenv("CUDA_PATH", raising=False)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
        (tmp_path / "cuda" / "bin").mkdir(parents=True, exist_ok=True)
        if facts["home"]:
            (tmp_path / "cuda" / "bin" / "nvcc").write_text("")
            (tmp_path / "cuda" / "bin" / "nvcc").chmod(0o755)
        for name in ("deep_gemm", "flash_mla"):
            if facts[name] is not None:
                install(facts[name]())
        forget()

    return make
