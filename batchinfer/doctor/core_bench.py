"""Measurement of the best use of a host's cores: one rank with all threads, or one rank per core.

The experts of one MoE layer, as a decode step of 64 tokens meets them, run in child processes: all experts in one
process, or an equal share in each of several at the same time. Several ranks would also exchange rows, so they must be
clearly faster to be worthwhile.
"""

# E experts, D hidden, F intermediate

import os
import subprocess
import sys
import time
from dataclasses import dataclass

import torch

from batchinfer import own_process
from batchinfer.host_info import num_cores
from batchinfer.launch.rank_process import thread_settings
from batchinfer_kernels import registry

_EXPERTS, _HIDDEN, _INTERMEDIATE, _ROWS_PER_EXPERT = 64, 1024, 256, 6
_WARM_UP_S, _MEASURED_S, _LIMIT_S = 0.5, 1.5, 120.0
WORTH_IT = 1.15  # several ranks must be faster than one by this factor, for they also exchange rows


@dataclass(frozen=True, slots=True)
class CoreUse:
    """Weights read per second, in bytes, by one process with all threads and by one process per core."""

    num_cores: int
    one_rank: float
    rank_per_core: float

    @property
    def best_ranks(self) -> int:
        """Ranks to run on this host."""
        return self.num_cores if self.rank_per_core > WORTH_IT * self.one_rank else 1


def measure_core_use() -> CoreUse:
    """Measure both ways, one after the other (about ten seconds).

    Raises:
        RuntimeError: a process failed; the message is the end of its stderr.
    """
    cores = sorted(os.sched_getaffinity(0))[: num_cores()]
    return CoreUse(len(cores), _bytes_per_s([cores]), _bytes_per_s([[core] for core in cores]))


def _bytes_per_s(cores_of_process: list[list[int]]) -> float:
    """Return the bytes per second of all processes together, each on its own cores with as many threads."""
    processes = [
        subprocess.Popen(
            own_process.command(__name__, str(len(cores_of_process)), ",".join(map(str, cores))),
            env={**os.environ, **thread_settings(len(cores))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for cores in cores_of_process
    ]
    try:
        ended = [process.communicate(timeout=_LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, ended, strict=True):
        if process.returncode:
            raise RuntimeError(f"measuring a rank failed: {errors.strip()[-300:]}")
    return sum(float(out) for out, _ in ended)


def _measure(num_processes: int) -> float:
    """Return the bytes of weights that this process reads per second with its share of the experts."""
    num_experts = max(1, _EXPERTS // num_processes)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    pack, run = (registry.select(name, dtype=torch.bfloat16) for name in ("pack", "grouped_mlp"))
    gate_up = pack(random(num_experts, 2 * _INTERMEDIATE, _HIDDEN), is_paired=True)
    down = pack(random(num_experts, _HIDDEN, _INTERMEDIATE))
    x, num_rows = random(num_experts * _ROWS_PER_EXPERT, _HIDDEN), torch.full((num_experts,), _ROWS_PER_EXPERT)
    num_calls, started = 0, time.monotonic() + _WARM_UP_S
    with torch.inference_mode():
        while (now := time.monotonic()) < started + _MEASURED_S:
            run(x, num_rows, gate_up, down)
            num_calls += now >= started
    return num_calls * num_experts * 3 * _HIDDEN * _INTERMEDIATE * 2 / _MEASURED_S


if __name__ == "__main__":
    os.sched_setaffinity(0, map(int, sys.argv[2].split(",")))
    print(_measure(int(sys.argv[1])))
