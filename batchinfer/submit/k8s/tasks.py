"""Submission, counting, resizing and cancelling of a run's tasks on Kubernetes.

    k8s/0000.json   one submission: its options, the names of its Jobs or JobSets, and of the Job that finishes the run

The names are recorded before anything is created, so that no object is lost.
"""

import shutil
import time
from collections import Counter
from collections.abc import Container
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from batchinfer.checked_json import publish_json
from batchinfer.records import ConfigError
from batchinfer.rundir import RunDir, launcher_folder
from batchinfer.sanitize import count_text
from batchinfer.submit.k8s.kubectl import Kubectl
from batchinfer.submit.k8s.manifests import (
    PART_LABEL,
    RUN_LABEL,
    Manifest,
    as_yaml,
    finish_job,
    task_group,
    task_job,
)
from batchinfer.submit.k8s.shape import Shape
from batchinfer.submit.size import LiveTasks
from batchinfer.submit.submission import how_to_follow, never_submitted, refuse_zero_tasks, run_name, sent_records

JOBS, GROUPS = "jobs.batch", "jobsets.jobset.x-k8s.io"
MOST_TASKS = 100_000  # limit of an Indexed Job with retries per index
ENDED = ("Complete", "Completed", "Failed")  # conditions of Jobs and JobSets
USUAL_REASONS = {"", "ContainerCreating", "PodInitializing", "SchedulingGated"}


@dataclass(frozen=True, slots=True)
class Submission:
    """One submission.

    Attributes:
        run: the run's folder or URI in the pods.
    """

    run: str
    shape: Shape
    tasks: int
    jobs: list[str] = field(default_factory=list)  # one Indexed Job, or a JobSet per task
    finish: str | None = None
    path: Path | None = None  # record of the submission

    @property
    def kind(self) -> str:
        return JOBS if self.shape.nodes_per_group == 1 else GROUPS


def manifests(
    run: RunDir, where: str, shape: Shape, tasks: int, *, finish: bool = True
) -> tuple[Submission, list[Manifest]]:
    """Return the record and the manifests of a submission; nothing is submitted or written.

    Args:
        where: the run's folder or URI in the pods.

    Raises:
        ConfigError: there are too many tasks, or a template is invalid.
    """
    if tasks > MOST_TASKS:
        raise ConfigError(f"{tasks:,} tasks are more than the {MOST_TASKS:,} that a Job may have; ask for fewer")
    label, serial = run_name(where), len(submissions(run))
    name = f"{label}-{serial}"
    if shape.nodes_per_group == 1:
        jobs, found = [name], [task_job(where, name, label, shape, tasks)]
    else:
        jobs = [f"{name}-{task}" for task in range(tasks)]
        found = [task_group(where, job, label, shape) for job in jobs]
    sent = Submission(
        where,
        shape,
        tasks,
        jobs,
        f"{name}-finish" if finish else None,
        launcher_folder(run, "k8s") / f"{serial:04d}.json",
    )
    if sent.finish is not None:
        found.append(finish_job(where, sent.finish, label, shape))
    return sent, found


def submit(run: RunDir, where: str, shape: Shape, tasks: int) -> Submission:
    """Submit the tasks of a planned run, and the Job that finishes it. Arguments are those of `manifests`.

    Raises:
        ConfigError: tasks of this run are pending or running already; the cluster refuses or cannot be reached.
    """
    kubectl = Kubectl(shape.context, shape.namespace)
    if submissions(run) and (names := _live_jobs(run, kubectl, "tasks")):
        raise ConfigError(
            f"tasks of {run.shown} are pending or running already ({names[0]}); change their number with "
            f"`batchinfer submit --resize {run.shown} N`, or end them with `batchinfer cancel {run.shown}`"
        )
    # a finishing Job that still waits for all units serves the new tasks as well
    sent, objects = manifests(
        run, where, shape, tasks, finish=not (submissions(run) and _live_jobs(run, kubectl, "finish"))
    )
    _record(sent)
    kubectl.create(as_yaml(objects))
    return sent


