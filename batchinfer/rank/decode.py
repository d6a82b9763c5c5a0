"""Decode steps: all running sequences take one token per step, and come and go between steps."""

import time

from batchinfer.model.sampling import sample
from batchinfer.parallel.spans import SpanLog
from batchinfer.rank.batch import StepResult
from batchinfer.rank.context import RankContext
from batchinfer.rank.decode_table import DecodeTable


def decode_step(context: RankContext, table: DecodeTable, log: SpanLog, *, in_pairs: bool) -> StepResult:
    """Generate one token for every running sequence (there may be none: then only take part).

    Args:
        table: the running sequences; those that finish leave it.
        log: receives what was done when.
        in_pairs: run two micro-batches in turn.
    """
    count, kv_tokens, largest = len(table.sequences), table.kv_tokens, table.largest_kv_tokens
    step = table.next_halves() if in_pairs else table.next_step()
    rules = context.rules.begin(table.rules)
    output = context.model.forward(step, context.pages, context.schedule, log)
    finished = []
    if count:
        finished = table.accept(
            sample(output.logits, table.sampling, table.num_new, context.model.logit_ops, rules.changes())
        )
    return StepResult(
        output,
        time.time(),
        finished=finished,
        num_requests=count,
        new_tokens=count,
        output_tokens=count,
        kv_tokens=kv_tokens,
        largest_kv_tokens=largest,
    )
