"""Tokenizers in their processes that the tests of a file share, as the shards of a plan do; conftest.py ends them."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import ExitStack

from batchinfer.config import JobConfig
from batchinfer.data.encoders import Encoders

MOST_OPEN = 4
_open: OrderedDict[str, tuple[Encoders, ExitStack]] = OrderedDict()


def encoders_of(job: JobConfig, *, window: int) -> Encoders:
    """Return the encoders opened for this model folder and these input columns before, or new ones."""
    key = f"{window} {job.model.path} {job.input.model_dump_json(exclude={'files'})}"
    if key not in _open:
        stack = ExitStack()
        _open[key] = stack.enter_context(Encoders(job, window=window)), stack
    _open.move_to_end(key)
    if len(_open) > MOST_OPEN:
        _open.popitem(last=False)[1][1].close()
    return _open[key][0]


def close_all() -> None:
    while _open:
        _open.popitem()[1][1].close()
