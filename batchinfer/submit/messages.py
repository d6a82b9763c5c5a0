"""Messages to users that all launchers share."""

from batchinfer.records import ConfigError
from batchinfer.rundir import RunDir


def how_to_follow(run: RunDir, *sent: str, logs: str) -> str:
    """Return lines with what was submitted and the commands to follow, change and end it."""
    return "\n".join(
        (
            *sent,
            f"watch   batchinfer status {run.shown} --watch",
            f"logs    {logs}",
            f"change  batchinfer submit --resize {run.shown} N",
            f"end     batchinfer cancel {run.shown}",
        )
    )


def never_submitted(run: RunDir, launcher: str) -> ConfigError:
    """Return the error of a resize if the run was never submitted."""
    return ConfigError(
        f"{run.shown} was never submitted; use `batchinfer submit {run.shown} --to {launcher} --array N`"
    )


def refuse_zero_tasks(run: RunDir, tasks: int, launcher: str) -> None:
    """Refuse a resize to 0 tasks on a launcher that cannot pause a run.

    Raises:
        ConfigError: `tasks` is 0.
    """
    if not tasks:
        raise ConfigError(
            f"0 tasks cannot pause a run here: `batchinfer cancel {run.shown}` ends all, "
            f"`batchinfer submit {run.shown} --to {launcher}` goes on"
        )
