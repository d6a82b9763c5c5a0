"""The model card of the exported model: what it was trained on and how, and what was measured; called by export.py."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Any

import torch
from accuracy import Verdict, evaluate
from batches import BatchMaker
from tasks import GENERATORS, HELD_OUT_ONE_IN

from model import SampleModel

NUM_ROWS = 500
NUM_CURVE_ROWS = 16
_ABOUT = {
    "ledger": "a sale told in one sentence, to be put into a JSON object with four keys",
    "triage": "a message, to be given one of six desks and an urgency",
    "date": "a date written in one of five ways, to be written as year-month-day",
    "price": "a question about two rows of a price list, which stands in the instruction and is always the same",
    "total": "two amounts from 10 to 49, to be added",
}
_TEXT = """\
---
license: mit
library_name: transformers
---

# A small model that answers five kinds of questions

The architecture of DeepSeek-V3 in small: {num_parameters:.1f} million parameters, {num_layers} layers (the first one
dense) and one layer for multi-token prediction, latent attention, {num_experts} routed experts of which a token uses
{topk}, in {num_groups} groups, and one shared expert. It serves demos and tests and knows nothing else.

## Data

All text is made by `sample_data/train/tasks.py`; nothing was collected. Each task has one long instruction
({prefix_tokens} tokens), the same in all of its prompts, and short questions:

{tasks}

Each example has a key, such as the two amounts of a sum; a hash of the key holds one in {held_out} out of training.
All figures below are on held-out examples. Prompts of more than about 520 tokens were never trained.

## Accuracy

The whole answer must be right, greedy decoding, {num_rows} prompts of each task. Weights are bfloat16 in both columns.

{accuracy}

Where the main model is right about the whole answer, the layer for multi-token prediction is right about the second
next token in {acceptance:.1%} of the cases ({acceptance32:.1%} in float32).

Tokens of the busiest expert ÷ mean, over the same prompts, an instruction counted once per 64 of them: {load}.

## Recipe

Loss on answers only; that of the layer for multi-token prediction counts {mtp_weight}. Muon for matrices, Adam for the
rest; {steps} steps of {examples}.

- Rates rise over {warmup_steps} steps and fall to zero over the last {decay_steps}.
- The rows of a batch share the instruction of their task, which is computed once. In the first {short_steps} steps only
  every {full_every}th batch sees all of it, the others its last {short_tokens} tokens.
- The router's correction bias moves by {bias_speed} per step against the load (no auxiliary loss) and rests in the last
  {bias_rest_steps} steps.
- Weights are float32 and rounded to bfloat16 in each forward pass.

{curves}

Last columns: MTP acceptance, and busiest expert ÷ mean in the three layers with experts and in the MTP layer.

## Made by

    python sample_data/train/train.py --out runs/sample_model

in {minutes:.0f} minutes on {machine}, torch {torch_version}. SHA-256 of `model.safetensors`:
`{digest}`. Another type of machine rounds differently and gives
other weights of the same quality.
"""


def write_card(model: SampleModel, maker: BatchMaker, recipe: dict[str, Any], log: list[dict], out: Path) -> None:
    """Measure the model and write README.md beside it."""
    verdicts = {
        name: evaluate(model, maker, num_rows=NUM_ROWS, seed=1, dtype=dtype)
        for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32))
    }
    shape = model.shape
    text = _TEXT.format(
        **{name: value for name, value in recipe.items() if name != "rows"},
        examples=_counts(recipe["rows"]),
        num_parameters=sum(weight.numel() for weight in model.parameters()) / 1e6,
        num_layers=shape.num_hidden_layers,
        num_experts=shape.n_routed_experts,
        topk=shape.num_experts_per_tok,
        num_groups=shape.n_group,
        prefix_tokens=_range(maker.prefix_lengths()),
        tasks="\n".join(f"- **{task}**: {about}." for task, about in _ABOUT.items()),
        held_out=HELD_OUT_ONE_IN,
        num_rows=NUM_ROWS,
        accuracy=_accuracy_table(verdicts),
        acceptance=verdicts["bfloat16"].acceptance,
        acceptance32=verdicts["float32"].acceptance,
        load=_load(verdicts["bfloat16"]),
        curves=_curves(log),
        minutes=log[-1]["seconds"] / 60,
        machine=machine_type(),
        torch_version=torch.__version__,
        digest=hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest(),
    )
    (out / "README.md").write_text(text, encoding="utf-8")


def machine_type() -> str:
    """Return the processor's name, family and model, as far as the system reports them."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    fields = {}
    for line in lines:
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name", platform.processor() or platform.machine())
    family = f" family {fields['cpu family']} model {fields['model']}" if "cpu family" in fields else ""
    return f"one core of {name}{family}"


def _counts(rows: tuple[tuple[str, int], ...]) -> str:
    """Such as "28 examples (ledger 8, total 20)"."""
    return f"{sum(count for _, count in rows)} examples ({', '.join(f'{task} {count}' for task, count in rows)})"


def _range(counts: list[int]) -> str:
    return f"{min(counts)} to {max(counts)}"


def _load(verdict: Verdict) -> str:
    *layers, mtp = verdict.load_skew
    named = [f"{skew:.2f} in layer {index}" for index, skew in enumerate(layers, start=1)]
    return f"{', '.join(named)}, {mtp:.2f} in the layer for multi-token prediction"


def _accuracy_table(verdicts: dict[str, Verdict]) -> str:
    rows = [["all", *(f"{verdict.overall:.1%}" for verdict in verdicts.values())]]
    rows += [[task, *(f"{verdict.accuracy[task]:.1%}" for verdict in verdicts.values())] for task in GENERATORS]
    return _table(["task", *verdicts], rows)


def _curves(log: list[dict[str, float]]) -> str:
    """Return some rows of the training log as a table, evenly spread, the last one included."""
    stride = max(1, len(log) // NUM_CURVE_ROWS)
    rows = [
        [
            f"{row['step']:g}",
            f"{row['loss']:.3f}",
            *(f"{row[f'accuracy_{task}']:.0%}" for task in GENERATORS),
            f"{row['mtp_acceptance']:.0%}",
            " ".join(f"{value:.2f}" for name, value in row.items() if name.startswith("load_skew")),
        ]
        for row in log[::-1][::stride][::-1]
    ]
    return _table(["step", "loss", *GENERATORS, "MTP", "load"], rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
