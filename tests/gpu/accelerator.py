"""The device that the GPU scripts run on: what it is, how long something takes on it, and its measured limits.

Times are between CUDA events, with the L2 cache overwritten before each run, and the median of several runs. The
rehearsal runs on the CPU, in Triton's interpreter, and takes no times.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata

import torch

_FLUSH_BYTES = 2**30  # some ten times the L2 cache
_HEAD_START_CYCLES = 2_000_000  # of the GPU's clock, about a millisecond: the host starts what comes next meanwhile
_HOPPER = (9, 0)
_MATRIX = 8192
_COPY_BYTES = 4 * 2**30
_STEP_BYTES = 4 * 2**30  # a decode step of 256 requests takes less than half of it
_VERSIONS = ("torch", "triton", "deep_gemm", "sgl-deep-gemm", "flash_mla", "sgl-flash-mla", "apache-tvm-ffi")


@dataclass(frozen=True)
class Limits:
    """The best rates of this card in this run: large products and a large copy (bytes read and written).

    None: could not be measured.
    """

    bf16_tflops: float | None
    fp8_tflops: float | None
    copy_gb_s: float | None


@dataclass(frozen=True)
class Accelerator:
    """A Hopper GPU, or the CPU in a rehearsal.

    Args:
        device: where tensors go.
        runs: how often something is timed.
    """

    device: torch.device
    runs: int = 20

    @property
    def is_rehearsal(self) -> bool:
        return self.device.type == "cpu"

    @property
    def name(self) -> str:
        """The name of the GPU model, from its driver."""
        return "CPU" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)

    def seconds(self, run: Callable[[], object]) -> float:
        """Median seconds of one call on the device, from a cold L2 cache; its first call must have happened."""
        assert not self.is_rehearsal, "a rehearsal takes no times"
        flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.runs)]
        for start, end in pairs:
            flush.zero_()
            torch.cuda._sleep(_HEAD_START_CYCLES)
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in pairs) / 1e3

    def wait(self) -> None:
        """Until the device has done everything."""
        if not self.is_rehearsal:
            torch.cuda.synchronize()

    def works(self) -> bool:
        """Whether the device still takes work: after some errors a process cannot use its GPU any more."""
        try:
            self.wait()
        except RuntimeError:
            return False
        return True

    def fits(self, num_bytes: int) -> bool:
        """Whether the card has room for this much and for what a step takes besides."""
        if self.is_rehearsal:
            return True
        self.release()
        free, _ = torch.cuda.mem_get_info()
        return num_bytes < free - _STEP_BYTES

    def release(self) -> None:
        """Give memory that nothing uses any more back to the card."""
        if not self.is_rehearsal:
            gc.collect()
            torch.cuda.empty_cache()

    def limits(self) -> Limits:
        """Measure the card: 8192 × 8192 × 8192 products in bfloat16 and FP8, a copy of 4 GiB."""
        x, y = (torch.randn(_MATRIX, _MATRIX, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        one = torch.ones((), device=self.device)
        x8, y8 = x.to(torch.float8_e4m3fn), y.to(torch.float8_e4m3fn).t()

        def fp8_product() -> torch.Tensor:
            return torch._scaled_mm(x8, y8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

        source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        flops = 2 * _MATRIX**3 / 1e12
        return Limits(
            self._rate(flops, lambda: x @ y),
            self._rate(flops, fp8_product),
            self._rate(2 * _COPY_BYTES / 1e9, lambda: target.copy_(source)),
        )

    def _rate(self, amount: float, run: Callable[[], object]) -> float | None:
        """Amount per second of one call; None, and a line that says why, where it cannot run."""
        try:
            run()
            return amount / self.seconds(run)
        except RuntimeError as error:
            print(f"a limit of the card cannot be measured: {error}", file=sys.stderr)
            return None

    def describe(self) -> dict[str, str]:
        """Device and versions of what is installed."""
        described = {"device": "CPU, in Triton's interpreter", "python": platform.python_version()}
        if not self.is_rehearsal:
            properties = torch.cuda.get_device_properties(self.device)
            described["device"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
            described["cuda"] = str(torch.version.cuda)
        for package in _VERSIONS:
            try:
                described[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                described[package] = "none"
        return described


def why_no_hopper() -> str | None:
    """Return why this machine has no GPU for these scripts, or None."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA GPU"
    capability = torch.cuda.get_device_capability()
    if capability != _HOPPER:
        return f"the GPU {torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}, not 9.0"
    return None


def rehearse() -> None:
    """Have Triton's operations run on the CPU, in its interpreter; call it before anything imports triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    with suppress(ImportError):  # without triton nothing of it is rehearsed
        from interpreter import multiply_in_float64

        multiply_in_float64()


def unusable(reason: str) -> str:
    """A sentence that says what to do."""
    return f"{reason}; this needs a Hopper GPU (H100, H200, H800), or --rehearse on the CPU."


def folder_of(name: str) -> str:
    """Return the name of a GPU model's results folder: "nvidia-h100-80gb-hbm3"."""
    return "-".join("".join(letter if letter.isalnum() else " " for letter in name.lower()).split())


if __name__ == "__main__":  # prints where results of this machine go
    if sys.argv[1:] == ["--rehearse"]:
        print("rehearsal")
    elif (reason := why_no_hopper()) is not None:
        print(unusable(reason), file=sys.stderr)
        sys.exit(2)
    else:
        print(folder_of(torch.cuda.get_device_name()))
