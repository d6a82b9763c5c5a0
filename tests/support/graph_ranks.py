"""Rank processes on a CPU that believe in CUDA graphs and DeepEP: stand-ins for both, set up as they start.

Everything else is the product: controller, processes, votes, sizes, filler rows, dispatchers. The graph's stand-in runs
the work again on the same memory, where a GPU would start the kernels again; what it holds is not looked at before it
was started once. DeepEP's (deep_ep_stand_in.py) sends rows over gloo.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from batchinfer.model.fused.graphs import Work
from batchinfer.model.step import StepOutput
from support import deep_ep_stand_in

SITE = """
import os
if "BATCHINFER_RANK_NUMBER" in os.environ:
    from support.graph_ranks import install
    install(**{options!r})
"""


def write_site(folder: Path, **options: Any) -> str:
    """A folder for PYTHONPATH with which ranks call `install` first."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITE.format(options=options))
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def install(
    *, refuses: tuple[int, ...] = (), memory_for: dict[int, int] | None = None, dies: tuple[int, int, str] | None = None
) -> None:
    """Put the stand-ins in the places of CUDA's and DeepEP's.

    Args:
        refuses: ranks whose operations cannot be recorded.
        memory_for: by rank the number of graphs for which it has memory; others have enough.
        dies: rank, how many graphs it has started when it dies in the middle of the next, and a file that says so.
    """
    from batchinfer.model.fused import graphs
    from batchinfer.parallel import mesh
    from batchinfer.rank import context
    from batchinfer_kernels import registry

    deep_ep = ModuleType("deep_ep")
    deep_ep.Buffer = Buffer  # type: ignore[attr-defined]
    sys.modules["deep_ep"] = deep_ep
    open_group = mesh._open_group

    def has_memory(device: Any) -> bool:
        room = (memory_for or {}).get(own_rank())
        return room is None or Recorder.num_recorded < room

    stand_ins: list[tuple[ModuleType, str, Any]] = [
        (mesh, "_open_group", lambda backend, *others: open_group("gloo", *others)),
        (mesh, "check_device", lambda *_: None),
        (registry, "reads_on_host", lambda operation: own_rank() in refuses),
        (graphs, "_why_no_graphs_on", lambda device: None),
        (graphs, "_CudaRecorder", Recorder),
        (context, "has_memory", has_memory),
    ]
    for module, name, stand_in in stand_ins:
        assert hasattr(module, name)
        setattr(module, name, stand_in)
    Recorder.dies = dies if dies is not None and not Path(dies[2]).exists() else None


def own_rank() -> int:
    """The number of this rank, which the process that ranks are forked from does not have."""
    return int(os.environ["BATCHINFER_RANK_NUMBER"])


class Recorder:
    """Runs the work again, into the memory of the first results; recording runs nothing."""

    num_recorded = num_started = 0
    dies: tuple[int, int, str] | None = None

    def __call__(self, work: Work) -> Work:
        Recorder.num_recorded += 1
        held: StepOutput | None = None

        def start() -> StepOutput:
            nonlocal held
            if Recorder.dies is not None and (own_rank(), Recorder.num_started) == Recorder.dies[:2]:
                Buffer.dies_in_s = Recorder.dies[2]
            Recorder.num_started += 1
            output = work()
            if held is None:
                held = output
            else:
                held.logits.copy_(output.logits)
                held.expert_counts.copy_(output.expert_counts)
            return held

        return start


class World:
    """deep_ep_stand_in.World between processes: posts travel when they are collected, in one order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size = group, group.size()
        self.calls: deque[Any] = deque(maxlen=0)
        self._posts: dict[Any, Any] = {}

    def post(self, step: Any, rank: int, value: Any) -> None:
        self._posts[step] = value

    def collect(self, step: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, (step, self._posts.pop(step)), group=self.group)
        assert len({posted for posted, _ in found}) == 1, f"ranks do not make the same calls: {found}"
        return [value for _, value in found]


class Buffer(deep_ep_stand_in.Buffer):
    """A buffer of a group of processes."""

    dies_in_s: str | None = None

    def __init__(self, group: dist.ProcessGroup, *arguments: Any, **options: Any) -> None:
        world: Any = World(group)
        super().__init__(deep_ep_stand_in.Group(world, group.rank()), *arguments, **options)

    def _start(self, fill: Callable[[], None]) -> Any:
        if Buffer.dies_in_s is not None:
            Path(Buffer.dies_in_s).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._start(fill)
