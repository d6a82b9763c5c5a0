"""Which implementation of an operation runs here, and why; asked by the model when it is built and by `doctor`.

Each operation lists its candidates from the fastest to the plainest. A probe returns None where the candidate can
run, else the reason why it cannot. "auto" takes the first that can, less those made for another dtype or device. A
choice made by name never falls back where the operation has a candidate of that name; operations that have none (no C++
version was written, say) do what "auto" does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from batchinfer_kernels import reference, sdpa
from batchinfer_kernels.cpu import build as cpu_build
from batchinfer_kernels.cpu import ops as cpu_ops
from batchinfer_kernels.hopper import libraries
from batchinfer_kernels.hopper import ops as hopper
from batchinfer_kernels.triton import ops as triton_ops
from batchinfer_kernels.triton import probe as triton_probe

AUTO = "auto"
CPU = "cpu"  # a type of devices, and the name of the C++ candidates
GPU = "cuda"
Device = torch.device | str


class BackendError(RuntimeError):
    """The implementation that was asked for does not exist or cannot run here; the message says why."""


def _always() -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation of one operation: `run` is called, `probe` says why not (None: it can).

    `dtype` is the only one that it is made for: "auto" passes it over, and does not probe it, for others.
    `probe_auto` says why "auto" passes it over although it can run.
    `device_types` are those of the devices whose tensors it takes; None: any.
    """

    op: str
    name: str
    run: Callable
    probe: Callable[[], str | None]
    dtype: torch.dtype | None = None
    probe_auto: Callable[[], str | None] = _always
    device_types: Callable[[], tuple[str, ...]] | None = None

    def takes(self, device: Device) -> bool:
        """Whether tensors of this device are for it."""
        return self.device_types is None or torch.device(device).type in self.device_types()

    def why_not(self, device: Device) -> str | None:
        """Why it cannot run for tensors of this device, or None."""
        reason = self.probe()
        if reason is None and not self.takes(device):
            reason = (
                f"it is for {'GPUs' if self.name != CPU else 'the CPU'}, not for {torch.device(device).type} tensors"
            )
        return reason


@dataclass(frozen=True, slots=True)
class Choice:
    """One row of the table that `doctor` prints."""

    op: str
    candidate: str
    chosen: bool
    reason: str


def _candidates(function: Callable, faster: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    op = function.__name__
    plain = Candidate(op, "reference", function, _always)
    return (*(candidate for candidate in faster if candidate.op == op), plain)


def _on_gpu() -> tuple[str, ...]:
    return (GPU,)


def _on_cpu() -> tuple[str, ...]:
    return (CPU,)


_HOPPER = tuple(
    Candidate(function.__name__, hopper.NAME, function, probe, dtype=torch.bfloat16, device_types=_on_gpu)
    for function, probe in (
        (hopper.linear, libraries.why_not_deep_gemm),
        (hopper.grouped_mlp, libraries.why_not_deep_gemm),
        (hopper.masked_mlp, libraries.why_not_deep_gemm),
        (hopper.mla_decode, libraries.why_not_flash_mla),
    )
)

_TRITON = tuple(
    Candidate(
        function.__name__,
        "triton",
        function,
        triton_probe.why_not,
        dtype=torch.bfloat16,
        probe_auto=triton_probe.why_not_auto,
        device_types=triton_probe.device_types,
    )
    for function in (
        triton_ops.pack,
        triton_ops.pack_router,
        triton_ops.linear,
        triton_ops.batched_linear,
        triton_ops.router,
        triton_ops.rms_norm,
        triton_ops.silu_mul,
        triton_ops.silu_mul_blocks,
        triton_ops.gate,
        triton_ops.rope_and_cache,
        triton_ops.grouped_mlp,
        triton_ops.masked_mlp,
        triton_ops.sort_by_expert,
        triton_ops.sum_per_token,
        triton_ops.add_sums,
        triton_ops.argmax,
        triton_ops.mla_prefill,
        triton_ops.mla_decode,
    )
) + tuple(
    Candidate(
        function.__name__,
        "triton",
        function,
        triton_probe.why_not,
        probe_auto=triton_probe.why_not_auto,
        device_types=triton_probe.device_types,
    )
    for function in (triton_ops.quantize_fp8_block, triton_ops.quantize_fp8_rows, triton_ops.dequantize_fp8_block)
)

_SDPA = (
    Candidate("mla_prefill", sdpa.NAME, sdpa.mla_prefill, _always, probe_auto=sdpa.why_not_auto, device_types=_on_gpu),
)

# The first call of this probe builds the C++ operations, which takes some seconds once per machine and user.
_CPU = tuple(
    Candidate(function.__name__, CPU, function, cpu_build.why_not, device_types=_on_cpu)
    for function in (
        cpu_ops.pack,
        cpu_ops.pack_router,
        cpu_ops.linear,
        cpu_ops.batched_linear,
        cpu_ops.router,
        cpu_ops.rms_norm,
        cpu_ops.silu_mul,
        cpu_ops.gate,
        cpu_ops.rope_and_cache,
        cpu_ops.grouped_mlp,
        cpu_ops.masked_mlp,
        cpu_ops.sort_by_expert,
        cpu_ops.sum_per_token,
        cpu_ops.add_sums,
        cpu_ops.cos_sin,
        cpu_ops.argmax,
        cpu_ops.exponentials,
        cpu_ops.log_sum_exp,
        cpu_ops.mla_prefill,
        cpu_ops.mla_decode,
    )
)

# Faster candidates (hopper, triton, sdpa, cpu) go in front of the reference, in that order.
_CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    function.__name__: _candidates(function, (*_HOPPER, *_TRITON, *_SDPA, *_CPU))
    for function in (
        reference.pack,
        reference.pack_router,
        reference.linear,
        reference.batched_linear,
        reference.router,
        reference.rms_norm,
        reference.silu_mul,
        reference.silu_mul_blocks,
        reference.gate,
        reference.rope_and_cache,
        reference.grouped_mlp,
        reference.masked_mlp,
        reference.sort_by_expert,
        reference.sum_per_token,
        reference.add_sums,
        reference.cos_sin,
        reference.argmax,
        reference.exponentials,
        reference.log_sum_exp,
        reference.mla_prefill,
        reference.mla_decode,
        reference.quantize_fp8_block,
        reference.quantize_fp8_rows,
        reference.dequantize_fp8_block,
    )
}


