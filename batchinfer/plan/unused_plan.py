"""A plan of another job in the run folder: one on which no work has been done makes way for a new one."""

import shutil
from typing import Any

from batchinfer.checked_json import publish_json
from batchinfer.data.parquet import read_rows
from batchinfer.records import RunMismatchError
from batchinfer.run.heartbeat import Sign, signs_of_life
from batchinfer.run.liveness import SILENT_S
from batchinfer.rundir import RunDir, submission_records


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
    # statistics, signs of life and the trace of its sessions go with it: they are another job's
    of_plan = (run.tokens(0).parent, run.requests.parent, run.unit_folders, run.done_marks, run.stats, run.work)
    for folder in of_plan:
        if folder.exists():
            shutil.rmtree(folder)
    run.trace.unlink(missing_ok=True)


def _what_is_there(run: RunDir, state: dict[str, Any]) -> str | None:
    if state["state"] not in ("planning", "planned"):
        return f", which loses the outputs of {state['counts']['rows']:,} rows"
    units = {path.parents[1].name for path in run.unit_folders.glob("*/*/part-*.parquet")}
    units |= {path.name for path in run.done_marks.glob("[0-9]*")}
    if units:
        return f", which loses the answers of {len(units):,} work units"
    if submission_records(run):
        return f" after `batchinfer cancel {run.shown}`: it was sent to a cluster"
    signs = signs_of_life(run)
    for path in sorted((run.stats / "nodes").glob("*.parquet")):
        for row in read_rows(path):
            # whoever plans holds the lock that this process has
            if row["state"] == "running" and row["command"] != "plan":
                found = _may_live(signs.get(row["session"]))
                if found is not None:
                    return f" once its `batchinfer {row['command']}` on {row['node']} is over: {found}"
    return None


def _may_live(sign: Sign | None) -> str | None:
    """Why a session that has not said that it ended may be alive, and what to do; None: it is not."""
    if sign is None:
        return "it has not said so and gives no sign of life; when nothing of it runs any more, delete the folder"
    if not sign.may_live:
        return None
    return (
        f"it gave a sign of life {sign.silent_s:.0f} s ago; stop it, or if it was killed there, run this again after "
        f"{SILENT_S:.0f} s"
    )
