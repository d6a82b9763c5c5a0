"""The expected hours and cost of a number of tasks, by the plan."""

from batchinfer.config import JobConfig
from batchinfer.progress import duration
from batchinfer.rundir import RunDir, read_state


def expected_lines(run: RunDir, job: JobConfig, tasks: int, nodes: int) -> list[str]:
    """Return lines with tasks, hours and cost by the run's plan, or with the reason why they are not known.

    Args:
        nodes: number of nodes of a task.
    """
    kind = f"{_many(tasks, 'task')} of {_many(nodes, 'node')}"
    if not run.run_json.exists() or (state := read_state(run))["state"] == "planning":
        return [f"{kind}; hours and cost are known when there is a plan: `batchinfer plan` first"]
    num_units, work_s = state["counts"]["units"], state["counts"]["work_s"]
    warning = [] if tasks <= num_units else ["warning: more tasks than units; some tasks will have no work"]
    if work_s is None:
        unknown = "hours and cost are not known: plan with --learn-from and a finished run, or name cluster.gpu"
        return [f"{kind} for {_many(num_units, 'unit')}; {unknown}", *warning]
    hours, num_ranks, price = work_s / 3600, job.cluster.num_ranks, job.pricing.gpu_hour
    at_once = max(1, min(tasks, num_units))
    cost = "" if price is None else f", {hours * num_ranks * price:,.2f} $"
    figures = (
        f"{hours:,.2f} task-hours by the plan, {duration(work_s / at_once)} with all tasks working",
        f"{hours * num_ranks:,.2f} accelerator-hours{cost} in all",
    )
    return [f"{kind} for {_many(num_units, 'unit')}: {', '.join(figures)}", *warning]


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
