"""The next step of a group, by the votes of its ranks."""

from __future__ import annotations

import pytest

from batchinfer.rank.step_vote import CANNOT, Agreed, Kind, StepVote, agree


class Mesh:
    """A group whose other ranks have given votes."""

    rank, size = 0, 3

    def __init__(self, *others: StepVote):
        self._others = [vote.to_ints() for vote in others]

    def agree(self, values):
        return [list(values), *self._others]


PREFILL, DECODE, PLACE = StepVote(prefill=True), StepVote(decode=True), StepVote(place=True)
CALIBRATE = StepVote(calibrate=True)


@pytest.mark.parametrize(
    ("votes", "kind"),
    [
        ([StepVote(), StepVote(), StepVote()], Kind.WAIT),
        ([StepVote(), DECODE, StepVote()], Kind.DECODE),
        ([DECODE, PREFILL, DECODE], Kind.PREFILL),
        ([StepVote(prefill=True, deal=2), StepVote(deal=1), DECODE], Kind.LATE),  # some may get work that is on its way
        ([StepVote(prefill=True, deal=2), StepVote(deal=2), StepVote(prefill=True, deal=1)], Kind.PREFILL),
        ([StepVote(decode=True, deal=2), StepVote(deal=1)], Kind.DECODE),
        ([PLACE, PLACE, StepVote()], Kind.WAIT),  # one does not know yet
        ([PLACE, PLACE, DECODE], Kind.DECODE),
        ([PLACE, StepVote(place=True, prefill=True), PLACE], Kind.PLACE),
        ([PLACE, StepVote(place=True, leave=True), PLACE], Kind.LEAVE),
        ([CALIBRATE, CALIBRATE, StepVote()], Kind.WAIT),  # one does not know yet
        ([CALIBRATE, StepVote(calibrate=True, prefill=True), CALIBRATE], Kind.CALIBRATE),
    ],
)
def test_all_draw_one_conclusion(votes, kind):
    assert agree(Mesh(*votes[1:]), votes[0], overlap=False).kind is kind


def test_two_micro_batches_run_when_some_rank_can_fill_both():
    full = StepVote(decode=True, fills_both_halves=True)
    assert agree(Mesh(DECODE, full), DECODE, overlap=True) == Agreed(Kind.DECODE, in_pairs=True, no_graph=CANNOT)
    assert not agree(Mesh(DECODE, DECODE), DECODE, overlap=True).in_pairs
    assert not agree(Mesh(DECODE, full), DECODE, overlap=False).in_pairs
