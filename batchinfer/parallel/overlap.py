"""Two micro-batches in turn, so that one computes while the other's rows travel.

A micro-batch is a generator that yields where it can be left (model/transformer.py). What runs between two yields:

prefill, per layer   [SHARED of the layer before, its sums in, ATTN, start DISPATCH] [MLP, start COMBINE]
decode, per layer    [sums in, ATTN-0] [ATTN-1, start DISPATCH, SHARED] [MLP, start COMBINE]

Taken in turn, micro-batch 1 first in prefill and micro-batch 0 one segment ahead in decode, this gives the published
orders (DeepSeek profile-data, prefill and decode figures):

prefill   computing      ATTN(1) SHARED(0) ATTN(0) MLP(1) MLP(0) SHARED(1)
          communication  COMBINE(0) | DISPATCH(1) | DISPATCH(0) | COMBINE(1)
decode    computing      SHARED(0) ATTN-0(1) | MLP(0) | ATTN-1(1)    then the same with the roles swapped
          communication  DISPATCH(0)                  | COMBINE(0)
"""

from collections.abc import Generator
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")
Points = Generator[Any, None, ResultT]


def run_to_end(points: Points[ResultT]) -> ResultT:
    """Run one micro-batch to its end without interleaving (the plain schedule) and return its result."""
    while True:
        try:
            next(points)
        except StopIteration as end:
            return end.value


def run_prefill_pair(first: Points[ResultT], second: Points[ResultT]) -> tuple[ResultT, ResultT]:
    """Interleave two prefill micro-batches.

    Args:
        first: micro-batch 1, the earlier tokens: in every layer its attention runs first, so that the other one may
            attend to what it has written.
        second: micro-batch 0.

    Returns:
        The results of `first` and `second`.
    """
    return _in_turn(first, second)


def run_decode_pair(first: Points[ResultT], second: Points[ResultT]) -> tuple[ResultT, ResultT]:
    """Interleave two decode micro-batches; `first` is micro-batch 0, which stays one segment ahead."""
    next(first)
    return _in_turn(first, second)


def _in_turn(first: Points[ResultT], second: Points[ResultT]) -> tuple[ResultT, ResultT]:
    """Run a segment of each in turn until both have ended; both must have the same number of points."""
    results: dict[int, ResultT] = {}
    while len(results) < 2:
        for index, points in enumerate((first, second)):
            if index not in results:
                try:
                    next(points)
                except StopIteration as end:
                    results[index] = end.value
    return results[0], results[1]
