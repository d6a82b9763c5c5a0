"""The choice between the implementations of an operation: once when it is bound, then call by call.

Each operation lists its candidates from the fastest to the plainest. A probe returns None if the candidate can run
here, else the reason why not. "auto" takes the first candidate that can run and is made for this dtype and device. A
choice by name takes that candidate for every operation that has it; the other operations (without a C++ version, say)
choose as under "auto".

No candidate takes every argument. The registry alone falls back: a bound operation asks its candidate whether it
rejects the arguments, calls the first later candidate that takes them, and counts each such call with the reason.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch

from batchinfer_kernels import reference, sdpa
from batchinfer_kernels.cpu import build as cpu_build
from batchinfer_kernels.cpu import fp8_pages as cpu_fp8_pages
from batchinfer_kernels.cpu import ops as cpu_ops
from batchinfer_kernels.cpu.packed import Packed, PackedRouter
from batchinfer_kernels.hopper import fp8_pages as hopper_fp8_pages
from batchinfer_kernels.hopper import invariant as hopper_invariant
from batchinfer_kernels.hopper import libraries
from batchinfer_kernels.hopper import ops as hopper_ops
from batchinfer_kernels.hopper import sparse as hopper_sparse
from batchinfer_kernels.implementation import Implementation
from batchinfer_kernels.triton import ops as triton_ops
from batchinfer_kernels.triton import probe as triton_probe

AUTO = "auto"
CPU = "cpu"  # a type of devices, and the name of the C++ candidates
GPU = "cuda"
HOPPER, TRITON, SDPA, REFERENCE = "hopper", "triton", "sdpa", "reference"
INVARIANT = "hopper-invariant"  # decode attention whose cuts do not depend on the batch
Device = torch.device | str
_OF_ANY_DTYPE = ("quantize_fp8_block", "quantize_fp8_rows", "dequantize_fp8_block")  # in Triton


class BackendError(RuntimeError):
    """The requested implementation does not exist or cannot run here; the message gives the reason."""


def _always() -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation of one operation.

    probe: returns the reason why the candidate cannot run here, or None.
    dtype: the only dtype that the candidate is made for, None: any; "auto" neither takes nor probes it for others.
    probe_auto: returns the reason why "auto" passes over a candidate that can run, or None.
    device_types: returns the types of devices whose tensors the candidate takes; None: any.
    origin: names the origin of results for a dtype; see the function `origin`.
    """

    op: str
    name: str
    implementation: Implementation
    probe: Callable[[], str | None]
    dtype: torch.dtype | None = None
    probe_auto: Callable[[], str | None] = _always
    device_types: Callable[[], tuple[str, ...]] | None = None
    origin: Callable[[torch.dtype | None], str] = lambda _: REFERENCE

    def takes(self, device: Device) -> bool:
        """Return whether the candidate takes tensors of this device."""
        return self.device_types is None or torch.device(device).type in self.device_types()

    def why_not(self, device: Device) -> str | None:
        """Return the reason why the candidate cannot run for tensors of this device, or None."""
        reason = self.probe()
        if reason is None and not self.takes(device):
            reason = (
                f"it is for {'GPUs' if self.name != CPU else 'the CPU'}, not for {torch.device(device).type} tensors"
            )
        return reason

    def can_run(self, dtype: torch.dtype | None, device: Device) -> bool:
        """Return whether "auto" may use the candidate for this dtype and device; one made for others is not probed."""
        return self.dtype in (None, dtype) and self.takes(device) and self.probe() is None and self.probe_auto() is None


class Fallback(NamedTuple):
    """Calls of an operation that one candidate (or several, separated by commas) left to a later one."""

    op: str
    passed_over: str
    used: str
    reason: str


_fallbacks: Counter[Fallback] = Counter()


def fallbacks() -> dict[Fallback, int]:
    """Count the calls of this process that fell back, by operation, candidates and reason."""
    return dict(_fallbacks)


def num_fallbacks() -> int:
    """Count all calls of this process that fell back."""
    return _fallbacks.total()


