"""Decode steps of `small` on cores that others use, too: milliseconds, and how many times the fair share that is.

Alone, beside one and two processes that do nothing but count, and beside a second job of the same kind. What is fair:
a host's cores go to threads in equal parts, so a step takes alone × (own threads + others') ÷ cores. All cases run by
turns, in one run; with --code, those of several checkouts, too. With --undisturbed, a turn in which processes of
somebody else ran is done again, a few times.

    python tests/bench/beside_others.py [--rounds N] [--seconds S] [--folder MODEL] [--code DIR ...] [--undisturbed]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIZE = "small"
SETTLED_S = 0.4  # until all have got going
FAIR_TIMES = 1.5  # what is still good
MOST_OTHERS, MOST_TRIES = 0.1, 5  # of a core; of a turn in which others take more


@dataclass(frozen=True)
class Case:
    """The other load: busy processes of one thread, or a second job with as many threads as the first."""

    name: str
    num_busy: int = 0
    has_twin: bool = False

    def fair_share(self, alone_s: float, num_cores: int) -> float:
        """Seconds of a step; there are as many threads as cores."""
        others = num_cores if self.has_twin else self.num_busy
        return alone_s * max(1.0, (num_cores + others) / num_cores)


CASES = (
    Case("alone"),
    Case("beside one busy process", num_busy=1),
    Case("beside two busy processes", num_busy=2),
    Case("beside a second job", has_twin=True),
)


class Job:
    """A process that holds the model and runs decode steps when told."""

    def __init__(self, code: Path, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(folder)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(str(code / part) for part in (".", "kernels"))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, seconds: float) -> None:
        """Run steps for so long."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()

    def answer(self) -> list[float]:
        """Seconds of each step; waits for the last."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def machine_ticks() -> int:
    """Time that all cores have worked, in clock ticks."""
    user, nice, system, _, _, interrupts, soft, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return user + nice + system + interrupts + soft


def process_ticks(pids: list[int]) -> int:
    """Time that these processes have worked, in clock ticks."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(field[11]) + int(field[12]) for field in fields)


@contextmanager
def busy_processes(count: int) -> Iterator[list[int]]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def step_seconds(case: Case, job: Job, twin: Job, seconds: float) -> tuple[list[float], float]:
    """Return the seconds of each step of `job` under the case's load, and the share of a core that others used."""
    with busy_processes(case.num_busy) as busy:
        if case.has_twin:
            twin.start(SETTLED_S + seconds)
        time.sleep(SETTLED_S)
        known = [job.pid, twin.pid, *busy]
        started, others = time.monotonic(), process_ticks(known) - machine_ticks()
        job.start(seconds)
        times = job.answer()
        others = machine_ticks() - process_ticks(known) + others
        share = others / os.sysconf("SC_CLK_TCK") / (time.monotonic() - started)
        if case.has_twin:
            twin.answer()
    return times, share


def measure(codes: list[Path], folder: Path, rounds: int, seconds: float, *, undisturbed: bool) -> None:
    num_cores = len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        jobs = [(Job(code, folder), Job(code, folder)) for code in codes]
        for job in (job for pair in jobs for job in pair):
            stack.callback(job.end)
            job.start(seconds)
            job.answer()  # memory is touched, threads are started
        times: dict[tuple[Path, Case], list[float]] = {}
        for number in range(rounds):
            for case in CASES:
                for code, (job, twin) in list(zip(codes, jobs, strict=True))[:: 1 if number % 2 == 0 else -1]:
                    for _ in range(MOST_TRIES if undisturbed else 1):
                        taken, others = step_seconds(case, job, twin, seconds)
                        if others <= MOST_OTHERS:
                            break
                        time.sleep(1)
                    times.setdefault((code, case), []).extend(taken)
    print(f"{num_cores} threads on {num_cores} cores; milliseconds of a decode step of {SIZE}, medians (and 9 of 10)")
    for code in codes:
        print(f"{code}" if len(codes) > 1 else "", f"{'':<28}{'step':>8}{'9 of 10':>10}{'fair':>8}{'step ÷ fair':>13}")
        alone_s = statistics.median(times[code, CASES[0]])
        for case in CASES:
            taken = times[code, case]
            median_s, fair_s = statistics.median(taken), case.fair_share(alone_s, num_cores)
            most_s = statistics.quantiles(taken, n=10)[-1]
            verdict = "" if median_s <= FAIR_TIMES * fair_s else f"  more than {FAIR_TIMES}"
            print(
                f"{case.name:<28}{median_s * 1e3:>8.0f}{most_s * 1e3:>10.0f}{fair_s * 1e3:>8.0f}"
                f"{median_s / fair_s:>13.2f}{verdict}   ({len(taken)} steps)",
                flush=True,
            )


def serve(folder: Path) -> None:
    """Be a Job: a line with seconds in, a line with the seconds of each step out."""
    from batchinfer.launch.rank_process import thread_settings

    os.environ.update(thread_settings(len(os.sched_getaffinity(0))))  # read when torch is imported
    import torch
    from model_steps import BATCH, CONTEXT, decode_step

    from batchinfer.config import PAGE_TOKENS
    from batchinfer.model.fused.stack import FusedDecode
    from batchinfer.model.schedules import Schedule, plain
    from batchinfer.model.transformer import Transformer

    with torch.inference_mode():
        model = Transformer.load(folder, dtype=torch.bfloat16)
        pages = model.new_pages(BATCH[SIZE] * -(-(CONTEXT + 1) // PAGE_TOKENS)).normal_()
        step, schedule = decode_step(SIZE, shared=False), Schedule(decode=FusedDecode.of(model) or plain)
        for line in sys.stdin:
            times, end = [], time.perf_counter() + float(line)
            while not times or time.perf_counter() < end:
                started = time.perf_counter()
                model.forward(step, pages, schedule)
                times.append(time.perf_counter() - started)
            print(json.dumps(times), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0, help="of steps, per case and round")
    parser.add_argument("--folder", type=Path, help="a model of this size, instead of one made for this run")
    parser.add_argument("--code", type=Path, nargs="+", default=[ROOT], help="checkouts to compare")
    parser.add_argument(
        "--undisturbed", action="store_true", help="repeat turns in which somebody else's processes ran"
    )
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder
        if folder is None:
            from bench_models import make_model  # imports torch, whose threads are set up elsewhere

            folder = make_model(Path(scratch) / SIZE, SIZE)
        measure(
            [code.resolve() for code in options.code],
            folder,
            options.rounds,
            options.seconds,
            undisturbed=options.undisturbed,
        )


if __name__ == "__main__":
    main()
