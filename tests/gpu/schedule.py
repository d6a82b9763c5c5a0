"""The time of the published overlap schedules with measured times of stages and published times of exchanges.

Two lanes, one for computing and one for rows under way. Each lane does its tasks in order; a task starts when its lane
is free and what it needs is done. Orders as in batchinfer/parallel/overlap.py (DeepSeek profile-data, both figures).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

COMPUTE, ROWS = "compute", "rows"


class Task(NamedTuple):
    """One stage of one micro-batch in one layer; `needs` are names of tasks, those that do not exist are done."""

    name: str
    lane: str
    seconds: float
    needs: tuple[str, ...] = ()


def finish_s(tasks: list[Task]) -> float:
    """Seconds until the last task ends.

    Tasks of both lanes may be listed in any order as long as each one stands behind what it needs.
    """
    free, done = {COMPUTE: 0.0, ROWS: 0.0}, {}
    for task in tasks:
        start = max([free[task.lane], *(done.get(name, 0.0) for name in task.needs)])
        free[task.lane] = done[task.name] = start + task.seconds
    return max(free.values())


def prefill_tasks(num_layers: int, stages: Mapping[str, float], dispatch_s: float, combine_s: float) -> list[Task]:
    """Two micro-batches of prefill; `stages` are seconds of ATTN, SHARED and MLP of one layer and micro-batch.

    computing   ATTN(1) SHARED(0) ATTN(0) MLP(1) MLP(0) SHARED(1)        SHARED(0) is the layer before's
    rows        COMBINE(0) | DISPATCH(1) | DISPATCH(0) | COMBINE(1)
    """

    def of_layer(layer: int) -> Iterator[Task]:
        before = layer - 1
        yield Task(f"ATTN 1 {layer}", COMPUTE, stages["ATTN"], (f"COMBINE 1 {before}",))
        yield Task(f"DISPATCH 1 {layer}", ROWS, dispatch_s, (f"ATTN 1 {layer}",))
        if layer:
            yield Task(f"SHARED 0 {before}", COMPUTE, stages["SHARED"])
        yield Task(f"ATTN 0 {layer}", COMPUTE, stages["ATTN"], (f"COMBINE 0 {before}",))
        yield Task(f"DISPATCH 0 {layer}", ROWS, dispatch_s, (f"ATTN 0 {layer}",))
        yield Task(f"MLP 1 {layer}", COMPUTE, stages["MLP"], (f"DISPATCH 1 {layer}",))
        yield Task(f"COMBINE 1 {layer}", ROWS, combine_s, (f"MLP 1 {layer}",))
        yield Task(f"MLP 0 {layer}", COMPUTE, stages["MLP"], (f"DISPATCH 0 {layer}",))
        yield Task(f"COMBINE 0 {layer}", ROWS, combine_s, (f"MLP 0 {layer}",))
        yield Task(f"SHARED 1 {layer}", COMPUTE, stages["SHARED"])

    tasks = [task for layer in range(num_layers) for task in of_layer(layer)]
    return [*tasks, Task(f"SHARED 0 {num_layers - 1}", COMPUTE, stages["SHARED"])]


def decode_tasks(num_layers: int, stages: Mapping[str, float], dispatch_s: float, combine_s: float) -> list[Task]:
    """Two micro-batches of decode; `stages` are seconds of ATTN-0, ATTN-1, SHARED and MLP.

    computing   SHARED(0) ATTN-0(1) | MLP(0) | ATTN-1(1)    then the same with the roles swapped
    rows        DISPATCH(0)                  | COMBINE(0)
    """

    def half(own: int, layer: int, other_layer: int) -> Iterator[Task]:
        """`own` exchanges its rows of `layer`, the other micro-batch goes into `other_layer`."""
        other = 1 - own
        yield Task(f"DISPATCH {own} {layer}", ROWS, dispatch_s, (f"ATTN-1 {own} {layer}",))
        yield Task(f"SHARED {own} {layer}", COMPUTE, stages["SHARED"])
        if other_layer < num_layers:
            needs = (f"COMBINE {other} {other_layer - 1}",)
            yield Task(f"ATTN-0 {other} {other_layer}", COMPUTE, stages["ATTN-0"], needs)
        yield Task(f"MLP {own} {layer}", COMPUTE, stages["MLP"], (f"DISPATCH {own} {layer}",))
        yield Task(f"COMBINE {own} {layer}", ROWS, combine_s, (f"MLP {own} {layer}",))
        if other_layer < num_layers:
            yield Task(f"ATTN-1 {other} {other_layer}", COMPUTE, stages["ATTN-1"])

    tasks = [Task(f"{name} 0 0", COMPUTE, stages[name]) for name in ("ATTN-0", "ATTN-1")]
    for layer in range(num_layers):
        tasks += [*half(0, layer, layer), *half(1, layer, layer + 1)]
    return tasks