class Operation:
    """A bound operation, called like the reference's function; it runs the first candidate that takes the arguments."""

    __slots__ = ("_rejects", "_run", "_runs", "candidates")

    def __init__(self, candidates: Sequence[Candidate]):
        self.candidates = tuple(candidates)
        self._runs = [
            _with_uses(candidate.implementation, [later.name for later in self.candidates[place + 1 :]])
            for place, candidate in enumerate(self.candidates)
        ]
        self._run = self._runs[0]
        self._rejects = self.implementation.rejects if len(self.candidates) > 1 else None

    @property
    def name(self) -> str:
        """The name of the first candidate."""
        return self.candidates[0].name

    @property
    def implementation(self) -> Implementation:
        """The implementation of the first candidate."""
        return self.candidates[0].implementation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._rejects is None or (reason := self._rejects(*args, **kwargs)) is None:
            return self._run(*args, **kwargs)
        return self._fall_back(reason, args, kwargs)

    def _fall_back(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        passed, reasons = [self.name], [reason]
        for candidate, run in zip(self.candidates[1:], self._runs[1:], strict=True):
            refused = candidate.implementation.rejects(*args, **kwargs)
            if refused is None:
                _fallbacks[Fallback(candidate.op, ", ".join(passed), candidate.name, "; ".join(reasons))] += 1
                return run(*args, **kwargs)
            passed.append(candidate.name)
            reasons.append(refused)
        refusals = "; ".join(f"{name}: {why}" for name, why in zip(passed, reasons, strict=True))
        raise BackendError(f"{self.candidates[0].op}: no implementation takes these arguments ({refusals}).")


@dataclass(frozen=True, slots=True)
class Choice:
    """One row of the table that `doctor` prints."""

    op: str
    candidate: str
    chosen: bool
    reason: str
    rejected_arguments: str


def _with_uses(implementation: Implementation, names: Sequence[str]) -> Callable[..., Any]:
    """Return the implementation's function with the operations that it uses bound to these candidates."""
    if not implementation.uses:
        return implementation.run
    return functools.partial(implementation.run, **{op: bind(op, names) for op in implementation.uses})


def _packed_weights(*args: Any, **kwargs: Any) -> str | None:
    """Reject weights that are packed for C++."""
    if any(isinstance(value, Packed | PackedRouter) for value in (*args, *kwargs.values())):
        return "a packed weight takes rows of its own kind on the CPU"
    return None


def _listed(module: ModuleType, name: str, probe: Callable[[], str | None], **facts: Any) -> list[Candidate]:
    found = {op: value for op, value in vars(module).items() if isinstance(value, Implementation)}
    return [Candidate(op, name, implementation, probe, **facts) for op, implementation in found.items()]


def _of_library(
    library: str, probe: Callable[[], str | None], ops: Sequence[str], module: ModuleType = hopper_ops
) -> list[Candidate]:
    """List the operations of one of DeepSeek's libraries for Hopper GPUs as candidates."""
    listed = _listed(
        module,
        HOPPER,
        probe,
        dtype=torch.bfloat16,
        device_types=lambda: (GPU,),
        origin=lambda _: f"{HOPPER}-{library}-{libraries.version(library)}",
    )
    return [candidate for candidate in listed if candidate.op in ops]


def _plain(function: Callable[..., Any]) -> Candidate:
    # Stored KV blocks are filed under the origins: changing an origin makes all blocks stored so far useless.
    module = function.__module__.rpartition(".")[2]
    origin = f"reference_{module}" if module in ("mla", "rows", "fp8_pages", "gqa") else "reference"
    implementation = Implementation(function, _packed_weights)
    return Candidate(function.__name__, REFERENCE, implementation, _always, origin=lambda _: origin)


_TRITON = _listed(
    triton_ops,
    TRITON,
    triton_probe.why_not,
    dtype=torch.bfloat16,
    probe_auto=triton_probe.why_not_auto,
    device_types=triton_probe.device_types,
    origin=lambda _: f"triton.ops-{triton_probe.version()}",
)
# The first call of the probe for C++ builds it, which takes some seconds once per machine and user.
_FASTER = (
    *_of_library("deep_gemm", libraries.why_not_deep_gemm, ("linear", "grouped_mlp", "masked_mlp")),
    *_of_library("deep_gemm", libraries.why_not_deep_gemm, ("choose_keys",), hopper_sparse),
    *(
        replace(candidate, name=INVARIANT, origin=lambda _: f"{INVARIANT}-flash_mla-{libraries.version('flash_mla')}")
        for candidate in _of_library("flash_mla", hopper_invariant.why_not, ("mla_decode",), hopper_invariant)
    ),
    *(
        replace(candidate, probe_auto=hopper_ops.why_not_auto_decode)
        for candidate in _of_library("flash_mla", libraries.why_not_flash_mla, ("mla_decode",))
    ),
    *_of_library("flash_mla", libraries.why_not_flash_mla, ("mla_sparse",), hopper_sparse),
    *(
        replace(candidate, probe_auto=hopper_fp8_pages.why_not_auto)
        for candidate in _of_library("flash_mla", libraries.why_not_flash_mla, ("mla_decode_fp8",), hopper_fp8_pages)
    ),
    *(replace(candidate, dtype=None) if candidate.op in _OF_ANY_DTYPE else candidate for candidate in _TRITON),
    *_listed(sdpa, SDPA, _always, probe_auto=sdpa.why_not_auto, device_types=lambda: (GPU,), origin=lambda _: SDPA),
    *_listed(cpu_ops, CPU, cpu_build.why_not, device_types=lambda: (CPU,), origin=cpu_build.numerics),
    *_listed(cpu_fp8_pages, CPU, cpu_build.why_not, device_types=lambda: (CPU,), origin=cpu_build.numerics),
)
_CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    plain.op: (*(candidate for candidate in _FASTER if candidate.op == plain.op), plain)
    for plain in [_plain(function) for function in reference.OPERATIONS]
}


