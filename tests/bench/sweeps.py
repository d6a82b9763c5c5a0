"""Seconds of a sweep of streamed weights beside its reads alone and its products alone, by turns in one process.

The first layers of a converted folder are read for each sweep; one sweep has prompts of 500 tokens in prefill steps,
and decode steps at a context of 320 tokens. Products alone run in one layer of each kind that stays in memory. Reads
and sweeps begin with a ring that another sweep has left full, as in a job. GB/s and seconds depend on the hour: compare
the columns of a round.

    python tests/bench/sweeps.py FOLDER [--dtype bfloat16] [--layers N] [--prompts 0 4] [--answers 64] [--rounds 5]
                                 [--slots 3] [--readers 8]
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from batchinfer.model import memory_split, weight_stream
from batchinfer.model.config import load_model_config
from batchinfer.model.memory_split import MemorySplit, slot_size, split_memory
from batchinfer.model.ops import Ops
from batchinfer.model.packed_files import map_weights
from batchinfer.model.packed_folder import read_packed
from batchinfer.model.step import StepInput
from batchinfer.model.sweeps import run_sweep
from batchinfer.model.transformer import Transformer, local_dispatcher
from batchinfer.model.weight_stream import WeightStream
from batchinfer.parallel.spans import SpanLog
from batchinfer.rank.load import BITS, DTYPES
from batchinfer.rank.product_speed import decode_step, prefill_step

PROMPT_TOKENS, CONTEXT_TOKENS, STEP_TOKENS, STEP_REQUESTS = 500, 320, 4096, 256


class Held:
    """A stream whose layers are all there."""

    def wait(self) -> None: ...

    def release(self) -> None: ...


def models_of(folder: Path, dtype: str, num_layers: int | None, num_slots: int) -> tuple[Transformer, Transformer]:
    """Return the model whose layers are streamed, and one whose layers all have the weights of the first of a kind."""
    packed, config = read_packed(folder), load_model_config(folder)
    assert packed is not None, f"{folder} is not converted"
    config = replace(config, num_hidden_layers=num_layers or config.num_hidden_layers)
    bits = BITS.get(dtype, {})
    ops = Ops.select("cpu", DTYPES[dtype], **bits)
    files = [packed.layer(layer) for layer in range(config.num_hidden_layers)]
    sizes = [file.stat().st_size for file in files]
    memory_split.RING_SLOTS = num_slots
    most = {"memory_bytes": num_slots * slot_size(max(sizes)), "fixed_bytes": 0, "least_kv_bytes": 0}
    stream = WeightStream(files, split_memory(sizes, useful_kv_bytes=0, **most))
    given: dict[str, Any] = {"dtype": DTYPES[dtype], "device": "cpu", "expert_ids": None}
    dispatchers = [local_dispatcher(config, ops, "cpu")] * config.num_moe_layers
    streamed = Transformer(config, map_weights(packed, config, ops, stream=stream, **given), dispatchers, ops)
    firsts = [min(config.moe_layers, default=0) if config.is_moe_layer(layer) else 0 for layer in range(len(files))]
    few = replace(config, num_hidden_layers=max(firsts) + 1)
    once = WeightStream(
        files[: max(firsts) + 1],
        MemorySplit(tuple(range(max(firsts) + 1)), tuple(map(slot_size, sizes[: max(firsts) + 1])), 0, 0),
    )
    held = map_weights(packed, few, ops, stream=once, **given)
    for _ in held.layers:
        once.wait()
        once.release()
    once.close()
    held = replace(held, layers=tuple(held.layers[first] for first in firsts), stream=None)
    return streamed, Transformer(config, held, dispatchers, ops)


def steps_of(num_prompts: int, num_answers: int, vocab_size: int) -> list[StepInput]:
    """Return the steps of a sweep."""
    per_step = STEP_TOKENS // PROMPT_TOKENS
    prompts = [min(per_step, num_prompts - first) for first in range(0, num_prompts, per_step)]
    answers = [min(STEP_REQUESTS, num_answers - first) for first in range(0, num_answers, STEP_REQUESTS)]
    return [
        *(prefill_step(count * PROMPT_TOKENS, PROMPT_TOKENS, vocab_size) for count in prompts),
        *(decode_step(count, CONTEXT_TOKENS, vocab_size) for count in answers),
    ]


def sweep_s(model: Transformer, stream: Any, steps: list[StepInput], pages: torch.Tensor) -> float:
    """Return the seconds of one sweep."""
    started_s = time.monotonic()
    for _ in run_sweep(model, stream, steps, pages, [SpanLog() for _ in steps]):
        pass
    return time.monotonic() - started_s


def reads_s(stream: WeightStream) -> float:
    """Return the seconds in which a sweep's layers are read."""
    started_s = time.monotonic()
    for _ in stream.split.slot_of_layer:
        stream.wait()
        stream.release()
    return time.monotonic() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--prompts", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=memory_split.RING_SLOTS)
    parser.add_argument("--readers", type=int, default=weight_stream.NUM_READERS)
    options = parser.parse_args()
    weight_stream.NUM_READERS = options.readers
    streamed, held = models_of(options.folder, options.dtype, options.layers, options.slots)
    stream = streamed.stream
    assert stream is not None
    print(f"{stream.split.sweep_bytes / 1e9:.2f} GB per sweep, {options.slots} slots, {options.readers} readers")
    for num_prompts in options.prompts:
        steps = steps_of(num_prompts, options.answers, streamed.config.vocab_size)
        pages = streamed.new_pages(1 + max(int(step.slots.max()) for step in steps) // 64)
        rounds = []
        for _ in range(options.rounds):
            reads_s(stream)
            reads = reads_s(stream)
            products = sweep_s(held, Held(), steps, pages)
            sweep_s(streamed, stream, steps, pages)
            read_before_s, waited_s = stream.read_s, stream.wait_s
            streamed_s = sweep_s(streamed, stream, steps, pages)
            rounds.append((reads, products, streamed_s, stream.read_s - read_before_s, stream.wait_s - waited_s))
            print(
                "  reads {:6.2f} s, products {:6.2f} s, sweep {:6.2f} s (reading {:.2f}, waiting {:.2f})".format(
                    *rounds[-1]
                )
            )
        reads, products, sweep, *_ = (median(column) for column in zip(*rounds, strict=True))
        print(
            f"{num_prompts * PROMPT_TOKENS:,} prompt tokens and {options.answers} answers: sweep {sweep:.2f} s, "
            f"{sweep / max(reads, products):.2f} x max(reads {reads:.2f}, products {products:.2f}), medians"
        )
    stream.close()


if __name__ == "__main__":
    main()
