"""Some steps of a rank under torch's profiler, in a job as it is: how long no kernel runs, and which take longest.

in_ranks/sitecustomize.py installs it in a rank's process. Each kind of step is profiled once, in neighbouring steps of
this kind: so the time between two steps counts, too.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from trace_step import trace_of

from batchinfer.rank.worker import RankWorker

_LEAST_STEPS = 2  # neighbours of one kind; with fewer the profile is taken again later
_MOST_KERNELS = 12


class StepProfile:
    """Profiles of neighbouring steps.

    Args:
        path: gets a line of JSON per kind of step.
        steps: by kind, the number of steps that go by first, and of those that are profiled.
    """

    def __init__(self, path: Path, steps: dict[str, tuple[int, int]], *, on_gpu: bool) -> None:
        self._path, self._left, self._on_gpu = path, dict(steps), on_gpu
        self._gone: Counter[str] = Counter()
        self._profile: Any = None
        self._kind, self._num_steps = "", 0

    def run(self, kind: str, step: Callable[[], None]) -> None:
        """Run a step, under the profiler if its kind is to be profiled now."""
        if self._profile is not None and kind != self._kind:
            self._end()
        if self._profile is None and kind in self._left and self._gone[kind] >= self._left[kind][0]:
            self._begin(kind)
        step()
        self._gone[kind] += 1
        if self._profile is not None:
            self._num_steps += 1
            if self._num_steps == self._left[kind][1]:
                self._end()

    def _begin(self, kind: str) -> None:
        self._kind, self._num_steps = kind, 0
        activity = torch.profiler.ProfilerActivity
        self._profile = torch.profiler.profile(activities=[activity.CUDA if self._on_gpu else activity.CPU])
        self._wait()
        self._profile.start()

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def _end(self) -> None:
        """Stop; write a line if there were steps enough."""
        self._wait()
        profile, self._profile = self._profile, None
        profile.stop()
        if self._num_steps < _LEAST_STEPS:
            return
        del self._left[self._kind]
        trace = trace_of(self._kind, 1, list(profile.events()), is_rehearsal=not self._on_gpu)
        line = {
            "kind": self._kind,
            "steps": self._num_steps,
            "whole_s": trace.whole_us / 1e6,
            "idle_s": (trace.whole_us - trace.busy_us) / 1e6,
            "kernels": sum(trace.starts.values()),
            "longest": [[name[:80], micros / 1e6] for name, micros in trace.micros.most_common(_MOST_KERNELS)],
            "host": dict(trace.host),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def install(settings: str) -> None:
    """Have every step of this rank run through a profile.

    Args:
        settings: JSON with the arguments of StepProfile.
    """
    values = json.loads(settings)
    on_gpu = torch.cuda.is_available() and not values["rehearse"]
    profile = StepProfile(Path(values["path"]), values["steps"], on_gpu=on_gpu)
    run_step = RankWorker._step

    def step(worker: RankWorker, agreed: Any, feed: Any) -> None:
        profile.run(agreed.kind.value, lambda: run_step(worker, agreed, feed))

    RankWorker._step = step  # type: ignore[method-assign]
    print("steps of this rank are profiled", file=sys.stderr)
