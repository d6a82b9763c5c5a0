"""The driver of a run's Ray job: keeps the wanted number of tasks at work until no unit is left, then finishes the run.

A task that is lost with its node, or that was stopped, starts again and does not count; one that fails does.
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
from batchinfer.run.open_storage import storage_of
from batchinfer.run.planned import planned_run
from batchinfer.run.storage import Storage
from batchinfer.submit.ray.client import submissions
from batchinfer.submit.ray.group import Group
from batchinfer.submit.ray.wanted import Tasks, read_wanted, write_tasks

LOOK_S = 0.5
MOST_FAILURES = 4  # of one task, beyond which it is left alone


class Driver:
    """The tasks of one run."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self._run = storage, storage.run
        self._sent = submissions(self._run)[-1]
        self._wanted = read_wanted(storage)
        self._groups: list[Group] = []
        self._num_made = 0
        self._failed: list[str] = []
        self._is_done = False  # a task has found no unit left
        self._told: Tasks | None = None

    def run(self) -> int:
        """Until all tasks have ended; returns the exit code of what came of it."""
        while True:
            self._set_number(self._wanted)
            for group in self._groups:
                group.look()
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
        """How many tasks there should be; where the store does not say, as many as before."""
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
        if tasks == self._told:
            return
        try:
            write_tasks(self._storage, tasks)
            self._told = tasks
        except StoreError as error:
            note(f"warning: {error}; `status` does not see how many tasks there are")

    def _finish(self) -> int:
        """Check and write the outputs, here: one process that needs no accelerator."""
        command = own_process.command("batchinfer", "finish", self._run.shown)
        return subprocess.run(command, check=False).returncode


def main() -> None:
    """The run comes by a variable: a Ray job's command goes through a shell."""
    try:
        run, job = planned_run(Path(os.environ["BATCHINFER_RAY_RUN"]), ())
        storage = storage_of(job)
        storage.fetch("state", "sent")
        # of a run folder on a disk tasks have logs in it
        ray.init(log_to_driver=run.uri is not None)
        sys.exit(Driver(storage).run())
    except BatchinferError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
