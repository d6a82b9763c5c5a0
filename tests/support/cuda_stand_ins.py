"""Stand-ins for CUDA's events and graphs and for Hopper's libraries on a CPU, so that what is around them can run."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from batchinfer_kernels.hopper import fp8_pages as hopper_fp8_pages
from batchinfer_kernels.hopper import invariant as hopper_invariant
from batchinfer_kernels.hopper import libraries
from batchinfer_kernels.hopper import ops as hopper
from batchinfer_kernels.hopper import sparse as hopper_sparse
from batchinfer_kernels.triton import probe
from support import hopper_stand_ins as stand_ins

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
import candidates
from accelerator import Accelerator

needs_interpreter = pytest.mark.skipif(
    probe.why_not() is not None or not probe.interprets(), reason="rehearsals need Triton's interpreter on the CPU"
)


class CpuAsCard(Accelerator):
    """A CPU that does not count as a rehearsal."""

    @property
    def is_rehearsal(self):
        return False


class HostEvent:
    """Times are the host's."""

    def __init__(self, enable_timing=False, external=False):
        assert enable_timing, "an event without a time"
        assert external == Capture.is_under_way, "inside a capture an event must be external, outside it must not"
        self.at_s = None

    def record(self):
        self.at_s = time.perf_counter()

    def elapsed_time(self, end):
        return 1e3 * (end.at_s - self.at_s)


class Capture:
    """A graph that holds nothing: what is captured has run already, and a replay takes as long."""

    is_under_way = False
    seconds = 0.0

    def replay(self):
        assert not Capture.is_under_way
        time.sleep(self.seconds)


@contextmanager
def capture(graph):
    start_s = time.perf_counter()
    Capture.is_under_way = True
    yield
    Capture.is_under_way = False
    graph.seconds = time.perf_counter() - start_s


def events_on_the_cpu(monkeypatch):
    """Puts the stand-ins in the places of CUDA's."""
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Capture)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Capture.is_under_way)


def own_cuts_on_the_cpu(monkeypatch):
    """A CPU counts as a Hopper GPU."""
    monkeypatch.setattr(hopper_invariant, "_num_parts", lambda _, rows: max(1, stand_ins.NUM_SMS // -(-rows // 64)))
    monkeypatch.setattr(hopper_invariant, "_device", lambda: torch.device("cpu"))


def hopper_on_the_cpu(monkeypatch):
    """Stand-ins in the places of deep_gemm and flash_mla; tensors here count as a GPU's."""
    for module in (stand_ins.deep_gemm_sgl(), stand_ins.flash_mla_sgl()):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    libraries.decode_parameters.cache_clear()
    libraries.sparse_parameters.cache_clear()
    libraries.makes_own_metadata.cache_clear()
    for module in (hopper, hopper_fp8_pages, hopper_sparse):
        monkeypatch.setattr(module, "is_on_gpu", lambda *tensors: True)
    own_cuts_on_the_cpu(monkeypatch)
    monkeypatch.setattr(hopper_invariant, "why_not", lambda: None)
    monkeypatch.setattr(candidates, "_HOPPER_PROBES", dict.fromkeys(candidates._HOPPER_PROBES, lambda: None))