def resize(run: RunDir, tasks: int, busy: Container[str] = ()) -> tuple[int, list[str]]:
    """Change the number of pending and running tasks.

    An Indexed Job becomes longer or shorter by its last pods. Groups without a unit are removed first, then the
    youngest. A removed task gets SIGTERM, commits finished requests and releases its units.

    Args:
        busy: names of tasks that hold units.

    Returns:
        The number of added tasks, and the names of removed tasks.

    Raises:
        ConfigError: the run has no live tasks; the cluster refuses or cannot be reached.
    """
    refuse_zero_tasks(run, tasks, "k8s")
    last = last_submission(run)
    kubectl = Kubectl(last.shape.context, last.shape.namespace)
    live = _live_jobs(run, kubectl, "tasks")
    if not live:
        raise ConfigError(
            f"no tasks of {run.shown} are pending or running; submit some with `batchinfer submit {run.shown} --to k8s`"
        )
    if last.kind == GROUPS:
        return _resize_groups(kubectl, last, live, tasks, busy)
    (job,) = live
    before = _tasks_of(kubectl, run, job)
    # Kubernetes accepts a change of both together only
    kubectl.patch(JOBS, job, {"spec": {"completions": tasks, "parallelism": tasks}})
    _record(replace(last, tasks=tasks))
    return max(0, tasks - before), [f"{job}-{index}" for index in range(tasks, before)]


def cancel(run: RunDir) -> list[str]:
    """Delete all live Jobs and JobSets of a run, the finishing Job too; return the names of deleted objects."""
    found = submissions(run)
    if not found:
        return []
    kubectl = Kubectl(found[-1].shape.context, found[-1].shape.namespace)
    ended = []
    # the finishing Job first: it must not start when the tasks end
    for part, kind in (("finish", JOBS), ("tasks", JOBS), ("tasks", GROUPS)):
        if kind == JOBS or any(sent.kind == GROUPS for sent in found):
            names = [job["metadata"]["name"] for job in _jobs(run, kubectl, part, kind) if not _has_ended(job)]
            kubectl.delete(kind, names)
            ended += names
    return ended


