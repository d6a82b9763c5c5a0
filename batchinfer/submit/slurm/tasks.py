"""A run as Slurm jobs: one array of tasks that share the units, and a dependent job that finishes the run.

    slurm/0000.json            one submission: its options, the arrays, the finishing job
    slurm/%A_%a.log            output of each task; requeued tasks append to the same file
    slurm/finish-%j.log
    slurm/drain/<array>_<task> the task was removed by a resize: it does not go back into the queue

For a run in an object store, logs are written to the folder where `submit` was called.

All tasks are equal. Each claims units by lease until none is left, so that tasks may be added and removed at any time.
"""

import time
from collections.abc import Callable, Container
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from batchinfer import own_process
from batchinfer.checked_json import publish_json
from batchinfer.config import JobConfig
from batchinfer.progress import note
from batchinfer.records import ConfigError
from batchinfer.run.store.interface import Storage, put_sent
from batchinfer.run.store.lock import turn_to_send
from batchinfer.rundir import RunDir
from batchinfer.sanitize import count_text
from batchinfer.submit.size import MOST_TASKS, ArraySize
from batchinfer.submit.slurm import client
from batchinfer.submit.slurm.client import Task
from batchinfer.submit.slurm.environment import surprising_variables
from batchinfer.submit.slurm.follower import check_follower, dismiss
from batchinfer.submit.submission import check_group, find_template, how_to_follow, never_submitted, sent_records
from batchinfer.whole_files import publish_text

STOP_S = 120  # a task stops this long before its time limit, by --signal of jobs/array.sbatch
EARLY_S = 60  # Slurm may send a signal so much earlier
_WHERE = ("partition", "account", "qos")
Sender = Callable[[list[str]], str]  # an sbatch command -> the job's number


@dataclass(frozen=True, slots=True)
class Shape:
    """The options of each task of an array, by the names of Slurm's options; None for the cluster's default."""

    nodes_per_group: int = 1
    gpus_per_node: int | None = None
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    qos: str | None = None
    sbatch_args: tuple[str, ...] = ()
    template: str | None = None  # the user's own files instead of batchinfer's
    finish_template: str | None = None


@dataclass(slots=True)
class Submission:
    """One submission."""

    shape: Shape
    size: ArraySize
    arrays: list[str] = field(default_factory=list)  # job numbers
    finish: str | None = None  # job number
    path: Path | None = None  # record of the submission


def check_shape(job: JobConfig, shape: Shape) -> None:
    """Check the options before anything is planned or submitted.

    Raises:
        ConfigError: a name, time, option or template is invalid, or the ranks do not spread over the nodes or cannot
            exchange rows between nodes.
    """
    for option in _WHERE:
        value = getattr(shape, option)
        if value is not None:
            client.check_name(f"--{option}", value)
    if shape.time is not None:
        client.check_time(shape.time)
        has_own_signal = shape.template is not None or any(word.startswith("--signal") for word in shape.sbatch_args)
        if not has_own_signal and 0 < client.limit_seconds(shape.time) <= STOP_S + EARLY_S:
            raise ConfigError(
                f"--time is {shape.time!r}, and a task stops {STOP_S} s before that to commit finished requests, "
                f"which Slurm may call for {EARLY_S} s early: it could restart forever; give a longer one "
                "(minutes, HH:MM:SS or DAYS-HH:MM:SS)"
            )
    for argument in shape.sbatch_args:
        client.check_extra_argument(argument)
    for name, own in (("array.sbatch", shape.template), ("finish.sbatch", shape.finish_template)):
        find_template(name, own)
    check_group(job.cluster, shape.nodes_per_group, shape.gpus_per_node)


def submit(run: RunDir, shape: Shape, size: ArraySize) -> Submission:
    """Submit the tasks of a planned run, and the dependent job that finishes it.

    Raises:
        ConfigError: tasks of this run are pending or running already; Slurm refuses or is not installed.
    """
    with turn_to_send(run):
        live = live_tasks(run)
        if live:
            raise ConfigError(
                f"{count_text(len(live), 'task')} of {run.shown} {'is' if len(live) == 1 else 'are'} pending or "
                f"running already ({live[0].name}{' and so on' if len(live) > 1 else ''}); change "
                f"their number with `batchinfer submit --resize {run.shown} N`, or end them with `batchinfer cancel "
                f"{run.shown}`"
            )
        if left_out := surprising_variables():
            note(
                f"warning: neither sbatch nor the tasks get {', '.join(left_out)} of this shell; give sbatch's options "
                "with --sbatch-arg, and another cluster with SLURM_CLUSTERS"
            )
        return _send_all(run, shape, size, client.send, others=[], max_array_size=client.max_array_size())


def dry_run_commands(run: RunDir, shape: Shape, size: ArraySize) -> list[list[str]]:
    """Return the sbatch commands that `submit` would run, with ARRAY1 and so on in place of job numbers.

    Slurm is only asked for its MaxArraySize, if it is installed.
    """
    commands: list[list[str]] = []

    def note_down(command: list[str]) -> str:
        commands.append(command)
        return f"ARRAY{len(commands)}"

    limit = client.max_array_size() if client.is_installed() else MOST_TASKS
    _send_all(run, shape, size, note_down, others=[], max_array_size=limit, keep=False)
    return commands


