"""How good the model is on held-out examples; used by train.py for its log and by export.py for the model card.

An answer counts when every token of it is the model's first choice after the tokens before it, which is the same as
greedy decoding giving the expected text, and needs one forward pass.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from batches import Batch, BatchMaker
from tasks import GENERATORS, draw_example

from model import Prediction, SampleModel, predict

BATCH_ROWS = 64


@dataclass(frozen=True, slots=True)
class Verdict:
    """Measured on held-out examples."""

    accuracy: dict[str, float]  # share of right answers of each task
    acceptance: float  # share of right second tokens from the MTP layer, where the main model is right
    load_skew: list[float]  # of each mixture layer, the MTP layer last: tokens of the busiest expert ÷ mean

    @property
    def overall(self) -> float:
        """Share of right answers; every task has the same number of examples."""
        return sum(self.accuracy.values()) / len(self.accuracy)


@torch.no_grad()
def evaluate(model: SampleModel, maker: BatchMaker, *, num_rows: int, seed: int, dtype: torch.dtype) -> Verdict:
    """Ask `num_rows` held-out questions of each task.

    Args:
        dtype: of the activations; the weights are rounded to bfloat16 in any case.
    """
    rng = random.Random(f"held out {seed}")
    right_of = dict.fromkeys(GENERATORS, 0)
    drafts_right = drafts = 0
    for router in model.routers():
        router.load_E.zero_()
    for start in range(0, num_rows, BATCH_ROWS):
        count = min(BATCH_ROWS, num_rows - start)
        batch = maker.pack({t: [[draw_example(t, rng, held_out=True)] for _ in range(count)] for t in GENERATORS})
        prediction = predict(model, batch, dtype)
        right_M, answer_of = answers_right(batch, prediction)
        for index, segment in enumerate(batch.segments):
            mine = batch.task_of_place == index
            right_of[segment.task] += len(answer_of[mine & right_M].unique())
        drafted = right_M & (batch.after_next >= 0)
        hits = prediction.after_next_logits.argmax(-1) == batch.after_next
        drafts_right += int((hits & drafted).sum())
        drafts += int(drafted.sum())
    loads = [router.load_E.clone() for router in model.routers()]
    for router in model.routers():
        router.load_E.zero_()
    return Verdict(
        accuracy={task: right / num_rows for task, right in right_of.items()},
        acceptance=drafts_right / max(drafts, 1),
        load_skew=[float(load.max() / load.mean()) for load in loads],
    )


def answers_right(batch: Batch, prediction: Prediction) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each answer token: whether its whole answer is right, and the number of the answer it belongs to."""
    hits = prediction.next_logits.argmax(-1) == batch.next_tokens[batch.places]
    # the tokens of one answer stand next to each other, so a gap starts a new one
    starts = torch.diff(batch.places, prepend=batch.places[:1] - 2) != 1
    answer_of = starts.cumsum(0) - 1
    misses = torch.zeros(int(answer_of[-1]) + 1).index_add_(0, answer_of, (~hits).float())
    return misses[answer_of] == 0, answer_of