def ops() -> tuple[str, ...]:
    """Return the names of all operations."""
    return tuple(_CANDIDATES)


def select(op: str, choice: str = AUTO, dtype: torch.dtype | None = None, device: Device = CPU) -> Operation:
    """Bind the operation `op` to its candidates in order: all that can run ("auto"), or the named one before them.

    For an operation that lacks the named candidate, a name that other operations know means "auto".

    Args:
        dtype: the model's; None: "auto" takes only candidates made for any dtype.
        device: the model's; "auto" neither takes nor probes candidates for other devices.

    Raises:
        BackendError: no such operation or candidate, or the named candidate cannot run (with the reason).
    """
    if op not in _CANDIDATES:
        raise BackendError(f"there is no operation {op!r}; known are {', '.join(_CANDIDATES)}.")
    listed = _CANDIDATES[op]
    for place, named in enumerate(listed):
        if named.name == choice:
            reason = named.why_not(device)
            if reason is not None:
                raise BackendError(f"{op}: {choice} cannot run here: {reason}.")
            # behind a candidate for GPUs is what GPUs have, even where Triton's interpreter runs it on a CPU
            where = GPU if named.name in (HOPPER, INVARIANT, TRITON, SDPA) else device
            behind = [later for later in listed[place + 1 :] if later.can_run(named.dtype or dtype, where)]
            return Operation((named, *behind))
    if choice != AUTO and choice not in {candidate.name for some in _CANDIDATES.values() for candidate in some}:
        names = ", ".join([AUTO, *(candidate.name for candidate in listed)])
        raise BackendError(f"{op} has no implementation {choice!r}; use one of {names}.")
    return Operation([candidate for candidate in listed if candidate.can_run(dtype, device)])


def bind(op: str, names: Sequence[str]) -> Operation:
    """Bind the operation `op` to its candidates of these names, in the operation's own order, without probing them."""
    return Operation([candidate for candidate in _CANDIDATES[op] if candidate.name in names])


def reads_on_host(operation: Operation) -> bool:
    """Return whether the experts of a decode step may make the host wait for the device to learn each expert's rows."""
    # arguments that DeepSeek's libraries reject go to the next candidate
    return next(candidate for candidate in operation.candidates if candidate.name != HOPPER).name == REFERENCE


def has_fixed_sums(operation: Operation) -> bool:
    """Return whether the implementation has its own fixed order of sums on every processor (C++ has)."""
    return operation.name == CPU


def origin(operation: Operation, dtype: torch.dtype | None = None) -> str:
    """Return the origin of an implementation's results in a dtype; equal origins give equal bits, others may not."""
    return operation.candidates[0].origin(dtype)


def explain(choice: str = AUTO, device: Device = CPU) -> list[Choice]:
    """List every candidate of every operation: whether and for which dtype it is used there under `choice`, and why."""
    rows = []
    for op, listed in _CANDIDATES.items():
        general = select(op, choice, device=device).candidates[0]
        for candidate in listed:
            special = (
                candidate.dtype is not None and select(op, choice, candidate.dtype, device).candidates[0] is candidate
            )
            reason = candidate.why_not(device) or candidate.probe_auto() or "can run, another one is preferred"
            if candidate is general:
                reason = "in use"
            elif special:
                reason = f"in use for {str(candidate.dtype).removeprefix('torch.')}"
            is_chosen = special or candidate is general
            rows.append(Choice(op, candidate.name, is_chosen, reason, candidate.implementation.rejected_arguments))
    return rows
