"""Processor seconds and memory of a simulated day on 278 nodes: one million requests, or as many as are named.

python tests/bench/simulate.py 1000000 10000000
"""

import resource
import sys
import time
from pathlib import Path

from batchinfer.sim.answer import answer
from batchinfer.sim.spec import Spec, load_spec

SPEC = Path(__file__).parent.parent.parent / "jobs" / "simulate_day.toml"


def with_requests(spec: Spec, num: int) -> Spec:
    return spec.model_copy(update={"workload": spec.workload.model_copy(update={"requests": num})})


def main() -> None:
    for num in [int(argument) for argument in sys.argv[1:]] or [1_000_000]:
        before = time.process_time()
        figures = answer(with_requests(load_spec(SPEC), num))
        peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"{num:12,} requests: {time.process_time() - before:7.1f} s, {peak_gb:.2f} GiB at most, "
            f"mean nodes {figures['mean_nodes']:.1f}, busy {figures['busy_share']:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
