"""The vote of a group's ranks on their next step: each sends its state, and all come to the same decision.

Experts are spread over the ranks, so every rank takes part in every step, also without tokens of its own.
The same exchange decides whether a step runs as two micro-batches, and as which graph a decode step runs: all ranks
have measured or recorded the same steps, so equal votes lead all ranks to equal decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum

from batchinfer.model.fused.graph_size import DecodeBatch, GraphSize
from batchinfer.model.fused.graphs import DecodeGraphs
from batchinfer.parallel.mesh import Mesh
from batchinfer.rank.overlap_rule import MeasuredOverlap, StepTime, Way

NO_BATCH, NO_STEP = DecodeBatch(), StepTime()
TRIED = "it is being tried whether two micro-batches are quicker"
TOO_LARGE = "a rank of the group decodes more requests than cluster.decode_requests, the rows of the largest graph"
CANNOT, NO_MEMORY = "a rank of the group has no graphs", "a rank of the group has no memory for another graph"


class Kind(Enum):
    """A common action of a group's ranks."""

    LEAVE = "leave"
    CALIBRATE = "calibrate"
    PLACE = "place"
    PREFILL = "prefill"
    DECODE = "decode"
    LATE = "late"  # look for messages again: a rank has not read its part of the work that others have begun to read
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class StepVote:
    """One rank's state before a step."""

    leave: bool = False
    prefill: bool = False
    decode: bool = False
    fills_both_halves: bool = False  # has at least two tokens to run in this step
    place: bool = False  # has received a new placement of the experts
    calibrate: bool = False  # has received its part of the calibration
    deal: int = 0  # number of the latest deal of work that it knows of
    batch: DecodeBatch = NO_BATCH
    latest: StepTime = NO_STEP  # measured of the step before, for `cluster.overlap = "auto"`

    def to_ints(self) -> list[int]:
        """Return the integers to be sent to the other ranks."""
        return [*(int(getattr(self, field.name)) for field in fields(self)[:-2]), *self.batch, *self.latest]

    @classmethod
    def of_ints(cls, values: Sequence[int]) -> StepVote:
        """Return the vote that another rank has sent."""
        num_flags = len(fields(cls)) - 3
        leave, prefill, decode, fills_both_halves, place, calibrate = map(bool, values[:num_flags])
        batch = DecodeBatch(*values[num_flags + 1 : -len(NO_STEP)])
        latest = StepTime(*values[-len(NO_STEP) :])
        return cls(leave, prefill, decode, fills_both_halves, place, calibrate, values[num_flags], batch, latest)


@dataclass(frozen=True, slots=True)
class Agreed:
    """The next step, the same on all ranks."""

    kind: Kind
    in_pairs: bool  # two micro-batches
    graph: GraphSize | None = None  # the graph as which a decode step runs
    records: bool = False  # no rank has this graph yet, and all record it in this step
    no_graph: str | None = None  # why a decode step runs as plain operations


def agree(mesh: Mesh, vote: StepVote, *, overlap: bool | MeasuredOverlap, graphs: DecodeGraphs | None = None) -> Agreed:
    """Exchange votes with all ranks of the group and return the next step.

    Leaving goes before prefill, prefill before decode: a rank asks for prefill only when it has room for many new
    requests. A rank without new requests may have some of the deal that others know of already: prefill waits until it
    has read them, since steps are planned to be even. Experts move once all ranks know where to; likewise with the
    calibration. Two micro-batches are run when some rank can fill both, and `overlap` is on or finds that they are
    quicker. A decode step runs as a graph when all ranks have that one or all can record it, but never while both ways
    are tried.

    Args:
        overlap: fixed, or by measurement: this rank's measurements go into its vote, and it learns from all votes.
        graphs: of this rank; None: it has none.
    """
    if isinstance(overlap, MeasuredOverlap):
        vote = replace(vote, latest=overlap.take_latest())
    votes = [vote]
    if mesh.size > 1:
        votes = [StepVote.of_ints(values) for values in mesh.agree(vote.to_ints())]
    if any(vote.leave for vote in votes):
        kind = Kind.LEAVE
    elif all(vote.calibrate for vote in votes):
        kind = Kind.CALIBRATE
    elif all(vote.place for vote in votes):
        kind = Kind.PLACE
    elif any(vote.prefill for vote in votes):
        latest = max(vote.deal for vote in votes)
        kind = Kind.PREFILL if all(vote.prefill or vote.deal == latest for vote in votes) else Kind.LATE
    elif any(vote.decode for vote in votes):
        kind = Kind.DECODE
    else:
        kind = Kind.WAIT
    in_pairs, is_trial = _way(kind, votes, overlap)
    if kind is not Kind.DECODE:
        return Agreed(kind, in_pairs)
    batches = [vote.batch for vote in votes]
    if graphs is None or not all(batch.replays for batch in batches):
        return Agreed(kind, in_pairs, no_graph=CANNOT)
    if is_trial:
        return Agreed(kind, in_pairs, no_graph=TRIED)
    size = graphs.size_for(batches, in_pairs=in_pairs)
    if size is None:
        return Agreed(kind, in_pairs, no_graph=TOO_LARGE)
    records = not graphs.has(size)
    if records and not all(batch.captures for batch in batches):
        return Agreed(kind, in_pairs, no_graph=NO_MEMORY)
    return Agreed(kind, in_pairs, size, records)


def _way(kind: Kind, votes: Sequence[StepVote], overlap: bool | MeasuredOverlap) -> Way:
    """Return the way of the step that these votes lead to."""
    can_pair = any(vote.fills_both_halves for vote in votes)
    if not isinstance(overlap, MeasuredOverlap):
        return Way(overlap and can_pair, is_trial=False)
    overlap.learn([vote.latest for vote in votes])
    if kind not in (Kind.PREFILL, Kind.DECODE):
        return Way(in_pairs=False, is_trial=False)
    return overlap.choose(kind.value, can_pair=can_pair)
