"""A run's tasks in the cluster to which it was sent last."""

from collections import Counter

from batchinfer.records import ConfigError
from batchinfer.rundir import RunDir
from batchinfer.submit.k8s import tasks as k8s
from batchinfer.submit.live import LiveTasks
from batchinfer.submit.ray import client as ray
from batchinfer.submit.records import last_launcher
from batchinfer.submit.slurm import client
from batchinfer.submit.slurm import tasks as submit

# why tasks wait when nothing is wrong
USUAL_REASONS = {"None", "Resources", "Priority", "JobArrayTaskLimit", "BeginTime", "Dependency"}


def tasks_in_cluster(run: RunDir) -> tuple[LiveTasks | None, list[str]]:
    """The run's tasks where it was sent last, and what is wrong with them."""
    try:
        match last_launcher(run):
            case "slurm":
                tasks = _slurm_tasks(run)
            case "k8s":
                tasks = k8s.look(run)
            case "ray":
                tasks = ray.look(run)
            case _:
                tasks = None
    except ConfigError as error:
        return None, [str(error)]
    return tasks, [] if tasks is None else tasks.problems


def _slurm_tasks(run: RunDir) -> LiveTasks | None:
    """None where Slurm's commands are missing."""
    if not client.is_here():
        return None
    tasks = submit.live_tasks(run)
    waiting = Counter(task.reason for task in tasks if task.is_pending)
    unusual = {reason: count for reason, count in waiting.items() if reason not in USUAL_REASONS}
    num_waiting = sum(waiting.values())
    problems = [f"{count} Slurm tasks wait: {reason}" for reason, count in unusual.items()]
    return LiveTasks("Slurm", len(tasks) - num_waiting, num_waiting, problems)
