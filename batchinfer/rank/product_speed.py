"""The program that measures a streamed model's products: `python -m batchinfer.rank.product_speed STEPS`.

It holds one layer of each kind of a converted folder in slots, as a rank does, runs the steps of launch/product_speed
through them, and prints prompt tokens and output tokens per second of the whole model.
"""

# L layers that are held, T tokens, B requests

from __future__ import annotations

if __name__ == "__main__":
    from batchinfer.stop_signals import ignore_signals

    ignore_signals()

import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from batchinfer import own_process
from batchinfer.config import PAGE_TOKENS
from batchinfer.kv.pages import pages_for
from batchinfer.launch.product_speed import MeasuredSteps
from batchinfer.model.attention_config import LayerMatrices
from batchinfer.model.config import ModelConfig, load_model_config
from batchinfer.model.memory_split import MemorySplit, slot_size
from batchinfer.model.moe import YieldPoint
from batchinfer.model.ops import Ops
from batchinfer.model.packed_files import map_weights
from batchinfer.model.packed_folder import PackedFolder, read_packed
from batchinfer.model.step import PrefillSpan, StepInput, StepTensors
from batchinfer.model.transformer import Transformer, local_dispatcher
from batchinfer.model.weight_stream import WeightStream
from batchinfer.parallel.spans import MicroBatchSpans, SpanLog
from batchinfer.rank.load import BITS, DTYPES
from batchinfer.records import BatchinferError, ExitCode

RUNS, ENOUGH_S = 3, 1.0  # most runs of a step, and the seconds after which no other one begins
_STRIDE = 7919  # between tokens, so that they go to many experts


def main() -> None:
    """Measure, and print [prompt tokens per second, output tokens per second]."""
    own_process.end_with_parent(signal.SIGKILL)
    steps = MeasuredSteps(**json.loads(sys.argv[1]))
    packed = read_packed(Path(steps.folder))
    assert packed is not None, "the job's check has found it"
    try:
        print(json.dumps(measure(packed, steps)))
    except BatchinferError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(ExitCode.BAD_JOB)


def measure(packed: PackedFolder, steps: MeasuredSteps) -> tuple[float, float]:
    """Return prompt tokens and output tokens per second of the whole model.

    Raises:
        ModelError: the folder cannot be run here, or cannot be read.
    """
    config = load_model_config(packed.folder)
    kinds = [layer_kind(config, layer) for layer in range(config.num_hidden_layers)]
    num_held = max(1, min(max(map(kinds.index, kinds)) + 1, config.num_hidden_layers - 1))
    held = replace(config, num_hidden_layers=num_held)
    dtype, bits = DTYPES[steps.dtype], BITS.get(steps.dtype, {})
    ops = Ops.select(steps.backend, dtype, fp8_pages=steps.fp8_pages, **bits)
    files = [packed.layer(layer) for layer in range(held.num_hidden_layers)]
    slots = tuple(slot_size(file.stat().st_size) for file in files)
    stream = WeightStream(files, MemorySplit(tuple(range(len(files))), slots, 0, 0))
    try:
        weights = map_weights(packed, held, ops, dtype=dtype, device="cpu", expert_ids=None, stream=stream)
        # of a model's last layer only some rows are computed: it is the same weights once more, and does not run
        weights = replace(weights, layers=(*weights.layers, weights.layers[-1]))
        longer = replace(config, num_hidden_layers=num_held + 1)
        model = Transformer(longer, weights, [local_dispatcher(longer, ops, "cpu")] * longer.num_moe_layers, ops)
        prefill = prefill_step(steps.prefill_tokens, steps.prompt_tokens, config.vocab_size)
        decode = decode_step(steps.decode_requests, steps.kv_tokens, config.vocab_size)
        decode_s = _seconds(model, stream, decode, config)
        prefill_s = _seconds(model, stream, prefill, config)
    finally:
        stream.close()
    return steps.prefill_tokens / prefill_s, steps.decode_requests / decode_s


def layer_kind(config: ModelConfig, layer: int) -> tuple[bool, LayerMatrices]:
    """Return what sets the time of a layer's products apart from that of other layers."""
    return config.is_moe_layer(layer), config.attention.matrices(config.hidden_size, layer)


