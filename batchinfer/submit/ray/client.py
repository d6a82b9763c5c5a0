"""Sends a run to a Ray cluster as one Ray job, counts, resizes and ends its tasks.

ray/0000.json   one submission: what was asked for, and the Ray job
"""

import sys
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from batchinfer.checked_json import publish_json
from batchinfer.records import ConfigError
from batchinfer.run.storage import Storage
from batchinfer.rundir import RunDir, launcher_folder
from batchinfer.submit.live import LiveTasks
from batchinfer.submit.names import run_name
from batchinfer.submit.ray.shape import Shape
from batchinfer.submit.ray.wanted import read_tasks, read_wanted, write_wanted
from batchinfer.submit.records import sent_records
from batchinfer.submit.words import how_to_follow, never_sent, refuse_none

# Ray gives this to a shell, so it holds no data: that comes by variables
ENTRY = '"$BATCHINFER_PYTHON" -P -m batchinfer.submit.ray.driver'
LEAVE_S = 120.0  # in which tasks that were told to commit and leave have done so
LOOK_S = 0.5
ENDED = ("STOPPED", "SUCCEEDED", "FAILED")


@dataclass(frozen=True, slots=True)
class Submission:
    """What was sent."""

    shape: Shape
    tasks: int
    job: str
    path: Path


def submit(storage: Storage, shape: Shape, tasks: int) -> Submission:
    """Send a planned run; what was sent for it before has been fetched.

    Raises:
        ConfigError: it is in Ray already; Ray is not installed, or no cluster answers.
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
    _remember(sent)
    storage.keep_sent()  # the driver reads it at once
    _asked(client.submit_job, entrypoint=ENTRY, submission_id=name, runtime_env={"env_vars": _variables(run, shape)})
    return sent


def dry_run_text(run: RunDir, shape: Shape, tasks: int) -> str:
    """The Ray job that `submit` would send, and what each task would reserve."""
    strategy = "STRICT_SPREAD" if shape.nodes_per_group > 1 else "PACK"
    return "\n".join(
        (
            f"job {run_name(run.shown)}-{len(submissions(run))}: {ENTRY}",
            "  " + " ".join(f"{name}={value}" for name, value in _variables(run, shape).items()),
            f"  {tasks} placement groups, {strategy}, each of {shape.bundles()}",
        )
    )


def resize(storage: Storage, tasks: int) -> int:
    """Have this number of tasks from now on; returns the number before. The driver adds some, or has some leave.

    Raises:
        ConfigError: the run is not in Ray; no cluster answers.
    """
    run = storage.run
    refuse_none(run, tasks, "ray")
    last = last_submission(run)
    if _state(connect(last.shape), last.job) in (None, *ENDED):
        raise ConfigError(f"{run.shown} is no longer in Ray; send it with `batchinfer submit {run.shown} --to ray`")
    before = read_wanted(storage)
    write_wanted(storage, tasks)
    _remember(Submission(last.shape, tasks, last.job, last.path))
    return before


def cancel(storage: Storage) -> list[str]:
    """Have all tasks of a run commit and leave, and wait for that; returns the names of what was ended."""
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
            _asked(client.stop_job, job)
            break
        time.sleep(LOOK_S)
    return [job]


def live_tasks(run: RunDir) -> LiveTasks | None:
    """The run's tasks by the driver's account; None where nothing was sent to Ray, or it is not installed.

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
    """All that was ever sent for a run, in order."""
    return [
        Submission(Shape(**record["shape"]), record["tasks"], record["job"], path)
        for path, record in sent_records(run, "ray", "shape", "tasks", "job")
    ]


def submission_text(run: RunDir, sent: Submission) -> str:
    """The job and the commands to follow it, for a person."""
    return how_to_follow(
        run,
        f"job     {sent.job}: {sent.tasks} tasks of {sent.shape.nodes_per_group} nodes; it finishes the run, too",
        logs=_logs(run, sent),
    )


def connect(shape: Shape) -> Any:
    """Ray's client for jobs.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers.
    """
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError:
        raise ConfigError(
            "Ray is not installed here; `pip install 'ray[default]'` into the environment of batchinfer, on all nodes"
        ) from None
    return _asked(JobSubmissionClient, shape.address)


def _state(client: Any, job: str) -> str | None:
    """What Ray says of a job; None: it has forgotten it."""
    try:
        return str(client.get_job_status(job).value)
    except _errors() as error:
        if "does not exist" in str(error):
            return None
        raise ConfigError(_refusal(error)) from None


def _asked(call: Any, *arguments: Any, **named: Any) -> Any:
    try:
        return call(*arguments, **named)
    except _errors() as error:
        raise ConfigError(_refusal(error)) from None


def _errors() -> tuple[type[Exception], ...]:
    """What Ray's client raises; the library that it sends with has kinds of OSError."""
    from ray.exceptions import RayError

    return RayError, OSError, RuntimeError, ValueError


def _refusal(error: Exception) -> str:
    said = " ".join(str(error).split())[:300]
    return f"Ray says: {said}; name the cluster's dashboard with --address http://HEAD:8265"


def last_submission(run: RunDir) -> Submission:
    found = submissions(run)
    if not found:
        raise never_sent(run, "ray")
    return found[-1]


def _variables(run: RunDir, shape: Shape) -> dict[str, str]:
    """Of the driver and its tasks. No credentials: Ray shows these to whoever asks, and writes them into its logs."""
    found = {"BATCHINFER_PYTHON": sys.executable, "BATCHINFER_RAY_RUN": run.shown}
    if run.uri is not None:
        found["RAY_DEDUP_LOGS"] = "0"  # the job's log has all that tasks say, also what they say alike
    return found if shape.endpoint is None else {**found, "AWS_ENDPOINT_URL_S3": shape.endpoint}


def _logs(run: RunDir, sent: Submission) -> str:
    """Where a person finds what tasks have said; those of a run folder in an object store say it to Ray."""
    own = f"ray job logs {sent.job}"
    return own if run.uri is not None else f"{own}; {launcher_folder(run, 'ray')}/*.log"


def _remember(sent: Submission) -> None:
    record = {"submitted_s": time.time(), "shape": asdict(sent.shape), "tasks": sent.tasks, "job": sent.job}
    publish_json(sent.path, record)
