"""Submission of a run to a Ray cluster as one Ray job; counting, resizing and cancelling of its tasks.

ray/0000.json   one submission: its options, and the name of the Ray job
"""

import sys
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from batchinfer.checked_json import publish_json
from batchinfer.records import ConfigError
from batchinfer.run.store.interface import Storage, put_sent
from batchinfer.rundir import RunDir, launcher_folder
from batchinfer.sanitize import count_text
from batchinfer.submit.ray.shape import Shape
from batchinfer.submit.ray.wanted import read_tasks, read_wanted, write_wanted
from batchinfer.submit.size import LiveTasks
from batchinfer.submit.submission import how_to_follow, never_submitted, refuse_zero_tasks, run_name, sent_records

# Ray runs this command in a shell, so it has no data: that is in environment variables
ENTRY = '"$BATCHINFER_PYTHON" -P -m batchinfer.submit.ray.driver'
LEAVE_S = 120.0  # time for tasks to commit and end after a stop
LOOK_S = 0.5
ENDED = ("STOPPED", "SUCCEEDED", "FAILED")


@dataclass(frozen=True, slots=True)
class Submission:
    """One submission."""

    shape: Shape
    tasks: int
    job: str
    path: Path


def submit(storage: Storage, shape: Shape, tasks: int) -> Submission:
    """Submit a planned run; the caller has fetched the part "sent" of `storage`.

    Raises:
        ConfigError: the run's Ray job is alive; Ray is not installed, or no cluster answers.
    """
    client, run = connect(shape), storage.run
    found = submissions(run)
    if found and _state(client, found[-1].job) not in (None, *ENDED):
        raise ConfigError(
            f"{run.shown} is in Ray already, as job {found[-1].job}; change the number of its tasks with `batchinfer "
            f"submit --resize {run.shown} N`, or end them with `batchinfer cancel {run.shown}`"
        )
    name = f"{run_name(run.shown)}-{len(found)}"
    sent = Submission(shape, tasks, name, launcher_folder(run, "ray") / f"{len(found):04d}.json")
    write_wanted(storage, tasks)
    _record(sent)
    put_sent(storage)  # the driver reads it at once
    _call(client.submit_job, entrypoint=ENTRY, submission_id=name, runtime_env={"env_vars": _variables(run, shape)})
    return sent


def dry_run_text(run: RunDir, shape: Shape, tasks: int) -> str:
    """Return the Ray job that `submit` would send, and the resources that each task would reserve."""
    strategy = "STRICT_SPREAD" if shape.nodes_per_group > 1 else "PACK"
    return "\n".join(
        (
            f"job {run_name(run.shown)}-{len(submissions(run))}: {ENTRY}",
            "  " + " ".join(f"{name}={value}" for name, value in _variables(run, shape).items()),
            f"  {count_text(tasks, 'placement group')}, {strategy}, each of {shape.bundles()}",
        )
    )


def resize(storage: Storage, tasks: int) -> int:
    """Request a number of tasks, which the driver then sets; return the number before.

    Raises:
        ConfigError: the run has no live Ray job; no cluster answers.
    """
    run = storage.run
    refuse_zero_tasks(run, tasks, "ray")
    last = last_submission(run)
    if _state(connect(last.shape), last.job) in (None, *ENDED):
        raise ConfigError(f"{run.shown} is no longer in Ray; submit it with `batchinfer submit {run.shown} --to ray`")
    before = read_wanted(storage)
    write_wanted(storage, tasks)
    _record(Submission(last.shape, tasks, last.job, last.path))
    return before


def cancel(storage: Storage) -> list[str]:
    """Request that all tasks commit and end, and wait for the Ray job's end; return the names of ended jobs."""
    found = submissions(storage.run)
    if not found:
        return []
    client, job = connect(found[-1].shape), found[-1].job
    if _state(client, job) in (None, *ENDED):
        return []
    write_wanted(storage, 0)
    deadline = time.monotonic() + LEAVE_S
    while _state(client, job) not in (None, *ENDED):
        if time.monotonic() > deadline:
            _call(client.stop_job, job)
            break
        time.sleep(LOOK_S)
    return [job]


