"""What launchers say alike, for a person."""

from batchinfer.records import ConfigError
from batchinfer.rundir import RunDir


def how_to_follow(run: RunDir, *sent: str, logs: str) -> str:
    """Lines: what was sent, and the commands to follow it."""
    return "\n".join(
        (
            *sent,
            f"watch   batchinfer status {run.shown} --watch",
            f"logs    {logs}",
            f"change  batchinfer submit --resize {run.shown} N",
            f"end     batchinfer cancel {run.shown}",
        )
    )


def never_sent(run: RunDir, launcher: str) -> ConfigError:
    """The error where there is nothing to be changed."""
    return ConfigError(
        f"{run.shown} was never submitted; use `batchinfer submit {run.shown} --to {launcher} --array N`"
    )


def refuse_none(run: RunDir, tasks: int, launcher: str) -> None:
    """Where a run without tasks is over, and does not pause.

    Raises:
        ConfigError: no tasks are asked for.
    """
    if not tasks:
        raise ConfigError(
            f"0 are none: `batchinfer cancel {run.shown}` ends all, "
            f"`batchinfer submit {run.shown} --to {launcher}` goes on"
        )
