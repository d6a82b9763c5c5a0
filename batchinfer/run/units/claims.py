"""Work units: claimed by one worker at a time, taken over when their worker is gone.

    units/000007/0001/claim.json   created once: its worker's lease, and the inherited results of earlier claims
    units/000007/0001/part-00000-<digest>.parquet   results; they count as soon as they are there (result_files.py)
    done/000007                    created once: the claim that counts, and its results with their sizes
    work/workers/<token>           whether a worker lives (lease.py)

Whoever creates a claim's document has the unit; taking a unit over is creating the next number. A worker that was taken
over and goes on writes into its own old claim. Its later results are ignored, because the next claim names exactly
what it inherits. An old listing therefore costs work, and never doubles a row.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from batchinfer.checked_json import json_text, parse_json, read_json
from batchinfer.progress import note
from batchinfer.records import DamagedFileError
from batchinfer.run.store import watch
from batchinfer.run.store.interface import Storage
from batchinfer.run.store.watch import Watch
from batchinfer.run.units.lease import WorkerLease
from batchinfer.run.units.result_files import is_result, is_reused, own_files, sound_files
from batchinfer.rundir import CLAIM, RunDir


@dataclass(frozen=True, slots=True)
class Claim:
    """A unit held by this process."""

    unit: int
    folder: Path
    inherited: tuple[Path, ...]  # result files of earlier claims

    @property
    def name(self) -> str:
        return self.folder.name


@dataclass(frozen=True, slots=True)
class _Held:
    """A unit of another worker: the lease that its last claim names, and when its claims were listed."""

    lease: Path
    listed_s: float


class UnitClaims:
    """Takes units for this process, which keeps its lease alive within `with`.

    completed: units that this process has completed.
    accepts_reused: whether units keep answers of an earlier run; None: not known yet.
    """

    def __init__(self, store: Storage) -> None:
        self._store, self._run = store, store.run
        self._lease = WorkerLease(store)
        self._watch = Watch(store.find)
        self._others: dict[int, _Held] = {}  # by unit
        self._mine: dict[int, dict[Path, int]] = {}  # units that this process holds: sizes of their result files
        self.completed: set[int] = set()
        self.accepts_reused: bool | None = True

    def __enter__(self) -> Self:
        self._lease.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lease.__exit__()

    def end(self) -> None:
        """Give all units back; results that were added stay and count."""
        self._mine.clear()
        self._lease.end()

    def try_claim(self, unit: int, *, is_new: bool = False) -> Claim | None:
        """Take a unit unless it is done or a living worker holds it.

        Args:
            is_new: whether a listing has shown that nobody has claimed it yet, so that its claims are not listed again.
        """
        if self._is_still_held(unit):
            return None
        listed_s = time.monotonic()
        last, found = (None, None) if is_new else _last_claim(self._store, unit)
        inherited: list[Path] = []
        if last is not None:
            lease = _lease_in(found, last)
            # a unit that this process has completed may be open again: then it holds the unit no more
            is_over = lease == self._lease.path and unit not in self._mine
            if lease is not None and not is_over and not self._watch.has_run_out(lease):
                self._others[unit] = _Held(lease, listed_s)
                return None
            if self._store.get(self._run.done(unit)) is not None:
                return None
            own = sorted(item.path for item in self._store.list(last) if is_result(item.path))
            kept = [path for path in [*_inherited_in(found, last), *own] if self.accepts_reused or not is_reused(path)]
            inherited = sound_files(self._store, kept)
        self._lease.begin()
        folder = self._run.claim(unit, _next_name(last))
        if not self._store.create(folder / CLAIM, _claim_document(self._run, self._lease.path, inherited)):
            return None
        folder.mkdir(parents=True, exist_ok=True)
        self._mine[unit] = file_sizes(inherited)
        return Claim(unit, folder, tuple(inherited))

    def lapses_s(self, unit: int) -> float:
        """Return when, by the monotonic clock, the lease of a unit that others hold runs out unless it is renewed."""
        held = self._others.get(unit)
        return math.inf if held is None else self._watch.lapses_s(held.lease)

    def add(self, claim: Claim, path: Path) -> None:
        """Make a result file in a claim's folder durable; it counts from then on."""
        self._store.put(path)
        if claim.unit in self._mine:
            self._mine[claim.unit][path] = path.stat().st_size

    def complete(self, claim: Claim) -> None:
        """Mark the unit done with this claim's results, unless it was taken over; the first mark counts.

        The mark vouches for every result that was inherited or added, also for one that is gone: so its rows are
        computed again.
        """
        if self._store.get(self._run.claim(claim.unit, _next_name(claim.folder)) / CLAIM) is not None:
            note(f"warning: unit {claim.unit} was taken over by another worker while this one was not heard of")
        else:
            files = self._mine.get(claim.unit) or file_sizes([*claim.inherited])
            files |= file_sizes([path for path in own_files(claim.folder) if path not in files])
            mark_done(self._store, claim.unit, claim.folder, files, by=self._lease.path.name)
        self._mine.pop(claim.unit, None)
        self.completed.add(claim.unit)

    def _is_still_held(self, unit: int) -> bool:
        """Return whether the last claim that was listed lives, by one look at its worker's lease.

        After LEASE_S its claims are listed again: others may have taken the unit over since.
        """
        held = self._others.get(unit)
        is_recent = held is not None and time.monotonic() < held.listed_s + watch.LEASE_S
        if held is not None and is_recent and not self._watch.has_run_out(held.lease):
            return True
        self._others.pop(unit, None)
        return False


