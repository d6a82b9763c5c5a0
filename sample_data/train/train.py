"""Train the sample model from scratch: a quarter of an hour on one core of a CPU that multiplies bfloat16.

    python sample_data/train/train.py --out runs/sample_model
    python sample_data/train/train.py --out runs/sample_model --resume      # after an interruption

The folder gets checkpoint.pt, log.csv and, at the end, the finished model in model/. The result depends on the recipe
below and on nothing else: stopping and resuming gives the same model, and so does another number of cores.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from accuracy import Verdict, evaluate
from batches import Batch, BatchMaker
from chat import train_tokenizer
from export import export_model
from optimizer import Optimizer
from shape import ModelShape
from tokenizers import Tokenizer
from torch.nn import functional as F

from model import Prediction, SampleModel, predict

Rows = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that shapes the run."""

    seed: int = 20
    steps: int = 1150
    # The first steps see little of the instruction (except every few steps): cheap, and copying is learned sooner.
    short_steps: int = 700
    short_tokens: int = 16
    full_every: int = 10
    rows: Rows = (("ledger", 24), ("triage", 16), ("date", 20), ("price", 20), ("total", 40))
    warmup_steps: int = 100
    decay_steps: int = 650  # at the end, down to zero
    bias_speed: float = 0.001
    bias_rest_steps: int = 200  # at the end, with the correction bias left alone
    mtp_weight: float = 0.2
    judge_every: int = 100
    judge_rows: int = 64
    checkpoint_every: int = 50

    def prefix_tokens(self, step: int) -> int | None:
        """How much of the instruction a step sees; None for all."""
        is_short = step < self.short_steps and step % self.full_every
        return self.short_tokens if is_short else None

    def rate(self, step: int) -> float:
        """Factor on the learning rates: up, level, down."""
        return min(1.0, (step + 1) / self.warmup_steps, (self.steps - step) / self.decay_steps)

    def bias_step(self, step: int) -> float:
        """How far the correction biases move after a step."""
        return self.bias_speed if step < self.steps - self.bias_rest_steps else 0.0


class Run:
    """A training run, whose whole state a checkpoint keeps."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer):
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.model = SampleModel(ModelShape())
        self.optimizer = Optimizer(self.model)
        self.maker = BatchMaker(tokenizer, recipe.seed)
        self.step = 0
        self.seconds = 0.0  # with all that was done before a resume
        self.log: list[dict[str, float]] = []

    def train_step(self) -> dict[str, float]:
        """Forward, backward, update, and the correction biases moved against the load; returns the losses."""
        recipe, step = self.recipe, self.step
        batch = self.maker.draw(step, dict(recipe.rows), recipe.prefix_tokens(step))
        prediction = predict(self.model, batch, torch.bfloat16)
        main_loss, mtp_loss, task_losses = losses(batch, prediction)
        (main_loss + recipe.mtp_weight * mtp_loss).backward()
        self.optimizer.step(recipe.rate(step))
        for router in self.model.routers():
            router.balance(recipe.bias_step(step))
        self.step += 1
        return {"loss": main_loss.item(), "mtp_loss": mtp_loss.item(), **task_losses}

    def judge(self) -> Verdict:
        """Evaluate the present model on a few held-out examples, in bfloat16."""
        return evaluate(self.model, self.maker, num_rows=self.recipe.judge_rows, seed=0, dtype=torch.bfloat16)

    def save(self, path: Path) -> None:
        """Write a checkpoint beside `path`, then rename it."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "log": self.log,
        }
        torch.save(state, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.log = state["step"], state["seconds"], state["log"]


def losses(batch: Batch, prediction: Prediction) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Cross-entropy on answer tokens: mean over tasks of the main model and of the MTP layer, and of each task."""
    targets = batch.next_tokens[batch.places]
    main_M = F.cross_entropy(prediction.next_logits, targets, reduction="none")
    mtp_M = F.cross_entropy(prediction.after_next_logits, batch.after_next, ignore_index=-100, reduction="none")
    num_tasks = len(batch.segments)
    tokens_of_task = torch.bincount(batch.task_of_place, minlength=num_tasks).float()
    weight_M = 1 / (tokens_of_task[batch.task_of_place] * num_tasks)
    of_task = torch.zeros(num_tasks).index_add_(0, batch.task_of_place, main_M.detach()) / tokens_of_task
    named = {f"loss_{segment.task}": float(loss) for segment, loss in zip(batch.segments, of_task, strict=True)}
    return (main_M * weight_M).sum(), (mtp_M * weight_M).sum(), named


def train(run: Run, out: Path, limit_s: float) -> bool:
    """Train to the last step, or until `limit_s` seconds have passed; returns whether the end was reached."""
    recipe = run.recipe
    started = time.monotonic() - run.seconds
    stop_at = time.monotonic() + limit_s
    while run.step < recipe.steps and time.monotonic() < stop_at:
        step_losses = run.train_step()
        run.seconds = time.monotonic() - started
        if run.step % recipe.judge_every == 0 or run.step == recipe.steps:
            run.log.append({"step": run.step, "seconds": round(run.seconds), **step_losses, **columns(run.judge())})
            write_log(out / "log.csv", run.log)
        if run.step % recipe.checkpoint_every == 0 or run.step == recipe.steps:
            run.save(out / "checkpoint.pt")
        if run.step % 20 == 0:
            show_progress(run, step_losses)
    run.save(out / "checkpoint.pt")
    return run.step == recipe.steps


def columns(verdict: Verdict) -> dict[str, float]:
    """Return a verdict as columns of the log."""
    return {
        "accuracy": verdict.overall,
        **{f"accuracy_{task}": share for task, share in verdict.accuracy.items()},
        "mtp_acceptance": verdict.acceptance,
        **{f"load_skew_{layer}": skew for layer, skew in enumerate(verdict.load_skew, start=1)},
    }


def write_log(path: Path, rows: list[dict[str, float]]) -> None:
    """All rows so far as CSV, replaced in one step."""
    with path.with_suffix(".tmp").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows({name: f"{value:.6g}" for name, value in row.items()} for row in rows)
    os.replace(path.with_suffix(".tmp"), path)


def show_progress(run: Run, step_losses: dict[str, float]) -> None:
    """One line: step, minutes, losses, and what the last judging found."""
    parts = [f"step {run.step}/{run.recipe.steps}", f"{run.seconds / 60:.1f} min"]
    parts += [f"{name} {loss:.3f}" for name, loss in step_losses.items()]
    if run.log:
        last = run.log[-1]
        parts += ["|"] + [f"{n.removeprefix('accuracy_')} {v:.0%}" for n, v in last.items() if n.startswith("acc")]
        parts += [f"mtp {last['mtp_acceptance']:.0%}"]
        parts += ["load " + " ".join(f"{v:.2f}" for n, v in last.items() if n.startswith("load"))]
    print("  ".join(parts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the sample model from scratch.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint, the log and the model")
    parser.add_argument("--minutes", type=float, default=75.0, help="stop after so long; go on with --resume")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's checkpoint")
    options = parser.parse_args()
    checkpoint = options.out / "checkpoint.pt"
    if checkpoint.exists() and not options.resume:
        parser.error(f"{checkpoint} exists; give --resume to go on, or another folder")
    # One thread, so that sums come out the same on machines with another number of cores.
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(Recipe(), train_tokenizer(Recipe().seed))
    if options.resume:
        run.load(checkpoint)
    if not train(run, options.out, options.minutes * 60):
        print(f"stopped after {options.minutes:g} minutes at step {run.step}; go on with --resume")
        return
    export_model(run, options.out / "model")


if __name__ == "__main__":
    main()
