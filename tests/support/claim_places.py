"""Run folders on a disk and in a bucket for tests of claims: workers whose leases beat only when a test says so."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.checked_json import publish_json
from batchinfer.config import S3Config
from batchinfer.data.bucket import Bucket
from batchinfer.run.store import watch
from batchinfer.run.store.bucket import BucketStorage
from batchinfer.run.store.folder import FolderStorage
from batchinfer.run.store.interface import Storage
from batchinfer.run.units import claims
from batchinfer.run.units.claims import Claim, UnitClaims, counted_files, done_mark, last_claim
from batchinfer.run.units.result_files import write_results
from batchinfer.rundir import RunDir

ROWS = 3  # of each unit
LEASE_S = 60.0


class Killed(BaseException):
    """Raised by every operation on a store after its process was "killed", so no clean-up can do anything either."""


class Clock:
    """Counted seconds."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@dataclass
class Place:
    """One run folder that several nodes share.

    store: as one more node sees it; each node of a bucket has a copy of its own.
    """

    store: Callable[[str], Storage]
    is_bucket: bool

    def worker(self, node: str) -> UnitClaims:
        """A worker, to be entered by `with`; one that is not entered has no beat and never says that it ends."""
        return UnitClaims(self.store(node))

    def silent_worker(self, node: str) -> UnitClaims:
        """A worker that is on another host and about to die: its lease exists, and nothing renews it."""
        return self.worker(node)


def beat_once(worker: UnitClaims) -> None:
    """Renew a silent worker's lease once."""
    worker._lease.renew()


def add_row(worker: UnitClaims, claim: Claim, row: int) -> Path:
    """Make a result of a unit durable."""
    path = write_results(claim.folder, row, pa.table({"unit": [claim.unit], "row": [row]}))
    worker.add(claim, path)
    return path


def rows_in(paths: Any) -> list[int]:
    return [row for path in paths for row in pq.read_table(path)["row"].to_pylist()]


def compute(worker: UnitClaims, claim: Claim) -> None:
    """Add the rows that a unit lacks and complete the unit."""
    for row in sorted(set(range(ROWS)).difference(rows_in(claim.inherited))):
        add_row(worker, claim, row)
    worker.complete(claim)


def counted_rows(place: Place, unit: int = 0) -> list[int]:
    """Rows that a reader counts: of the done mark, or else of the last claim."""
    store = place.store("reader")
    store.fetch("state")
    store.fetch("results", "claims")
    return sorted(rows_in(counted_files(done_mark(store.run, unit), last_claim(store.run, unit))))


def is_done(place: Place, unit: int = 0) -> bool:
    store = place.store("reader")
    return store.run.done(unit).name in store.names(store.run.done_marks)


def file_in(place: Place, name: str) -> Any:
    """Read and write of one document of the run folder, behind the store's back."""
    store = place.store("hand")
    if isinstance(store, BucketStorage):
        return (lambda: store.get(store.run.root / name)), (lambda data: store.bucket.put(name, data))
    path = store.run.root / name
    return path.read_bytes, path.write_bytes


def folder_place(folder: Path) -> Place:
    return Place(lambda node: FolderStorage(RunDir(folder / "run")), is_bucket=False)


def bucket_place(folder: Path, endpoint: str, name: str) -> Place:
    def store(node: str) -> Storage:
        found = BucketStorage(f"s3://runs/{name}", S3Config(endpoint=endpoint), str(folder / node))
        found.run.root.mkdir(parents=True, exist_ok=True)
        return found

    place = Place(store, is_bucket=True)
    first = place.store("planner")
    publish_json(first.run.run_json, {"state": "planned", "shards": [], "files": {}})
    first.run.job.write_text("")
    first.commit()
    return place


def on_other_hosts(patch: pytest.MonkeyPatch) -> None:
    """Nobody's process can be seen: workers are only dead when their leases have run out. No heart beats by itself."""
    patch.setattr(watch, "is_dead", lambda _: False)
    without_beats(patch)


def without_beats(patch: pytest.MonkeyPatch) -> None:
    for store in (FolderStorage, BucketStorage):
        patch.setattr(store, "beat_s", 1e6)


def count_seconds(patch: pytest.MonkeyPatch) -> Clock:
    """Give watchers a clock that only the test moves."""
    clock = Clock()
    patch.setattr(watch, "time", clock)
    patch.setattr(claims, "time", clock)
    return clock


def all_dead(patch: pytest.MonkeyPatch) -> None:
    """Every process but the one that asks has ended."""
    patch.setattr(watch, "is_dead", lambda _: True)


@contextmanager
def killed_after(place: Place, num_operations: int) -> Iterator[list[int]]:
    """Let this many operations on the store happen; the next one and all after it raise Killed. Yields [count]."""
    done = [0]

    def step() -> None:
        if done[0] >= num_operations:
            raise Killed
        done[0] += 1

    with pytest.MonkeyPatch.context() as patch:
        if place.is_bucket:
            plain = Bucket._try

            def attempt(bucket: Bucket, kind: str, name: str, call: Any) -> Any:
                step()
                return plain(bucket, kind, name, call)

            patch.setattr(Bucket, "_try", attempt)
        else:
            for name in ("mkdir", "link", "rename", "open", "unlink", "utime", "scandir", "listdir", "fsync"):
                patch.setattr(os, name, _counted(getattr(os, name), step))
        yield done


def _counted(plain: Any, step: Callable[[], None]) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        step()
        return plain(*args, **options)

    return call


@contextmanager
def stale_listings(place: Place) -> Iterator[None]:
    """Show each listing as it was when it was asked for first."""
    with pytest.MonkeyPatch.context() as patch:
        first: dict[Any, Any] = {}

        def stale(plain: Any, materialise: Any) -> Any:
            def call(*args: Any) -> Any:
                key = plain, args[-1].name
                if key not in first:
                    first[key] = materialise(plain(*args))
                return first[key]

            return call

        for store in (FolderStorage, BucketStorage):
            for name in ("names", "list"):
                patch.setattr(store, name, stale(getattr(store, name), list))
        yield
