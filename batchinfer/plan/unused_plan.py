"""A plan of another job in the run folder: one on which no work has been done makes way for a new one."""

import shutil
from typing import Any

from batchinfer.data.parquet import read_rows
from batchinfer.records import RunMismatchError
from batchinfer.rundir import RunDir, publish_json


def make_way(run: RunDir, state: dict[str, Any], mismatch: RunMismatchError) -> None:
    """Delete the plan of another job, if nothing was computed by it.

    Args:
        state: what run.json says.
        mismatch: how the jobs differ.

    Raises:
        RunMismatchError: `mismatch`, and what deleting the run folder would lose.
        ConfigError: the folder cannot be written, or is damaged.
    """
    lost = _what_is_there(run, state)
    if lost is not None:
        raise RunMismatchError(f"{mismatch}{lost}")
    # first of all, so that whoever comes after a crash here plans, whichever job it has
    publish_json(run.run_json, {**state, "state": "planning"})
    for folder in (run.tokens(0).parent, run.requests.parent, run.unit_folders, run.done_marks):
        if folder.exists():
            shutil.rmtree(folder)


def _what_is_there(run: RunDir, state: dict[str, Any]) -> str | None:
    if state["state"] not in ("planning", "planned"):
        return f", which loses the outputs of {state['counts']['rows']:,} rows"
    units = {path.parents[1].name for path in run.unit_folders.glob("*/*/part-*.parquet")}
    units |= {path.name for path in run.done_marks.glob("[0-9]*")}
    if units:
        return f", which loses the answers of {len(units):,} work units"
    if any(run.slurm.glob("*.json")):
        return f" after `batchinfer cancel {run.root}`: it was sent to Slurm"
    # whoever plans holds the lock that this process has
    for path in sorted((run.stats / "nodes").glob("*.parquet")):
        for row in read_rows(path):
            if row["state"] == "running" and row["command"] != "plan":
                return f" once its `batchinfer {row['command']}` on {row['node']} is over, which has not said so yet"
    return None
