"""What the ranks of a group do next: each says what it could do, all draw the same conclusion.

Experts are spread over the ranks, so every rank takes part in every step, also with nothing of its own to compute.
"""

from dataclasses import astuple, dataclass
from enum import Enum

from batchinfer.parallel.mesh import Mesh


class Kind(Enum):
    """What a group does together."""

    LEAVE = "leave"
    CALIBRATE = "calibrate"
    PLACE = "place"
    PREFILL = "prefill"
    DECODE = "decode"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class StepVote:
    """One rank's state before a step."""

    leave: bool = False
    prefill: bool = False
    decode: bool = False
    fills_both_halves: bool = False  # has at least two tokens to run in the step it votes for
    place: bool = False  # knows of another placement of the experts
    calibrate: bool = False  # has got its part of the calibration


@dataclass(frozen=True, slots=True)
class Agreed:
    """The next step, the same on all ranks."""

    kind: Kind
    in_pairs: bool  # two micro-batches


def agree(mesh: Mesh, vote: StepVote, *, overlap: bool) -> Agreed:
    """One small exchange between all ranks of the group.

    Leaving goes before prefill, prefill before decode: a rank asks for prefill only when it has room for many new
    requests. Experts move once all ranks know where to; likewise with the calibration. Two micro-batches are run when
    `overlap` is on and some rank can fill both.
    """
    votes = [vote]
    if mesh.size > 1:
        votes = [StepVote(*map(bool, values)) for values in mesh.agree([int(value) for value in astuple(vote)])]
    if any(vote.leave for vote in votes):
        kind = Kind.LEAVE
    elif all(vote.calibrate for vote in votes):
        kind = Kind.CALIBRATE
    elif all(vote.place for vote in votes):
        kind = Kind.PLACE
    elif any(vote.prefill for vote in votes):
        kind = Kind.PREFILL
    elif any(vote.decode for vote in votes):
        kind = Kind.DECODE
    else:
        kind = Kind.WAIT
    return Agreed(kind, overlap and any(vote.fills_both_halves for vote in votes))
