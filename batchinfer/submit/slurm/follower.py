"""The follower of a run: the command that keeps changing its number of tasks. The latest command replaces others."""

from uuid import uuid4

from batchinfer.checked_json import publish_json, read_json
from batchinfer.records import InterruptedRunError
from batchinfer.rundir import RunDir, follower_record


def take_over(run: RunDir) -> str:
    """Make this process the run's follower; return the follower's name."""
    name = uuid4().hex
    publish_json(follower_record(run), {"name": name})
    return name


def dismiss(run: RunDir) -> None:
    """Dismiss the run's follower."""
    publish_json(follower_record(run), {"name": None})


def check_follower(run: RunDir, name: str) -> None:
    """Check that `name` is still the run's follower.

    Raises:
        InterruptedRunError: the run was cancelled, or another command follows it.
    """
    found = read_json(follower_record(run), "name")["name"]
    if found != name:
        why = f"{run.shown} was cancelled" if found is None else f"another command follows {run.shown} now"
        raise InterruptedRunError(f"{why}; `batchinfer submit --follow {run.shown}` goes on from here")