def ops() -> tuple[str, ...]:
    """The names of all operations."""
    return tuple(_CANDIDATES)


def select(op: str, choice: str = AUTO, dtype: torch.dtype | None = None, device: Device = CPU) -> Candidate:
    """The candidate of `op` to use: the first that can run ("auto"), or the one named.

    A name that other operations know and this one does not is as good as "auto" here.

    Args:
        dtype: of the model; without it "auto" takes what is good for any.
        device: of the model; "auto" neither takes nor probes what is made for others.

    Raises:
        BackendError: no such operation or candidate, or the named one cannot run here or there (with its reason).
    """
    if op not in _CANDIDATES:
        raise BackendError(f"there is no operation {op!r}; known are {', '.join(_CANDIDATES)}.")
    listed = _CANDIDATES[op]
    for candidate in listed:
        if candidate.name == choice:
            reason = candidate.why_not(device)
            if reason is not None:
                raise BackendError(f"{op}: {choice} cannot run here: {reason}.")
            return candidate
    if choice != AUTO and choice not in _all_names():
        names = ", ".join([AUTO, *(candidate.name for candidate in listed)])
        raise BackendError(f"{op} has no implementation {choice!r}; use one of {names}.")
    return _first(listed, dtype, device)


def behind(op: str, name: str, dtype: torch.dtype, device: Device = CPU) -> Candidate:
    """The first candidate of `op` after the one named that can run: where that one's operations send what it lacks."""
    listed = _CANDIDATES[op]
    place = next(place for place, candidate in enumerate(listed) if candidate.name == name)
    return _first(listed[place + 1 :], dtype, device)


def _first(listed: tuple[Candidate, ...], dtype: torch.dtype | None, device: Device) -> Candidate:
    """What "auto" takes of these."""
    fitting = (candidate for candidate in listed if candidate.dtype in (None, dtype) and candidate.takes(device))
    return next(candidate for candidate in fitting if (candidate.probe() or candidate.probe_auto()) is None)


def reads_on_host(run: Callable) -> bool:
    """Whether an operation of a decode step may wait for values of its device: how many rows each expert has."""
    if run.__module__ == hopper.__name__:
        run = behind(run.__name__, hopper.NAME, torch.bfloat16, GPU).run  # takes what the library does not
    return run in (reference.grouped_mlp, reference.masked_mlp)


def has_fixed_sums(run: Callable) -> bool:
    """Whether an implementation adds up in one order of its own on every processor (those in C++)."""
    return run.__module__ == cpu_ops.__name__


# Stored KV blocks are kept under these names: whoever changes one takes the blocks from their users.
_ORIGINS = {
    "batchinfer_kernels.reference.mla": "reference_mla",
    "batchinfer_kernels.reference.rows": "reference_rows",
    **{
        f"batchinfer_kernels.reference.{module}": "reference"
        for module in ("experts", "fp8", "gating", "pointwise", "products")
    },
}


def origin(run: Callable, dtype: torch.dtype | None = None) -> str:
    """Where an implementation comes from: with the same origin it gives the same bits in a dtype, else it may not."""
    module = _ORIGINS.get(run.__module__, run.__module__).removeprefix("batchinfer_kernels.")
    if run.__module__ == cpu_ops.__name__:
        return cpu_build.numerics(dtype)
    if run.__module__ == hopper.__name__:
        library = "flash_mla" if run is hopper.mla_decode else "deep_gemm"
        return f"{hopper.NAME}-{library}-{libraries.version(library)}"
    if run.__module__ == triton_ops.__name__:
        return f"{module}-{triton_probe.version()}"
    return module


def explain(choice: str = AUTO, device: Device = CPU) -> list[Choice]:
    """Every candidate of every operation, whether it is used there under `choice`, for which dtype, and why (not)."""
    rows = []
    for op, listed in _CANDIDATES.items():
        general = select(op, choice, device=device)
        for candidate in listed:
            special = candidate.dtype is not None and select(op, choice, candidate.dtype, device) is candidate
            reason = candidate.why_not(device) or candidate.probe_auto() or "can run, another one is preferred"
            if candidate is general:
                reason = "in use"
            elif special:
                reason = f"in use for {str(candidate.dtype).removeprefix('torch.')}"
            rows.append(Choice(op, candidate.name, special or candidate is general, reason))
    return rows


def _all_names() -> set[str]:
    return {candidate.name for listed in _CANDIDATES.values() for candidate in listed}
