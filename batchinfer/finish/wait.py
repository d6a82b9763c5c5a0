"""Where a cluster starts nothing behind other tasks, `finish` itself waits until these have done all units."""

import os
import time

from batchinfer.data.parquet import read_rows
from batchinfer.manifest import Manifest
from batchinfer.progress import note
from batchinfer.rundir import RunDir, read_state

LOOK_S = 5.0


def wait_for_units(run: RunDir, look_s: float = LOOK_S) -> None:
    """Return when every unit of the plan is done; a signal ends the command before.

    Args:
        look_s: seconds between looks: one listing of a folder.
    """
    rows = read_rows(run.units, Manifest(run.root, read_state(run).get("files")))
    wanted = {run.done(row["unit"]).name for row in rows}
    told = None
    while left := len(wanted - set(_names(run))):
        if left != told:
            note(f"waiting: {left:,} of {len(wanted):,} units are not done yet")
            told = left
        time.sleep(look_s)


def _names(run: RunDir) -> list[str]:
    try:
        return os.listdir(run.done_marks)
    except FileNotFoundError:  # none is
        return []