def record_shape(run: RunDir, shape: Shape) -> None:
    """Record the shape of tasks that `resize` will submit."""
    earlier = submissions(run)
    if not earlier or earlier[-1].shape != shape:
        _record(run, Submission(shape, ArraySize(0)))


def resize(
    run: RunDir, size: ArraySize, busy: Container[str] = (), follower: str | None = None
) -> tuple[Submission | None, list[Task]]:
    """Change the number of pending and running tasks by a submission or by removing tasks.

    Pending tasks are removed first, then tasks without a unit, then the youngest. A running task gets a signal, commits
    finished requests and releases its units. With 0 tasks the finishing job is cancelled, too; the next submission
    brings another one.

    Args:
        busy: names of tasks that hold units.
        follower: name of the follower that calls; None for a user's command.

    Returns:
        The submission, if any, and the removed tasks.

    Raises:
        ConfigError: the run was never submitted; Slurm refuses or is not installed.
        InterruptedRunError: the follower was dismissed.
    """
    if not submissions(run):
        raise never_submitted(run, "slurm")
    with turn_to_send(run):
        if follower is not None:
            check_follower(run, follower)
        return _resize(run, size, busy)


def tasks_to_remove(live: list[Task], count: int, busy: Container[str]) -> list[Task]:
    """Choose `count` tasks to remove: pending ones first, then tasks that are not busy, then the youngest."""
    by_need = sorted(
        live, key=lambda task: (not task.is_pending, task.name in busy, -int(task.job), -int(task.index or 0))
    )
    return by_need[:count]


def cancel(storage: Storage) -> list[str]:
    """End all pending and running tasks of a run and the finishing job; return the names of ended jobs and tasks.

    The run's follower is dismissed and ends at its next check.
    """
    run = storage.run
    # first of all: a follower on another node would replace the ended tasks
    dismiss(run)
    put_sent(storage)
    storage.fetch("sent")
    with turn_to_send(run):
        live = live_tasks(run)
        finishing = _finish_jobs(run)
        # the finishing job first: it must not start when the tasks end
        client.cancel([task.name for task in finishing])
        client.cancel([task.name for task in live if task.is_pending])
        client.cancel([task.name for task in live if not task.is_pending])
        return [task.name for task in finishing + live]


def live_tasks(run: RunDir) -> list[Task]:
    """Return the run's pending and running tasks, as Slurm reports them."""
    return client.live_tasks(job for sent in submissions(run) for job in sent.arrays)


def num_tasks(run: RunDir) -> int:
    """Return the number of pending and running tasks that are not being removed."""
    return len(_without_leaving(run, live_tasks(run)))


def is_in_slurm(run: RunDir) -> bool:
    """Return whether any task or finishing job of the run is pending or running."""
    return bool(live_tasks(run) or _finish_jobs(run))


def submissions(run: RunDir) -> list[Submission]:
    """Return all submissions of a run, in order."""
    found = []
    for path, record in sent_records(run, "slurm", "shape", "size", "arrays", "finish"):
        shape = Shape(**{**record["shape"], "sbatch_args": tuple(record["shape"]["sbatch_args"])})
        found.append(Submission(shape, ArraySize(**record["size"]), record["arrays"], record["finish"], path))
    return found


def submission_text(run: RunDir, sent: Submission) -> str:
    """Return the job numbers and the commands to follow them, for a person."""
    arrays = ", ".join(sent.arrays)
    plural, logs = "s" if len(sent.arrays) > 1 else "", log_folder(run)
    tasks = count_text(sent.size.tasks, "task")
    return how_to_follow(
        run,
        f"array{plural} {arrays}: {tasks} of {count_text(sent.shape.nodes_per_group, 'node')}",
        f"finish {sent.finish}: starts when they have ended",
        logs=f"{logs}/{sent.arrays[0]}_0.log and so on; {logs}/finish-{sent.finish}.log",
    )


def _resize(run: RunDir, size: ArraySize, busy: Container[str]) -> tuple[Submission | None, list[Task]]:
    all_live = live_tasks(run)
    live = _without_leaving(run, all_live)
    finishing = _finish_jobs(run)
    sent, drained = None, []
    if not size.tasks and all_live:
        # the run pauses: the finishing job would start when the last tasks have left, and fail
        client.cancel([task.name for task in finishing if task.is_pending])
    if size.tasks > len(live):
        shape, more = submissions(run)[-1].shape, ArraySize(size.tasks - len(live), size.at_once)
        sent = _send_all(run, shape, more, client.send, others=_jobs(all_live), max_array_size=client.max_array_size())
        client.cancel([task.name for task in finishing if task.is_pending])  # the new finishing job waits for all tasks
    elif size.tasks < len(live):
        drained = tasks_to_remove(live, len(live) - size.tasks, busy)
        _drain(run, drained)
    _throttle(run, size.at_once)
    return sent, drained


