"""The driver of a run's Ray job: keeps the wanted number of tasks running until no unit is left, then finishes the run.

A failed task starts again, at most MOST_FAILURES times. A task that was stopped or lost with its node always does.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import ray

from batchinfer import own_process
from batchinfer.progress import note
from batchinfer.records import BatchinferError, ExitCode, StoreError
from batchinfer.run.planned import planned_run
from batchinfer.run.store.interface import Storage
from batchinfer.run.store.open import storage_of
from batchinfer.submit.ray.client import submissions
from batchinfer.submit.ray.group import Group
from batchinfer.submit.ray.wanted import Tasks, read_wanted, write_tasks

LOOK_S = 0.5
MOST_FAILURES = 4  # of one task, which is then not started again


class Driver:
    """The driver of one run's tasks."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self._run = storage, storage.run
        self._sent = submissions(self._run)[-1]
        self._wanted = read_wanted(storage)
        self._groups: list[Group] = []
        self._num_made = 0
        self._failed: list[str] = []
        self._is_done = False  # a task ended because no unit was left
        self._reported: Tasks | None = None

    def run(self) -> int:
        """Run the tasks and finish the run; return the exit code, INTERRUPTED if 0 tasks are wanted."""
        while True:
            self._set_number(self._wanted)
            for group in self._groups:
                group.update()
            self._collect()
            self._tell()
            if not self._groups:
                break
            time.sleep(max(LOOK_S, self._storage.look_s))
            self._ask()
        if not self._wanted:
            return ExitCode.INTERRUPTED
        return self._finish()

    def _ask(self) -> None:
        """Read the wanted number of tasks; keep the last one if the store does not answer."""
        try:
            self._wanted = read_wanted(self._storage)
        except StoreError as error:
            note(f"warning: {error}; the number of tasks stays as it is")

    def _set_number(self, wanted: int) -> None:
        staying = [group for group in self._groups if not group.is_leaving]
        missing = wanted - len(self._failed) - len(staying)
        if not self._is_done:
            for _ in range(missing):
                self._groups.append(Group(self._run, f"{self._sent.job}-{self._num_made}", self._sent.shape))
                self._num_made += 1
        waiting = [group for group in staying if not group.is_placed]
        youngest_first = [group for group in reversed(staying) if group.is_placed]
        for group in (waiting + youngest_first)[: max(0, -missing)]:
            group.leave()

    def _collect(self) -> None:
        for group in [group for group in self._groups if group.has_ended]:
            self._groups.remove(group)
            how = group.how_ended()
            note(f"task {group.name}, life {group.life}: {how}")
            if how.is_done:
                self._is_done = True
            elif group.is_leaving:
                continue
            elif how.is_failure and (how.is_final or group.failures >= MOST_FAILURES):
                self._failed.append(group.name)
            else:
                self._groups.append(group.again(failed=how.is_failure))

    def _tell(self) -> None:
        tasks = Tasks(
            running=[group.name for group in self._groups if group.is_placed],
            waiting=[group.name for group in self._groups if not group.is_placed],
            failed=self._failed,
        )
        if tasks == self._reported:
            return
        try:
            write_tasks(self._storage, tasks)
            self._reported = tasks
        except StoreError as error:
            note(f"warning: {error}; `status` shows an old number of tasks")

    def _finish(self) -> int:
        """Run `batchinfer finish` here: one process that needs no accelerator; return its exit code."""
        command = own_process.command("batchinfer", "finish", self._run.shown)
        return subprocess.run(command, check=False).returncode


def main() -> None:
    """Drive the run of the environment variable BATCHINFER_RAY_RUN: the command itself is run by a shell."""
    try:
        run, job = planned_run(Path(os.environ["BATCHINFER_RAY_RUN"]), ())
        storage = storage_of(job)
        storage.fetch("state", "sent")
        # tasks of a run folder on disk have log files there
        ray.init(log_to_driver=run.uri is not None)
        sys.exit(Driver(storage).run())
    except BatchinferError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
