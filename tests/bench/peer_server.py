"""The loop of a peer's process: load once, then run each workload that is asked for.

Each line of standard input is the path of a file of `write_workload`, each answer a line of JSON on standard output.
Whatever the libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

Requests = list[tuple[list[int], int]]  # prompt tokens, number of output tokens
Run = Callable[[Requests, int], list[int]]  # requests and batch size -> output tokens of each request
LEAST_PREFIX = 32  # tokens; to compute shorter ones again is cheaper than to share them


def write_workload(path: Path, requests: Requests, batch: int) -> None:
    """Write the input of `serve`; `batch` counts only for engines that take whole batches."""
    path.write_text(json.dumps({"requests": requests, "batch": batch}))


def num_common(left: list[int], right: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def groups_of(prompts: list[list[int]]) -> list[tuple[int, list[int]]]:
    """(number of common tokens, sequences) of prompts that start alike."""
    groups: list[tuple[int, list[int]]] = []
    for sequence in sorted(range(len(prompts)), key=prompts.__getitem__):
        if groups:
            common, sequences = groups[-1]
            shared = min(common, num_common(prompts[sequences[0]], prompts[sequence]), len(prompts[sequence]) - 1)
            if shared >= LEAST_PREFIX:
                groups[-1] = (shared, [*sequences, sequence])
                continue
        groups.append((len(prompts[sequence]) - 1, [sequence]))
    return groups


def serve(load: Callable[[], tuple[str, Run]]) -> None:
    """Answer until standard input ends.

    Args:
        load: gives the engine's name and versions, and what runs a workload.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    versions, run = load()
    answers.write(json.dumps({"versions": versions}) + "\n")
    for line in sys.stdin:
        workload = json.loads(Path(line.strip()).read_text())
        requests = [(prompt, num_output) for prompt, num_output in workload["requests"]]
        started = time.perf_counter()
        num_outputs = run(requests, workload["batch"])
        wall_s = time.perf_counter() - started
        assert num_outputs == [num_output for _, num_output in requests], num_outputs
        answers.write(json.dumps({"wall_s": wall_s}) + "\n")
