"""Parts of a submission that all launchers share: the run's name, its records, templates, and messages to users."""

import hashlib
import re
import sys
from pathlib import Path
from typing import Any

from batchinfer.checked_json import read_json
from batchinfer.records import ConfigError
from batchinfer.rundir import RunDir, submission_records

STEM = 24  # characters of the folder's name; the names of a group's nodes are up to 30 characters longer


def run_name(run: str) -> str:
    """Return a name for a run, unique and stable for its folder or URI.

    The name is a label of RFC 1123 (a-z, 0-9 and -) that begins with a letter (RFC 1035, for JobSet): the last part of
    the folder's path in lower case, with - for other characters, and six digits of a hash of the whole path, because
    the last parts of two folders may be the same.
    """
    last = run.rstrip("/").rpartition("/")[2].lower()
    stem = re.sub(r"[^a-z0-9]+", "-", last).strip("-") or "run"
    stem = (stem if stem[0].isalpha() else f"run-{stem}")[:STEM].strip("-")
    return f"{stem}-{hashlib.sha256(run.encode()).hexdigest()[:6]}"


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


def sent_records(run: RunDir, launcher: str, *needs: str) -> list[tuple[Path, dict[str, Any]]]:
    """Return all records of submissions to one launcher, in order, each with its file.

    Raises:
        DamagedFileError: a record is damaged, or lacks one of the keys `needs`.
    """
    return [(path, read_json(path, *needs)) for path in submission_records(run, [launcher])]


def find_template(name: str, own: Path | None) -> Path:
    """Return the template to submit: the user's file if given, else the file that came with batchinfer.

    Args:
        name: path in jobs/, for example `array.sbatch` or `k8s/tasks.yaml`.
        own: the user's own file.

    Raises:
        ConfigError: the file does not exist.
    """
    in_working_copy = Path(__file__).parents[2] / "jobs" / name
    installed = Path(sys.prefix) / "share" / "batchinfer" / "jobs" / name
    candidates = [in_working_copy, installed] if own is None else [own.absolute()]
    for path in candidates:
        if path.is_file():
            return path
    looked = " or ".join(str(path) for path in candidates)
    kind = "Slurm template" if name.endswith(".sbatch") else "template"
    raise ConfigError(f"there is no {kind} {looked}; name one with --template or --finish-template")
