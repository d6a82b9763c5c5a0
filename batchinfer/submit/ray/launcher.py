"""Ray as a launcher."""

from collections.abc import Container
from dataclasses import replace
from typing import Any

from batchinfer.config import JobConfig
from batchinfer.data.stores import s3_endpoint
from batchinfer.run.store.interface import Storage
from batchinfer.rundir import RunDir
from batchinfer.sanitize import count_text
from batchinfer.submit.ray import client
from batchinfer.submit.ray.shape import Shape, check_shape
from batchinfer.submit.size import ArraySize, LiveTasks, parse_size_without_limit


class RayLauncher:
    """One Ray job per run, whose driver starts the tasks."""

    def parse_size(self, text: str) -> ArraySize:
        return parse_size_without_limit(text)

    def shape(self, run: RunDir, job: JobConfig, options: dict[str, Any]) -> Shape:
        shape = Shape(**options)
        check_shape(job, shape)
        # nodes have only the run's URI, and find their job file behind it
        return shape if run.uri is None else replace(shape, endpoint=s3_endpoint(job.s3))

    def dry_run(self, run: RunDir, job: JobConfig, shape: Shape, size: ArraySize) -> str:
        return client.dry_run_text(run, shape, size.tasks)

    def check_cluster(self, shape: Shape) -> None:
        client.connect(shape)

    def submit(self, storage: Storage, job: JobConfig, shape: Shape, size: ArraySize) -> str:
        return client.submission_text(storage.run, client.submit(storage, shape, size.tasks))

    def submit_again(self, storage: Storage, size: ArraySize) -> str:
        last = client.last_submission(storage.run)
        return client.submission_text(storage.run, client.submit(storage, last.shape, size.tasks))

    def resize(self, storage: Storage, size: ArraySize, busy: Container[str]) -> list[str]:
        added = size.tasks - client.resize(storage, size.tasks)  # the driver knows which tasks are busy
        if not added:
            return []
        tasks, is_one = count_text(abs(added), "task"), abs(added) == 1
        if added > 0:
            return [f"{tasks} {'is' if is_one else 'are'} added"]
        return [f"{tasks} {'commits and leaves' if is_one else 'commit and leave'}"]

    def cancel(self, storage: Storage) -> list[str]:
        return client.cancel(storage)

    def live_tasks(self, run: RunDir) -> LiveTasks | None:
        return client.live_tasks(run)
