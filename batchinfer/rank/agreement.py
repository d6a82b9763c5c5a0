"""What the ranks of a group do next: each says what it wishes, all draw the same conclusion. Called by the worker.

Experts are spread over the ranks, so every rank takes part in every step, also with nothing of its own to compute.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from enum import Enum

from batchinfer.parallel.mesh import Mesh


class Kind(Enum):
    """What a group does together."""

    LEAVE = "leave"
    PLACE = "place"
    PREFILL = "prefill"
    DECODE = "decode"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Wish:
    """One rank's state before a step."""

    leave: bool = False
    prefill: bool = False
    decode: bool = False
    fills_both_halves: bool = False  # has at least two tokens to run in the step it wishes for
    place: bool = False  # knows of another placement of the experts


@dataclass(frozen=True, slots=True)
class Agreed:
    """The next step, the same on all ranks."""

    kind: Kind
    in_pairs: bool  # two micro-batches


def agree(mesh: Mesh, wish: Wish, *, overlap: bool) -> Agreed:
    """One small exchange between all ranks of the group.

    Leaving goes before prefill, prefill before decode: a rank asks for prefill only when it has room for many new
    requests. Experts move once all ranks know where to. Two micro-batches are run when `overlap` is on and some rank
    can fill both.
    """
    wishes = [wish] if mesh.size == 1 else _exchanged(mesh, wish)
    if any(wish.leave for wish in wishes):
        kind = Kind.LEAVE
    elif all(wish.place for wish in wishes):
        kind = Kind.PLACE
    elif any(wish.prefill for wish in wishes):
        kind = Kind.PREFILL
    elif any(wish.decode for wish in wishes):
        kind = Kind.DECODE
    else:
        kind = Kind.WAIT
    return Agreed(kind, overlap and any(wish.fills_both_halves for wish in wishes))


def _exchanged(mesh: Mesh, wish: Wish) -> list[Wish]:
    """The wishes of all ranks."""
    return [Wish(*map(bool, values)) for values in mesh.agree([int(value) for value in astuple(wish)])]