def file_sizes(files: list[Path]) -> dict[Path, int]:
    """Return the size of each file in bytes."""
    return {path: path.stat().st_size for path in files}


def mark_done(store: Storage, unit: int, claim: Path, files: dict[Path, int], *, by: str = "") -> None:
    """Mark a unit done with the results of a claim; the first mark counts.

    Args:
        claim: the claim's folder.
        files: its result files and their sizes in bytes.
        by: name of the worker's lease.
    """
    sizes = {path.relative_to(store.run.root).as_posix(): size for path, size in files.items()}
    mark = {"unit": unit, "claim": claim.name, "files": sizes, "by": by}
    store.create(store.run.done(unit), json_text(mark).encode())


def offer_first(store: Storage, unit: int, files: list[Path]) -> Path | None:
    """Create a unit's first claim, without a worker, for results that the next claim inherits.

    Returns:
        The claim's folder; None if the unit was claimed before.
    """
    if _last_claim(store, unit)[0] is not None:
        return None
    claim = store.run.claim(unit, _next_name(None))
    return claim if store.create(claim / CLAIM, _claim_document(store.run, None, files)) else None


def offer_again(store: Storage, unit: int, *, inherited: list[Path], fill: Callable[[Path], None]) -> bool:
    """Add a claim without a worker that inherits other results than the last claim; the next claim inherits these.

    Args:
        inherited: result files of earlier claims that count for the new one.
        fill: writes further result files into the folder that it is called with.

    Returns:
        False if another worker has claimed the unit meanwhile; nothing has changed then.
    """
    run, name = store.run, _next_name(_last_claim(store, unit)[0])
    # not in the claim's own folder: another worker may be quicker to create that claim
    folder = run.unit(unit) / f"kept-{secrets.token_hex(4)}"
    folder.mkdir(parents=True)
    fill(folder)
    files = own_files(folder)
    for path in files:
        store.put(path)
    if store.create(run.claim(unit, name) / CLAIM, _claim_document(run, None, [*inherited, *files])):
        return True
    store.delete_folder(folder)
    return False


def _claim_document(run: RunDir, lease: Path | None, inherited: list[Path]) -> bytes:
    """Return a claim's document; each is unique, so that a writer recognises the document that it wrote itself."""
    names = [path.relative_to(run.root).as_posix() for path in inherited]
    worker = "" if lease is None else lease.relative_to(run.root).as_posix()
    return json_text({"worker": worker, "inherited": names, "write": secrets.token_hex(8)}).encode()


