"""One task on Ray: a placement group with the task's nodes, and an actor on each node that runs `batchinfer work`."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from batchinfer import own_process
from batchinfer.records import ExitCode
from batchinfer.rundir import RunDir, launcher_folder
from batchinfer.submit.ray.client import LEAVE_S
from batchinfer.submit.ray.shape import Shape

LOST_S = 30.0  # timeout for Ray to report that an actor died


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """The end of a task: exit codes of its nodes, None for a lost node."""

    codes: tuple[int | None, ...]

    def __str__(self) -> str:
        return "ended with " + ", ".join("a lost node" if code is None else f"code {code}" for code in self.codes)

    @property
    def is_done(self) -> bool:
        return set(self.codes) == {ExitCode.OK}

    @property
    def is_failure(self) -> bool:
        """Whether the task itself failed: no lost node, and no stop from outside."""
        return not set(self.codes) <= {ExitCode.OK, ExitCode.INTERRUPTED, None}

    @property
    def is_final(self) -> bool:
        """Whether a retry is useless because the job is invalid."""
        return ExitCode.BAD_JOB in self.codes


class Node:
    """The actor on one node: runs `work`. Ray calls `stop` in another thread while `run` waits."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def run(self, folder: str, variables: dict[str, str], log: str | None) -> int:
        """Run `batchinfer work` until no unit is left; return the exit code.

        Args:
            log: file for its output; None: Ray's own logs.
        """
        # Ray sets this variable for its own processes; ranks choose their number of threads themselves
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | variables
        command = own_process.command("batchinfer.submit.ray.child", str(os.getpid()), "work", folder)
        with nullcontext() if log is None else open(log, "ab") as file:
            self._process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
            if self._is_stopped:
                self._process.terminate()
            return self._process.wait()

    def stop(self) -> None:
        """Send SIGTERM to `work`, which commits finished requests and ends."""
        self._is_stopped = True
        if self._process is not None:
            self._process.terminate()


class Group:
    """One life of a task, from the request for resources to the end of all its nodes."""

    def __init__(self, run: RunDir, name: str, shape: Shape, life: int = 0, failures: int = 0) -> None:
        self.name, self.life, self.failures = name, life, failures
        self._run, self._shape = run, shape
        strategy = "STRICT_SPREAD" if shape.nodes_per_group > 1 else "PACK"
        self._place = placement_group(shape.bundles(), strategy=strategy)
        self._nodes: list[Any] = []
        self._results: list[Any] = []
        self._leave_by: float | None = None
        self.is_leaving = False  # the task will not start again
        self.has_ended = False

    @property
    def is_placed(self) -> bool:
        return bool(self._nodes)

    def update(self) -> None:
        """Start the nodes when resources are reserved, and close the group when all nodes have ended.

        When one node fails, the others are stopped.
        """
        if self.has_ended:
            return
        if not self._nodes:
            if self._place.wait(0):
                self._start()
            return
        ended, left = ray.wait(self._results, num_returns=len(self._results), timeout=0)
        if ended and left and self._leave_by is None and not all(self._code(result) == 0 for result in ended):
            self._stop_nodes()
        if self._leave_by is not None and time.monotonic() > self._leave_by:
            for node in self._nodes:
                ray.kill(node)
            left = []
        if not left:
            self._close()

    def leave(self) -> None:
        """Stop the task for good; its nodes commit finished requests first."""
        self.is_leaving = True
        if self._nodes:
            self._stop_nodes()
        else:
            self._close()

    def how_ended(self) -> TaskEnd:
        """Return the exit codes of a task that has ended."""
        return TaskEnd(tuple(map(self._code, self._results)) or (int(ExitCode.INTERRUPTED),))

    def again(self, *, failed: bool) -> Group:
        """Return the next life of this task."""
        return Group(self._run, self.name, self._shape, self.life + 1, self.failures + failed)

    def _start(self) -> None:
        actor: Any = ray.remote(Node)
        for index, bundle in enumerate(self._shape.bundles()):
            where = PlacementGroupSchedulingStrategy(self._place, placement_group_bundle_index=index)
            node = actor.options(
                num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), max_concurrency=2, scheduling_strategy=where
            ).remote()
            self._nodes.append(node)
            self._results.append(node.run.remote(self._run.shown, self._variables(index), self._log(index)))

    def _log(self, index: int) -> str | None:
        """Return the log file in the run folder; None if that is in an object store."""
        if self._run.uri is not None:
            return None
        name = self.name if self._shape.nodes_per_group == 1 else f"{self.name}-{index}"
        return str(launcher_folder(self._run, "ray") / f"{name}.log")

    def _variables(self, index: int) -> dict[str, str]:
        values = {"LAUNCHER": "Ray", "TASK": self.name, "RESTARTS": str(self.life)}
        if self._shape.nodes_per_group > 1:
            values |= {"GROUP": f"{self.name}-{self.life}", "GROUP_INDEX": str(index)}
            values["GROUP_SIZE"] = str(self._shape.nodes_per_group)
        return {f"BATCHINFER_{name}": value for name, value in values.items()}

    def _stop_nodes(self) -> None:
        self._leave_by = time.monotonic() + LEAVE_S
        for node in self._nodes:
            node.stop.remote()

    def _close(self) -> None:
        self.has_ended = True
        remove_placement_group(self._place)

    def _code(self, result: Any) -> int | None:
        """Return a node's exit code, None if the node was lost."""
        try:
            return int(ray.get(result, timeout=LOST_S))
        except RayActorError:
            return None
        except RayError:  # the actor's own code failed
            return int(ExitCode.INTERNAL)
