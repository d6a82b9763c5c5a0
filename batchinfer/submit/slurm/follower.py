"""The command that stays and sets the number of a run's tasks: the one that began last, until the run is cancelled."""

from uuid import uuid4

from batchinfer.checked_json import publish_json, read_json
from batchinfer.records import InterruptedRunError
from batchinfer.rundir import RunDir, follower_record


def take_over(run: RunDir) -> str:
    """Be the follower from now on; returns its name."""
    name = uuid4().hex
    publish_json(follower_record(run), {"name": name})
    return name


def dismiss(run: RunDir) -> None:
    """Have nobody follow the run any more."""
    publish_json(follower_record(run), {"name": None})


def check_follower(run: RunDir, name: str) -> None:
    """See that this one is still the follower.

    Raises:
        InterruptedRunError: it is not.
    """
    found = read_json(follower_record(run), "name")["name"]
    if found != name:
        why = f"{run.shown} was cancelled" if found is None else f"another command follows {run.shown} now"
        raise InterruptedRunError(f"{why}; `batchinfer submit --follow {run.shown}` goes on from here")
