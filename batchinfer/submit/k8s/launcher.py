"""Kubernetes as a launcher."""

from collections.abc import Container
from typing import Any

from batchinfer.config import JobConfig
from batchinfer.run.store.interface import Storage
from batchinfer.rundir import RunDir
from batchinfer.sanitize import count_text
from batchinfer.submit.k8s import tasks
from batchinfer.submit.k8s.kubectl import Kubectl
from batchinfer.submit.k8s.manifests import as_yaml
from batchinfer.submit.k8s.shape import Shape, check_shape
from batchinfer.submit.size import ArraySize, LiveTasks, parse_size_without_limit


class KubernetesLauncher:
    """Jobs and JobSets, created with kubectl."""

    def parse_size(self, text: str) -> ArraySize:
        return parse_size_without_limit(text)

    def shape(self, run: RunDir, job: JobConfig, options: dict[str, Any]) -> Shape:
        shape = Shape(**options)
        check_shape(job, shape)
        return shape

    def dry_run(self, run: RunDir, job: JobConfig, shape: Shape, size: ArraySize) -> str:
        return as_yaml(tasks.manifests(run, job.output.dir, shape, size.tasks)[1]).removesuffix("\n")

    def check_cluster(self, shape: Shape) -> None:
        Kubectl(shape.context, shape.namespace).check()

    def submit(self, storage: Storage, job: JobConfig, shape: Shape, size: ArraySize) -> str:
        return tasks.submission_text(storage.run, tasks.submit(storage.run, job.output.dir, shape, size.tasks))

    def submit_again(self, storage: Storage, size: ArraySize) -> str:
        last = tasks.last_submission(storage.run)
        return tasks.submission_text(storage.run, tasks.submit(storage.run, last.run, last.shape, size.tasks))

    def resize(self, storage: Storage, size: ArraySize, busy: Container[str]) -> list[str]:
        added, away = tasks.resize(storage.run, size.tasks, busy)
        lines = [f"{count_text(added, 'task')} added"] if added else []
        return lines + ([f"removed, after committing finished requests: {' '.join(away)}"] if away else [])

    def cancel(self, storage: Storage) -> list[str]:
        return tasks.cancel(storage.run)

    def live_tasks(self, run: RunDir) -> LiveTasks | None:
        return tasks.live_tasks(run)