def _send_all(
    run: RunDir,
    shape: Shape,
    size: ArraySize,
    sender: Sender,
    *,
    others: list[str],
    max_array_size: int,
    keep: bool = True,
) -> Submission:
    """Submit arrays and the finishing job, all or none; the record is updated after each, so that no job is lost.

    Args:
        others: earlier arrays for which the finishing job has to wait as well.
    """
    sent = Submission(shape, size)
    if keep:
        _record(run, sent)
    try:
        for tasks in client.slices(size.tasks, max_array_size):
            # a limit is per array: with a limit, the arrays run one after the other
            behind = sent.arrays[-1:] if size.at_once is not None else []
            sent.arrays.append(sender(_array_command(run, shape, ArraySize(tasks, size.at_once), behind)))
            if keep:
                _record(run, sent)
        sent.finish = sender(_finish_command(run, shape, others + sent.arrays))
    except ConfigError as error:
        if not sent.arrays:
            raise
        try:
            client.cancel(sent.arrays)
            what = "is cancelled"
        except ConfigError:
            what = f"is pending or running, end it with `batchinfer cancel {run.shown}`"
        raise type(error)(f"{error}; what was submitted before that {what}: {' '.join(sent.arrays)}") from None
    if keep:
        _record(run, sent)
    return sent


def _array_command(run: RunDir, shape: Shape, size: ArraySize, behind: list[str]) -> list[str]:
    limit = "" if size.at_once is None else f"%{size.at_once}"
    options = [
        f"--array=0-{size.tasks - 1}{limit}",
        f"--nodes={shape.nodes_per_group}",
        f"--output={client.log_pattern(log_folder(run), '%A_%a.log')}",
        *([f"--dependency=afterany:{behind[0]}"] if behind else []),
        *_given(shape, "gpus_per_node", "time", *_WHERE),
        *shape.sbatch_args,
    ]
    return _sbatch(run, options, "array.sbatch", shape.template)


def _finish_command(run: RunDir, shape: Shape, arrays: list[str]) -> list[str]:
    options = [
        f"--dependency=afterany:{':'.join(arrays)}",
        f"--output={client.log_pattern(log_folder(run), 'finish-%j.log')}",
        *_given(shape, *_WHERE),
    ]
    return _sbatch(run, options, "finish.sbatch", shape.finish_template)


def _given(shape: Shape, *names: str) -> list[str]:
    """Return the options of these names that are set."""
    values = {name: getattr(shape, name) for name in names}
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]


def _sbatch(run: RunDir, options: list[str], template: str, own: str | None) -> list[str]:
    path = find_template(template, own)
    folder = run.root if run.uri is None else Path.cwd()
    command = own_process.command("batchinfer")
    return ["sbatch", "--parsable", f"--chdir={folder}", *options, str(path), run.shown, *command]


def log_folder(run: RunDir) -> Path:
    """Return the folder for the logs of tasks that are submitted from here."""
    return run.slurm if run.uri is None else Path.cwd()


def _record(run: RunDir, sent: Submission) -> None:
    if sent.path is None:
        sent.path = run.slurm / f"{len(submissions(run)):04d}.json"
    record: dict[str, Any] = {"submitted_s": time.time(), "shape": asdict(sent.shape), "size": asdict(sent.size)}
    publish_json(sent.path, {**record, "arrays": sent.arrays, "finish": sent.finish})


def _finish_jobs(run: RunDir) -> list[Task]:
    """Return the run's pending and running finishing jobs."""
    return client.live_tasks(sent.finish for sent in submissions(run) if sent.finish is not None)


def _throttle(run: RunDir, at_once: int | None) -> None:
    """Limit how many tasks run at once. Limits are per array, so each array gets a share of at least 1."""
    live = live_tasks(run)
    jobs, waiting = _jobs(live), _jobs([task for task in live if task.is_pending])
    for place, job in enumerate(jobs):
        share = 0 if at_once is None else max(1, at_once // len(jobs) + (place < at_once % len(jobs)))
        if job in waiting:  # arrays without pending tasks need no limit
            client.throttle(job, share)


def _without_leaving(run: RunDir, tasks: list[Task]) -> list[Task]:
    return [task for task in tasks if not task.is_ending and not _drain_mark(run, task).exists()]


def _drain(run: RunDir, tasks: list[Task]) -> None:
    client.cancel([task.name for task in tasks if task.is_pending])
    running = [task for task in tasks if not task.is_pending]
    for task in running:
        publish_text(_drain_mark(run, task), "removed by a resize\n")
    if run.uri is not None:  # the batch script cannot read the drain mark
        client.forbid_requeue([task.name for task in running])
    client.terminate([task.name for task in running])


def _drain_mark(run: RunDir, task: Task) -> Path:
    return run.slurm / "drain" / task.name


def _jobs(tasks: list[Task]) -> list[str]:
    return sorted({task.job for task in tasks}, key=int)
