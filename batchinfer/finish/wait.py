"""Where a cluster starts nothing behind other tasks, `finish` itself waits until these have done all units."""

import time

from batchinfer.data.parquet import read_rows
from batchinfer.manifest import Manifest
from batchinfer.progress import note
from batchinfer.run.storage import Storage
from batchinfer.rundir import read_state

LOOK_S = 5.0  # between looks: one listing of a folder


def wait_for_units(storage: Storage) -> None:
    """Return when every unit of the plan is done; a signal ends the command before."""
    storage.fetch("state", "plan")
    run = storage.run
    rows = read_rows(run.units, Manifest(run.root, read_state(run).get("files")))
    wanted = {run.done(row["unit"]).name for row in rows}
    told = None
    while left := len(wanted - set(storage.names(run.done_marks))):
        if left != told:
            note(f"waiting: {left:,} of {len(wanted):,} units are not done yet")
            told = left
        time.sleep(LOOK_S)