def live_tasks(run: RunDir) -> LiveTasks | None:
    """Count the run's tasks in the cluster, with problems; return None if nothing was submitted or kubectl is missing.

    Raises:
        ConfigError: the cluster refuses or cannot be reached.
    """
    found = submissions(run)
    if not found or shutil.which("kubectl") is None:
        return None
    kubectl = Kubectl(found[-1].shape.context, found[-1].shape.namespace)
    pods = [pod for pod in kubectl.items("pods", _selector(run, "tasks")) if "deletionTimestamp" not in pod["metadata"]]
    phases = Counter(pod["status"].get("phase") for pod in pods)
    waiting = Counter(reason for pod in pods if (reason := _why_waiting(pod)) not in USUAL_REASONS)
    problems = [f"{count} pods wait: {reason}" for reason, count in waiting.items()]
    for part in ("tasks", "finish"):
        problems += [problem for job in _jobs(run, kubectl, part, JOBS) if (problem := _why_failed(job)) is not None]
    nodes = found[-1].shape.nodes_per_group
    return LiveTasks("Kubernetes", phases["Running"] // nodes, -(-phases["Pending"] // nodes), problems)


def submissions(run: RunDir) -> list[Submission]:
    """Return all submissions of a run, in order."""
    found = []
    for path, record in sent_records(run, "k8s", "run", "shape", "tasks", "jobs", "finish"):
        shape = Shape(**{**record["shape"], "volumes": tuple(record["shape"]["volumes"])})
        found.append(Submission(record["run"], shape, record["tasks"], record["jobs"], record["finish"], path))
    return found


def submission_text(run: RunDir, sent: Submission) -> str:
    """Return the names of the Jobs and the commands to follow them, for a person."""
    kind, where = ("job", sent.jobs[0]) if sent.kind == JOBS else ("jobset", f"{sent.jobs[0]} and so on")
    space = "" if sent.shape.namespace is None else f" -n {sent.shape.namespace}"
    selector = f"{RUN_LABEL}={run_name(sent.run)}"
    return how_to_follow(
        run,
        f"{kind:<7} {where}: {count_text(sent.tasks, 'task')} of {count_text(sent.shape.nodes_per_group, 'node')}",
        f"finish  {sent.finish or 'the one that is there'}: waits until all units are done",
        logs=f"kubectl logs{space} --selector={selector} --prefix --tail=-1",
    )


def _resize_groups(
    kubectl: Kubectl, last: Submission, live: list[str], tasks: int, busy: Container[str]
) -> tuple[int, list[str]]:
    missing = tasks - len(live)
    if missing > 0:
        first, stem = len(last.jobs), last.jobs[0].rpartition("-")[0]
        added = [f"{stem}-{number}" for number in range(first, first + missing)]
        _record(replace(last, tasks=tasks, jobs=[*last.jobs, *added]))
        kubectl.create(as_yaml([task_group(last.run, name, run_name(last.run), last.shape) for name in added]))
        return missing, []
    by_need = sorted(live, key=lambda name: (name in busy, -int(name.rpartition("-")[2])))
    away = by_need[: len(live) - tasks]
    kubectl.delete(GROUPS, away)
    _record(replace(last, tasks=tasks))
    return 0, away


def last_submission(run: RunDir) -> Submission:
    found = submissions(run)
    if not found:
        raise never_submitted(run, "k8s")
    return found[-1]


def _record(sent: Submission) -> None:
    assert sent.path is not None
    record: dict[str, Any] = {
        "submitted_s": time.time(),
        "run": sent.run,
        "shape": asdict(sent.shape),
        "tasks": sent.tasks,
    }
    publish_json(sent.path, {**record, "jobs": sent.jobs, "finish": sent.finish})


def _live_jobs(run: RunDir, kubectl: Kubectl, part: str) -> list[str]:
    """Return the names of a run's unfinished Jobs or JobSets for `part`: 'tasks' or 'finish'."""
    found = submissions(run)
    kinds = [JOBS]
    if part == "tasks" and any(sent.kind == GROUPS for sent in found):
        kinds.append(GROUPS)
    jobs = [job for kind in kinds for job in _jobs(run, kubectl, part, kind)]
    return [job["metadata"]["name"] for job in jobs if not _has_ended(job)]


def _jobs(run: RunDir, kubectl: Kubectl, part: str, kind: str) -> list[dict[str, Any]]:
    """Return the run's objects that batchinfer created, without the Jobs that a JobSet created."""
    return [job for job in kubectl.items(kind, _selector(run, part)) if not job["metadata"].get("ownerReferences")]


def _tasks_of(kubectl: Kubectl, run: RunDir, name: str) -> int:
    jobs = {job["metadata"]["name"]: job for job in _jobs(run, kubectl, "tasks", JOBS)}
    return int(jobs[name]["spec"]["completions"])


def _selector(run: RunDir, part: str) -> str:
    return f"{RUN_LABEL}={run_name(last_submission(run).run)},{PART_LABEL}={part}"


def _has_ended(job: dict[str, Any]) -> bool:
    conditions = job.get("status", {}).get("conditions", [])
    is_over = any(found["type"] in ENDED and found["status"] == "True" for found in conditions)
    return is_over or "deletionTimestamp" in job["metadata"]


def _why_waiting(pod: dict[str, Any]) -> str:
    """Return the cluster's reason why a pod is pending; "" if the pod is not pending, or the reason is not known."""
    status = pod["status"]
    if status.get("phase") != "Pending":
        return ""
    for container in status.get("containerStatuses", []):
        if waiting := container.get("state", {}).get("waiting"):
            return str(waiting.get("reason", ""))
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            reason = condition.get("reason", "")
            return reason if reason in USUAL_REASONS else f"{reason}: {condition.get('message', '')}"
    return ""


def _why_failed(job: dict[str, Any]) -> str | None:
    """Return a sentence on a failed Job or on tasks that failed too often; None if there are none."""
    name, status = job["metadata"]["name"], job.get("status", {})
    if failed := status.get("failedIndexes"):
        return f"tasks {failed} of job {name} have failed too often; `kubectl logs` says why"
    for condition in status.get("conditions", []):
        if condition["type"] == "Failed" and condition["status"] == "True":
            return f"job {name} has failed: {condition.get('message', condition.get('reason', ''))}"
    return None
