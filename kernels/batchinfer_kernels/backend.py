"""Which implementation of an operation runs here, and why; asked by the model when it is built and by `doctor`.

Each operation lists its candidates from the fastest to the plainest. A probe returns None where the candidate can
run, else the reason why it cannot. "auto" takes the first that can; a choice made by name never falls back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from batchinfer_kernels import reference, reference_mla

AUTO = "auto"


class BackendError(RuntimeError):
    """The implementation that was asked for does not exist or cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation of one operation: `run` is called, `probe` says why not (None: it can)."""

    op: str
    name: str
    run: Callable
    probe: Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class Choice:
    """One row of the table that `doctor` prints."""

    op: str
    candidate: str
    chosen: bool
    reason: str


def _always() -> str | None:
    return None


# Faster candidates (hopper, triton, cpu) go in front of the reference, in that order.
_CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    function.__name__: (Candidate(function.__name__, "reference", function, _always),)
    for function in (
        reference.linear,
        reference.batched_matmul,
        reference.rms_norm,
        reference.silu_mul,
        reference.rope,
        reference.gate,
        reference.grouped_mlp,
        reference.masked_mlp,
        reference_mla.mla_prefill,
        reference_mla.mla_decode,
        reference.quantize_fp8_block,
        reference.dequantize_fp8_block,
    )
}


def ops() -> tuple[str, ...]:
    """The names of all operations."""
    return tuple(_CANDIDATES)


def select(op: str, choice: str = AUTO) -> Candidate:
    """The candidate of `op` to use: the first that can run ("auto") or the one named.

    Raises:
        BackendError: no such operation or candidate, or the named one cannot run here (with its reason).
    """
    if op not in _CANDIDATES:
        raise BackendError(f"there is no operation {op!r}; known are {', '.join(_CANDIDATES)}.")
    listed = _CANDIDATES[op]
    if choice == AUTO:
        return next(candidate for candidate in listed if candidate.probe() is None)
    for candidate in listed:
        if candidate.name == choice:
            reason = candidate.probe()
            if reason is not None:
                raise BackendError(f"{op}: {choice} cannot run here: {reason}.")
            return candidate
    names = ", ".join([AUTO, *(candidate.name for candidate in listed)])
    raise BackendError(f"{op} has no implementation {choice!r}; use one of {names}.")


def explain(choice: str = AUTO) -> list[Choice]:
    """Every candidate of every operation, whether it is the one used under `choice`, and why (not)."""
    rows = []
    for op, listed in _CANDIDATES.items():
        chosen = select(op, choice)
        for candidate in listed:
            reason = candidate.probe() or ("in use" if candidate is chosen else "can run, another one is preferred")
            rows.append(Choice(op, candidate.name, candidate is chosen, reason))
    return rows
