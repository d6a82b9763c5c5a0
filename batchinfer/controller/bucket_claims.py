"""Work units of a run folder in an object store: claimed, taken over and completed by conditional writes.

    leases/000007       the claim that has the unit: its worker, and its durable results with those of claims before it
    workers/<token>     whether that worker lives (run/store/bucket_lease.py)
    units/000007/0000/part-00000-<digest>.parquet   results
    done/000007         the results that count; created once

Who creates a unit's lease has it. Results are put first and named by the lease afterwards, which is only replaced as
this claim last saw it: a controller whose unit was taken over meanwhile is told so by its next commit, and what it
put is ignored. Taking over is one such write, too, by which the new claim inherits exactly the named results. What a
unit costs in requests does not depend on how long it takes: workers renew one lease each, not one for each unit.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchinfer.checked_json import json_text, parse_json
from batchinfer.controller.claims import Claim
from batchinfer.controller.result_files import damage, own_files
from batchinfer.data.bucket import Bucket, Found
from batchinfer.progress import note
from batchinfer.records import BatchinferError, DamagedFileError
from batchinfer.run.store.bucket_lease import Lease, Watch, holder
from batchinfer.rundir import RunDir
from batchinfer.whole_files import published


@dataclass
class _Held:
    """A unit that this process has, as the bucket knows it."""

    claim: Claim
    version: str  # of its lease
    files: dict[str, int]  # durable results by name, with their sizes; the lease names them from the next commit on
    is_lost: bool = False
    new: list[str] = field(default_factory=list)  # of these, those that the lease does not name yet


class BucketClaims:
    """Takes units for this process; see claiming.Claims."""

    watch_s = math.inf  # each try is a write and two reads

    def __init__(self, run: RunDir, bucket: Bucket) -> None:
        self._run, self._bucket = run, bucket
        self._worker = Lease(bucket, f"workers/{secrets.token_hex(8)}")
        self._watch = Watch()
        self._worker_of: dict[int, str] = {}  # units that others held when they were tried last
        self._held: dict[int, _Held] = {}
        self.completed: set[int] = set()  # units

    def __enter__(self) -> BucketClaims:
        self._worker.take()
        return self

    def __exit__(self, *_: object) -> None:
        for held in list(self._held.values()):
            try:
                self.release(held.claim)
            except BatchinferError as error:
                note(f"warning: {error}")
        self._worker.end(delete=True)

    def try_claim(self, unit: int) -> Claim | None:
        """Take a unit unless it is done or somebody alive holds it."""
        name = _lease_name(unit)
        first = Claim(unit, self._run.claim(unit, "0000"), ())
        version = self._bucket.create(name, self._document(first, {}))
        if version is not None:
            return self._hold(first, version, {})
        self._worker_of.pop(unit, None)
        found = self._bucket.read(name)
        if found is None:
            return None  # given up just now
        lease = _read_lease(self._run, unit, found)
        if not lease["released"] and not self._watch.has_run_out(lease["worker"], self._bucket.read(lease["worker"])):
            self._worker_of[unit] = lease["worker"]
            return None
        if self._bucket.read(_mark_name(unit)) is not None:
            return None  # a unit that is done keeps its lease
        files = self._sound(unit, lease["files"])
        claim = Claim(
            unit,
            self._run.claim(unit, f"{int(lease['claim']) + 1:04d}"),
            tuple(self._run.root / file for file in files),
        )
        version = self._bucket.replace(name, self._document(claim, files), found.version)
        return None if version is None else self._hold(claim, version, files)

    def lapses_s(self, unit: int) -> float:
        """See claiming.Claims."""
        worker = self._worker_of.get(unit)
        return math.inf if worker is None else self._watch.lapses_s(worker)

    def add(self, claim: Claim, path: Path) -> None:
        """Put a result file of a claim; it counts from the next commit on."""
        held, name = self._held[claim.unit], path.relative_to(self._run.root).as_posix()
        self._bucket.put(name, path)
        held.files[name] = path.stat().st_size
        held.new.append(name)

    def commit(self, claim: Claim) -> None:
        """Have the results that were put count for the claim."""
        held = self._held[claim.unit]
        if held.is_lost or not held.new:
            return
        version = self._bucket.replace(_lease_name(claim.unit), self._document(claim, held.files), held.version)
        if version is None:
            self._lose(held)
        else:
            held.version, held.new = version, []

    def complete(self, claim: Claim) -> None:
        """Mark the unit done with this claim's results; the first claim to say so counts."""
        held = self._held[claim.unit]
        if not held.is_lost:
            mark = {"unit": claim.unit, "claim": claim.name, "files": held.files, "by": self._worker.token}
            self._bucket.create(_mark_name(claim.unit), json_text(mark).encode())
        del self._held[claim.unit]
        self.completed.add(claim.unit)

    def release(self, claim: Claim) -> None:
        """Give a unit back; what was committed in its claim stays and counts."""
        held = self._held.pop(claim.unit)
        if not held.is_lost:
            named = {name: size for name, size in held.files.items() if name not in held.new}
            self._bucket.replace(_lease_name(claim.unit), self._document(claim, named, released=True), held.version)

    def _hold(self, claim: Claim, version: str, files: dict[str, int]) -> Claim:
        claim.folder.mkdir(parents=True, exist_ok=True)
        self._held[claim.unit] = _Held(claim, version, dict(files))
        return claim

    def _lose(self, held: _Held) -> None:
        held.is_lost = True
        note(f"warning: unit {held.claim.unit} was taken over by another worker while this one was not heard of")

    def _document(self, claim: Claim, files: dict[str, int], *, released: bool = False) -> bytes:
        return _lease(claim.unit, claim.name, files, worker=self._worker.name, released=released)

    def _sound(self, unit: int, files: dict[str, int]) -> dict[str, int]:
        """Those of these results that are what their names say, fetched; rows of the others are computed again."""
        sound = {}
        for name, size in files.items():
            path = self._run.root / name
            if path.parent.parent != self._run.unit(unit):
                continue  # only ever of its own unit: another unit's would be double
            if damage(path) is not None:
                with published(path) as temporary:
                    self._bucket.fetch(name, temporary)
            reason = damage(path)
            if reason is None:
                sound[name] = size
            else:
                note(f"warning: {self._bucket.uri}/{name} is left out: {reason}; its rows are computed again")
        return sound


