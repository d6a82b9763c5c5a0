"""Answers of an earlier run in a new run's units, which the first claim of each unit offers to workers.

    run.json, key "reused"                    the earlier run, and what rounds there
    units/000007/reused-<token>/part-*.parquet   its answers for rows of this unit
    units/000007/0000/claim.json              a claim without a worker that inherits these files

Workers whose ranks round differently leave such files out (UnitClaims.accepts_reused) and compute the rows.
"""

from pathlib import Path
from typing import Any

from batchinfer.run.store.interface import Storage
from batchinfer.run.units.claims import file_sizes, mark_done, offer_first
from batchinfer.run.units.result_files import REUSED_FOLDER, own_files
from batchinfer.rundir import RunDir
from batchinfer.whole_files import remove_folder

# key of run.json: the earlier run, the token, the number of such requests by unit, whether these are all requests, and
# the fields of EqualRows
REUSED = "reused"


def reused_folder(run: RunDir, unit: int, token: str) -> Path:
    """Return the folder of a unit's reused answers."""
    return run.unit(unit) / f"{REUSED_FOLDER}{token}"


def offer_reused(storage: Storage, state: dict[str, Any]) -> None:
    """Offer the reused answers of each unit without a claim.

    If no row of the job is left to compute, the units are marked done.

    Args:
        state: content of run.json, whose plan is valid.
    """
    if REUSED not in state:
        return
    run = storage.run
    for folder in sorted(run.unit_folders.glob(f"*/{REUSED_FOLDER}{state[REUSED]['token']}")):
        unit, files = int(folder.parent.name), own_files(folder)
        for path in files:
            storage.put(path)
        claim = offer_first(storage, unit, files)
        if claim is not None and state[REUSED]["is_all"]:
            mark_done(storage, unit, claim, file_sizes(files))


def rows_to_compute(rows: list[dict[str, Any]], state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rows of plan/units, with requests and tokens without those that have a reused answer.

    Args:
        state: content of run.json.
    """
    if REUSED not in state:
        return rows
    found = []
    for row, num_reused in zip(rows, state[REUSED]["requests_of_units"], strict=True):
        share = 1 - num_reused / row["num_requests"]
        tokens = {name: round(row[name] * share) for name in ("new_tokens", "max_output_tokens")}
        found.append({**row, **tokens, "num_requests": row["num_requests"] - num_reused})
    return found


def remove_stale_answers(run: RunDir, state: dict[str, Any]) -> None:
    """Remove the reused answers of plans that were interrupted."""
    token = state.get(REUSED, {}).get("token")
    for folder in run.unit_folders.glob(f"*/{REUSED_FOLDER}*"):
        if folder.name != f"{REUSED_FOLDER}{token}":
            remove_folder(folder)
