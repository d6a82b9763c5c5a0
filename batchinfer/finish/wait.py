"""`finish --wait`: waiting for all units, for clusters that cannot start a job after other jobs."""

import time

from batchinfer.data.parquet import read_rows
from batchinfer.manifest import Manifest
from batchinfer.progress import note
from batchinfer.run.store.interface import Storage
from batchinfer.rundir import read_state

LOOK_S = 5.0  # between checks, each of which lists one folder


def wait_for_units(storage: Storage) -> None:
    """Wait until every unit of the plan is done; a signal ends the command earlier."""
    storage.fetch("state", "plan")
    run = storage.run
    rows = read_rows(run.units, Manifest(run.root, read_state(run).get("files")))
    wanted = {run.done(row["unit"]).name for row in rows}
    reported = None
    while left := len(wanted - set(storage.names(run.done_marks))):
        if left != reported:
            note(f"waiting: {left:,} of {len(wanted):,} units are not done yet")
            reported = left
        time.sleep(LOOK_S)