def live_tasks(run: RunDir) -> LiveTasks | None:
    """Count the run's tasks as the driver reported them; return None if nothing was submitted or Ray is not installed.

    Raises:
        ConfigError: no cluster answers.
    """
    found = submissions(run)
    if not found or find_spec("ray") is None:
        return None
    tasks, problems = read_tasks(run), []
    if tasks.failed:
        problems.append(f"tasks have failed too often: {', '.join(tasks.failed)}; see {_logs(run, found[-1])}")
    if _state(connect(found[-1].shape), found[-1].job) in (None, *ENDED):
        return LiveTasks("Ray", 0, 0, problems)
    return LiveTasks("Ray", len(tasks.running), len(tasks.waiting), problems)


def submissions(run: RunDir) -> list[Submission]:
    """Return all submissions of a run, in order."""
    return [
        Submission(Shape(**record["shape"]), record["tasks"], record["job"], path)
        for path, record in sent_records(run, "ray", "shape", "tasks", "job")
    ]


def submission_text(run: RunDir, sent: Submission) -> str:
    """Return the name of the Ray job and the commands to follow it, for a person."""
    tasks = count_text(sent.tasks, "task")
    return how_to_follow(
        run,
        f"job     {sent.job}: {tasks} of {count_text(sent.shape.nodes_per_group, 'node')}; it finishes the run, too",
        logs=_logs(run, sent),
    )


def connect(shape: Shape) -> Any:
    """Return Ray's client for jobs.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers.
    """
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError:
        raise ConfigError(
            "Ray is not installed here; `pip install 'ray[default]'` into the environment of batchinfer, on all nodes"
        ) from None
    return _call(JobSubmissionClient, shape.address)


def _state(client: Any, job: str) -> str | None:
    """Return the state of a Ray job; None if Ray does not know the job any more."""
    try:
        return str(client.get_job_status(job).value)
    except _errors() as error:
        if "does not exist" in str(error):
            return None
        raise ConfigError(_refusal(error)) from None


def _call(call: Any, *arguments: Any, **named: Any) -> Any:
    try:
        return call(*arguments, **named)
    except _errors() as error:
        raise ConfigError(_refusal(error)) from None


def _errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of Ray's client; its HTTP library raises subclasses of OSError."""
    from ray.exceptions import RayError

    return RayError, OSError, RuntimeError, ValueError


def _refusal(error: Exception) -> str:
    said = " ".join(str(error).split())[:300]
    return f"Ray says: {said}; name the cluster's dashboard with --address http://HEAD:8265"


def last_submission(run: RunDir) -> Submission:
    found = submissions(run)
    if not found:
        raise never_submitted(run, "ray")
    return found[-1]


def _variables(run: RunDir, shape: Shape) -> dict[str, str]:
    """Return environment variables of the driver and its tasks; no credentials, as Ray shows and logs the variables."""
    found = {"BATCHINFER_PYTHON": sys.executable, "BATCHINFER_RAY_RUN": run.shown}
    if run.uri is not None:
        found["RAY_DEDUP_LOGS"] = "0"  # keep equal lines of several tasks in the job's log
    return found if shape.endpoint is None else {**found, "AWS_ENDPOINT_URL_S3": shape.endpoint}


def _logs(run: RunDir, sent: Submission) -> str:
    """Return where the tasks' logs are; tasks of a run in an object store log to Ray only."""
    own = f"ray job logs {sent.job}"
    return own if run.uri is not None else f"{own}; {launcher_folder(run, 'ray')}/*.log"


def _record(sent: Submission) -> None:
    record = {"submitted_s": time.time(), "shape": asdict(sent.shape), "tasks": sent.tasks, "job": sent.job}
    publish_json(sent.path, record)
