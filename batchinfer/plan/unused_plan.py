"""Deletion of another job's plan from the run folder, if nothing was computed for that plan."""

import shutil
from typing import Any

from batchinfer.checked_json import publish_json
from batchinfer.data.parquet import read_rows
from batchinfer.records import RunMismatchError
from batchinfer.run.heartbeat import SessionStatus, signs_of_life
from batchinfer.run.liveness import SILENT_S
from batchinfer.run.units.result_files import is_reused
from batchinfer.rundir import RunDir, submission_records
from batchinfer.sanitize import count_text


def delete_unused_plan(run: RunDir, state: dict[str, Any], mismatch: RunMismatchError) -> None:
    """Delete the plan of another job if nothing was computed for it.

    Args:
        state: content of run.json.
        mismatch: error that names the difference of the jobs.

    Raises:
        RunMismatchError: `mismatch`, with the results that deleting the run folder would lose.
        ConfigError: the folder cannot be written, or is damaged.
    """
    lost = _what_is_there(run, state)
    if lost is not None:
        raise RunMismatchError(f"{mismatch}{lost}")
    # first, so that after a crash here the next command plans, for any job
    publish_json(run.run_json, {**state, "state": "planning"})
    # with the other job's statistics, heartbeats and trace
    of_plan = (run.tokens(0).parent, run.requests.parent, run.unit_folders, run.done_marks, run.stats, run.work)
    for folder in of_plan:
        if folder.exists():
            shutil.rmtree(folder)
    run.trace.unlink(missing_ok=True)


def _what_is_there(run: RunDir, state: dict[str, Any]) -> str | None:
    if state["state"] not in ("planning", "planned"):
        return f", which loses the outputs of {count_text(state['counts']['rows'], 'row')}"
    computed = (path for path in run.unit_folders.glob("*/*/part-*.parquet") if not is_reused(path))
    units = {path.parents[1].name for path in computed}
    units |= {path.name for path in run.done_marks.glob("[0-9]*")}
    if units:
        return f", which loses the answers of {count_text(len(units), 'work unit')}"
    if submission_records(run):
        return f" after `batchinfer cancel {run.shown}`: it was sent to a cluster"
    signs = signs_of_life(run)
    for path in sorted((run.stats / "nodes").glob("*.parquet")):
        for row in read_rows(path):
            # no other process plans, because this process has the lock
            if row["state"] == "running" and row["command"] != "plan":
                found = _may_live(signs.get(row["session"]))
                if found is not None:
                    return f" once its `batchinfer {row['command']}` on {row['node']} is over: {found}"
    return None


def _may_live(sign: SessionStatus | None) -> str | None:
    """Return why a session without a recorded end may be alive, and the remedy; None if it is not alive."""
    if sign is None:
        return "its end is not recorded and it has no heartbeat; delete the folder if none of its processes runs"
    if not sign.may_live:
        return None
    return (
        f"its last heartbeat was {sign.silent_s:.0f} s ago; stop it, or if it was killed there, run this again after "
        f"{SILENT_S:.0f} s"
    )
