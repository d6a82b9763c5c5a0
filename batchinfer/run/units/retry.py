"""Retry of failed requests: their units are opened again, and `work` computes these requests alone."""

from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.checked_json import publish_json
from batchinfer.data.parquet import read_rows
from batchinfer.data.schemas.internal import RESULTS
from batchinfer.manifest import Manifest
from batchinfer.records import DamagedFileError
from batchinfer.run.store.interface import Storage
from batchinfer.run.units.claims import counted_files, done_mark, is_given_back, last_claim, offer_again
from batchinfer.run.units.result_files import damage, write_results
from batchinfer.rundir import read_state


@dataclass(frozen=True, slots=True)
class Retried:
    """Requests and units to be computed again."""

    num_requests: int  # failed ones, to be computed again
    num_units: int  # that hold them
    num_open_units: int  # not done, these included
    num_held: int  # units with failed requests that a worker holds: left alone
    num_bad_rows: int  # rows that are bad in the input: no try helps them


def retry_failed(storage: Storage) -> Retried:
    """Take failed requests out of the results that count.

    A unit gets a new claim, already given back, with the good results only; then its mark that it is done goes. Killed
    in between, nothing has changed yet. Good rows keep their results.

    Raises:
        ConfigError: a file of the run folder is missing, damaged or cannot be written; or the run is being finished.
    """
    # a finish that had begun before would call the run finished afterwards
    with storage.locked(doing="retry or finish this run"):
        storage.fetch("plan", "results", "claims")
        return _retry(storage)


def _retry(storage: Storage) -> Retried:
    run = storage.run
    state = read_state(run)
    manifest = Manifest(run.root, state.get("files"))
    num_requests = num_units = num_open = num_held = 0
    for row in read_rows(run.units, manifest):
        unit = row["unit"]
        done = done_mark(run, unit)
        claim = last_claim(run, unit) if done is None else done.claim
        failed = _failed_in(counted_files(done, claim))
        num_failed = sum(failed.values())
        num_open += done is None
        if claim is None or not num_failed:
            continue
        if done is None and not is_given_back(claim):
            num_held += 1
            continue
        if state["state"] in ("finished", "partial"):
            # its outputs hold the failed rows: finish has to write them again
            state = {name: value for name, value in state.items() if name != "finished"} | {"state": "planned"}
            publish_json(run.run_json, state)
            storage.commit()
        if not _open_again(storage, unit, failed):
            num_held += 1
            continue
        storage.delete(run.done(unit))
        num_requests, num_units, num_open = num_requests + num_failed, num_units + 1, num_open + (done is not None)
    return Retried(num_requests, num_units, num_open, num_held, state["counts"]["bad_rows"])


def _failed_in(files: list[Path]) -> dict[Path, int]:
    """Return the number of failed requests in each result file."""
    statuses = {}
    for path in files:
        reason = damage(path)
        if reason is not None:
            raise DamagedFileError(path, reason, remedy="`batchinfer finish` sets it aside; `work`, and retry then")
        statuses[path] = pq.read_table(path, columns=["status"])["status"]
    return {path: pc.sum(pc.equal(status, "error")).as_py() or 0 for path, status in statuses.items()}


def _open_again(storage: Storage, unit: int, failed: dict[Path, int]) -> bool:
    """Offer a unit with its good results only; return False if another worker claimed it first."""
    whole = [path for path, count in failed.items() if not count]
    mixed = [path for path, count in failed.items() if count]

    def write_good_rows(folder: Path) -> None:
        for number, path in enumerate(mixed):
            table = pq.read_table(path, schema=RESULTS.schema)
            write_results(folder, number, table.filter(pc.equal(table["status"], "ok")))

    return offer_again(storage, unit, inherited=whole, fill=write_good_rows)
