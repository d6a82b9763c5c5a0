"""Which schedule is the quickest for a rank."""

from batchinfer.model.fused.graphs import DecodeGraphs
from batchinfer.model.fused.stack import FusedDecode
from batchinfer.model.schedules import Schedule, plain
from batchinfer.model.transformer import Transformer


def quickest_schedule(model: Transformer, filler_page: int | None = None) -> Schedule:
    """The quickest way to run this rank's steps.

    Args:
        filler_page: a page that no request has, where decode steps can be recorded as graphs (else None).
    """
    if filler_page is not None:
        return Schedule(decode=DecodeGraphs(filler_page))
    return Schedule(decode=FusedDecode.of(model) or plain)