def _last_claim(store: Storage, unit: int) -> tuple[Path | None, bytes | None]:
    """Return the folder of a unit's last claim, and the claim's document, None where that is gone.

    An empty folder is no claim: its worker has not created the document yet.
    """
    names = [name for name in store.names(store.run.unit(unit)) if name.isdecimal()]
    for name in sorted(names, key=int, reverse=True):
        folder = store.run.claim(unit, name)
        data = store.get(folder / CLAIM)
        if data is not None:
            return folder, data
        if not all(file.startswith(".") for file in store.names(folder)):
            return folder, store.get(folder / CLAIM)  # again: its worker may have created it between the two looks
    return None, None


def _next_name(last: Path | None) -> str:
    return "0000" if last is None else f"{int(last.name) + 1:04d}"


def _lease_in(data: bytes | None, claim: Path) -> Path | None:
    """Return the lease that a claim's document names, None if the claim has no worker.

    The lease of a damaged document is the document itself: it never changes, so it runs out.
    """
    try:
        worker = None if data is None else parse_json(data, claim / CLAIM, "worker", "inherited")["worker"]
    except DamagedFileError:
        return claim / CLAIM
    return claim.parents[2] / worker if worker else None


def _inherited_in(data: bytes | None, claim: Path) -> list[Path]:
    """Return the inherited results that a claim's document names, if they are of the claim's own unit."""
    path = claim / CLAIM
    try:
        if data is None:
            raise DamagedFileError(path, "it is gone")
        names = parse_json(data, path, "inherited")["inherited"]
    except DamagedFileError as error:
        note(f"warning: {error.path} is damaged ({error.reason}); what it inherits is computed again")
        return []
    files = [claim.parents[2] / name for name in names]
    return [file for file in files if file.parent.parent == claim.parent]


# ---- readers: of local files, which `Storage.fetch` brings


@dataclass(frozen=True, slots=True)
class DoneMark:
    """The document that says that a unit is done."""

    claim: Path  # whose results count
    files: dict[Path, int]  # its result files with their sizes; digests are in their names


def done_mark(run: RunDir, unit: int) -> DoneMark | None:
    """Return the mark of a unit, None while it is not done.

    Raises:
        DamagedFileError: it is damaged, or another unit's.
    """
    path = run.done(unit)
    if not path.exists():
        return None
    mark = read_json(path, "unit", "claim", "files", remedy=f"`batchinfer finish {run.root}` sets it aside")
    if mark["unit"] != unit:
        raise DamagedFileError(path, f"it is the mark of unit {mark['unit']}")
    return DoneMark(run.claim(unit, mark["claim"]), {run.root / name: size for name, size in mark["files"].items()})


def last_claim(run: RunDir, unit: int) -> Path | None:
    """Return the newest claim folder of a unit, None if the unit was never claimed."""
    claims = [path for path in _claim_folders(run.unit(unit)) if any(path.glob("[!.]*"))]
    return claims[-1] if claims else None


def result_files(claim: Path) -> list[Path]:
    """Return the result files that count for a claim: inherited ones first, then its own in order."""
    return _inherited_in(_content(claim / CLAIM), claim) + own_files(claim)


def counted_files(mark: DoneMark | None, claim: Path | None) -> list[Path]:
    """Return the result files that count for a unit: by its mark, or by its newest claim while it is not done."""
    if mark is not None:
        return list(mark.files)
    return [] if claim is None else result_files(claim)


def lease_of(claim: Path) -> Path | None:
    """Return the lease of a claim's worker, None if the worker has ended."""
    lease = _lease_in(_content(claim / CLAIM), claim)
    return lease if lease is not None and lease.exists() else None


def is_given_back(claim: Path) -> bool:
    """Return whether the worker of a claim has ended and said so; False if its lease is damaged."""
    lease = lease_of(claim)
    if lease is None:
        return True
    try:
        return bool(read_json(lease, "released")["released"])
    except DamagedFileError:
        return False


def num_claims(run: RunDir, unit: int) -> int:
    """Return how often a unit was claimed."""
    return len(_claim_folders(run.unit(unit)))


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _claim_folders(unit: Path) -> list[Path]:
    """Return the folders of a unit's claims, from the first to the last."""
    found = [path for path in unit.glob("[0-9]*") if path.name.isdecimal() and path.is_dir()]
    return sorted(found, key=lambda folder: int(folder.name))