def prefill_step(num_tokens: int, prompt_tokens: int, vocab_size: int) -> StepInput:
    """Return a step of prompts of this length, the last one cut; logits of their last tokens are wanted."""
    spans, first_page = [], 0
    for start in range(0, num_tokens, prompt_tokens):
        count = min(prompt_tokens, num_tokens - start)
        page_ids = torch.arange(first_page, first_page + pages_for(count))
        spans.append(PrefillSpan(start, count, count, page_ids))
        first_page += len(page_ids)
    firsts = torch.cat([span.page_ids[:1].repeat(span.num_tokens) for span in spans])
    positions = torch.cat([torch.arange(span.num_tokens) for span in spans])
    return StepInput(
        tokens=torch.arange(num_tokens) * _STRIDE % vocab_size,
        positions=positions,
        slots=firsts * PAGE_TOKENS + positions,
        logit_rows=torch.tensor([span.start + span.num_tokens - 1 for span in spans]),
        prefill=tuple(spans),
    )


def decode_step(num_requests: int, kv_tokens: int, vocab_size: int) -> StepInput:
    """Return a decode step of requests that share no pages; `kv_tokens` counts the new token too."""
    pages = torch.arange(num_requests * pages_for(kv_tokens)).view(num_requests, -1)
    return StepInput(
        tokens=torch.arange(num_requests) * _STRIDE % vocab_size,
        positions=torch.full((num_requests,), kv_tokens - 1),
        slots=pages[:, -1] * PAGE_TOKENS + (kv_tokens - 1) % PAGE_TOKENS,
        logit_rows=torch.arange(num_requests),
        page_table=pages,
        kv_tokens=torch.full((num_requests,), kv_tokens),
    )


def _seconds(model: Transformer, stream: WeightStream, step: StepInput, config: ModelConfig) -> float:
    """Return the seconds of a step in the whole model, extrapolated from the layers in memory.

    A layer that is not in memory counts as much as the last one of its kind, else as the last layer in memory.
    """
    num_slots = 0 if config.attention.cuts_anywhere else len(step.logit_rows)  # one wanted row per request
    if num_slots:
        step = replace(step, state_slots=torch.arange(num_slots))
    pages = model.new_pages(1 + int(step.slots.max()) // PAGE_TOKENS, num_slots)
    layers_s = _median(lambda: _layers_s(model, stream, step, pages))
    hidden_SD = torch.ones(len(step.logit_rows), config.hidden_size, dtype=model.dtype)
    (head_s,) = _median(lambda: [_head_s(model, hidden_SD)])
    of_kind = {layer_kind(config, layer): seconds for layer, seconds in enumerate(layers_s)}
    others = range(len(layers_s), config.num_hidden_layers)
    others_s = [of_kind.get(layer_kind(config, layer), layers_s[-1]) for layer in others]
    return sum(layers_s) + sum(others_s) + head_s


def _median(run: Callable[[], list[float]]) -> list[float]:
    """Return the medians of a few runs; the first run, which meets cold memory, counts only if it is long."""
    found, started_s = [run()], time.monotonic()
    if sum(found[0]) < ENOUGH_S:
        found.clear()
        while len(found) < RUNS and time.monotonic() - started_s < ENOUGH_S:
            found.append(run())
    return [median(column) for column in zip(*found, strict=True)]


def _layers_s(model: Transformer, stream: WeightStream, step: StepInput, pages: torch.Tensor) -> list[float]:
    """Return [L] seconds of a step in each layer that is held."""
    spans = MicroBatchSpans(SpanLog())
    points = model.points(StepTensors.of(step, model.device), pages, spans, by_layer=True)
    found = []
    next(points)
    for _ in model.layers[:-1]:
        stream.wait()
        started_s = time.monotonic()
        while next(points) is not YieldPoint.LAYER:
            pass
        found.append(time.monotonic() - started_s)
        stream.release()
    return found


def _head_s(model: Transformer, hidden_SD: torch.Tensor) -> float:
    started_s = time.monotonic()
    model.ops.linear(hidden_SD, model.weights.lm_head, float32_out=True)
    return time.monotonic() - started_s


if __name__ == "__main__":
    main()
