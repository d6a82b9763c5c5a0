"""Parts of a submission that all launchers share: names, records, templates, messages, and a check of node groups."""

import hashlib
import re
import sys
from pathlib import Path
from typing import Any

from batchinfer.checked_json import read_json
from batchinfer.config import ClusterConfig
from batchinfer.config.rank_layout import rank_places
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


def find_template(name: str, own: str | None) -> Path:
    """Return the template to submit: the user's file if given, else the file that came with batchinfer.

    Args:
        name: path in jobs/, for example `array.sbatch` or `k8s/tasks.yaml`.
        own: path of the user's own file.

    Raises:
        ConfigError: the file does not exist.
    """
    in_working_copy = Path(__file__).parents[2] / "jobs" / name
    installed = Path(sys.prefix) / "share" / "batchinfer" / "jobs" / name
    candidates = [in_working_copy, installed] if own is None else [Path(own).absolute()]
    for path in candidates:
        if path.is_file():
            return path
    looked = " or ".join(str(path) for path in candidates)
    kind = "Slurm template" if name.endswith(".sbatch") else "template"
    raise ConfigError(f"there is no {kind} {looked}; name one with --template or --finish-template")


def check_group(cluster: ClusterConfig, nodes: int, gpus_per_node: int | None) -> None:
    """Check that the ranks fit on the nodes of a task, before anything is planned or submitted.

    Args:
        nodes: number of nodes of a task.
        gpus_per_node: None for the launcher's default, which is not checked.

    Raises:
        ConfigError: the ranks do not spread evenly over the nodes, lack GPUs, or cannot exchange rows between nodes.
    """
    num_ranks = cluster.num_ranks
    if num_ranks % nodes:
        raise ConfigError(
            f"the job's {num_ranks} ranks do not spread evenly over {nodes} nodes; change --nodes-per-group or the "
            "ranks in [cluster]"
        )
    ranks_per_node = num_ranks // nodes
    for place in rank_places(cluster):
        if cluster.exchange == "shared" and place.rank // ranks_per_node != place.leader // ranks_per_node:
            raise ConfigError(  # shared memory reaches no other node
                f"cluster.exchange is 'shared', but ranks {place.leader} and {place.rank} share experts and are on "
                "different nodes; use 'auto', or change --nodes-per-group"
            )
    if gpus_per_node is not None and ranks_per_node > gpus_per_node:
        raise ConfigError(
            f"{ranks_per_node} ranks per node need as many GPUs, but --gpus-per-node is {gpus_per_node}; change one of "
            "them"
        )
