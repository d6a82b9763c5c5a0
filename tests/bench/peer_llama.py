"""llama.cpp through its Python bindings, as a child process of peers.py.

    python tests/bench/peer_llama.py FILE NUM_SEQUENCES

As its own programs for many sequences do: a prefix is computed once and copied to the sequences that share it, then
every step computes one token of all sequences; each sequence has its KV to itself.
"""

from __future__ import annotations

import ctypes
import os
import sys

import llama_cpp
import numpy as np
from peer_server import Requests, Run, groups_of, serve

STEP_TOKENS = 2048
Part = tuple[int, int, list[int]]  # sequence, position of the first token, tokens


class Context:
    """KV and computation of up to `num_sequences` sequences of up to `length` tokens."""

    def __init__(self, model: int, num_sequences: int, length: int) -> None:
        how = llama_cpp.llama_context_default_params()
        how.n_ctx, how.n_seq_max, how.kv_unified = num_sequences * length, num_sequences, False
        how.n_batch = how.n_ubatch = STEP_TOKENS
        how.n_threads = how.n_threads_batch = len(os.sched_getaffinity(0))
        how.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = llama_cpp.llama_init_from_model(model, how)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(STEP_TOKENS, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def copy(self, source: int, target: int) -> None:
        """Give a sequence without tokens all KV of another."""
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def step(self, parts: list[Part]) -> np.ndarray:
        """Compute at most STEP_TOKENS tokens; returns the likeliest token after each part."""
        batch, count = self._batch, 0
        for sequence, position, tokens in parts:
            for offset, token in enumerate(tokens):
                batch.token[count], batch.pos[count] = token, position + offset
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, sequence
                batch.logits[count] = offset == len(tokens) - 1
                count += 1
        batch.n_tokens = count
        if llama_cpp.llama_decode(self._context, batch):
            sys.exit(f"llama.cpp could not compute a step of {count} tokens")
        logits = llama_cpp.llama_get_logits(self._context)
        shape = (len(parts), self._vocab_size)
        return np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), shape).argmax(1)

    def prefill(self, parts: list[Part]) -> dict[int, int]:
        """Compute parts in steps as full as they can be; returns the likeliest token after each sequence."""
        found: dict[int, int] = {}
        step: list[Part] = []
        room = STEP_TOKENS
        for part in parts:
            sequence, position, tokens = part
            while tokens:
                step.append((sequence, position, tokens[:room]))
                position, tokens, room = position + room, tokens[room:], room - len(step[-1][2])
                if not room:
                    found.update(self._likeliest(step))
                    step, room = [], STEP_TOKENS
        return {**found, **self._likeliest(step)} if step else found

    def _likeliest(self, step: list[Part]) -> dict[int, int]:
        return {part[0]: int(token) for part, token in zip(step, self.step(step), strict=True)}

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)


def generate(context: Context, requests: Requests) -> list[list[int]]:
    """Output tokens of requests, at most one per sequence. Longest first: those at work stay next to each other."""
    prompts = [prompt for prompt, _ in requests]
    groups = [(common if len(sequences) > 1 else 0, sequences) for common, sequences in groups_of(prompts)]
    context.prefill([(sequences[0], 0, prompts[sequences[0]][:common]) for common, sequences in groups])
    for common, sequences in groups:
        for sequence in sequences[1:] if common else []:
            context.copy(sequences[0], sequence)
    starts = {sequence: common for common, sequences in groups for sequence in sequences}
    first = context.prefill([(s, starts[s], prompts[s][starts[s] :]) for s in range(len(prompts))])
    outputs = [[first[sequence]] for sequence in range(len(requests))]
    while active := [s for s, (_, num_output) in enumerate(requests) if len(outputs[s]) < num_output]:
        tokens = context.step([(s, len(prompts[s]) + len(outputs[s]) - 1, outputs[s][-1:]) for s in active])
        for sequence, token in zip(active, tokens, strict=True):
            outputs[sequence].append(int(token))
    return outputs


def load(file: str, num_sequences: int) -> tuple[str, Run]:
    """The model, and what runs a workload, as many requests at a time as there are sequences."""
    model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
    if not model:
        sys.exit(f"llama.cpp cannot load {file}")

    def run(requests: Requests, _batch: int) -> list[int]:
        order = sorted(range(len(requests)), key=lambda number: -requests[number][1])
        num_outputs = [0] * len(requests)
        for start in range(0, len(order), num_sequences):
            numbers = order[start : start + num_sequences]
            chosen = [requests[number] for number in numbers]
            context = Context(model, len(chosen), max(len(prompt) + count for prompt, count in chosen))
            for number, output in zip(numbers, generate(context, chosen), strict=True):
                num_outputs[number] = len(output)
            context.close()
        return num_outputs

    return f"llama.cpp of llama-cpp-python {llama_cpp.__version__}", run


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1], int(sys.argv[2])))