def offer_again(run: RunDir, bucket: Bucket, unit: int, *, inherited: list[Path], fill: Callable[[Path], None]) -> bool:
    """Replace a unit's lease by one that nobody holds, with other results; see claims.offer_again."""
    found = bucket.read(_lease_name(unit))
    if found is None:
        return False
    folder = run.claim(unit, f"{int(_read_lease(run, unit, found)['claim']) + 1:04d}")
    folder.mkdir(parents=True, exist_ok=True)
    fill(folder)
    files = [*inherited, *own_files(folder)]
    names = {path: path.relative_to(run.root).as_posix() for path in files}
    for path in own_files(folder):
        bucket.put(names[path], path)
    sizes = {names[path]: path.stat().st_size for path in files}
    given_back = _lease(unit, folder.name, sizes, worker="", released=True)
    return bucket.replace(_lease_name(unit), given_back, found.version) is not None


def _lease(unit: int, claim: str, files: dict[str, int], *, worker: str, released: bool) -> bytes:
    said = {"unit": unit, "claim": claim, "worker": worker, "holder": holder(), "released": released, "files": files}
    return json_text({**said, "write": secrets.token_hex(8)}).encode()  # no two writes are alike


def _read_lease(run: RunDir, unit: int, found: Found) -> dict[str, Any]:
    """What a lease says.

    Raises:
        DamagedFileError: it is none, or another unit's.
    """
    place = run.root / _lease_name(unit)
    lease = parse_json(found.data, place, "unit", "claim", "worker", "released", "files")
    if lease["unit"] != unit:
        raise DamagedFileError(place, f"it is the lease of unit {lease['unit']}")
    return lease


def _lease_name(unit: int) -> str:
    return f"leases/{unit:06d}"


def _mark_name(unit: int) -> str:
    return f"done/{unit:06d}"
