"""Work units: claimed by one controller at a time, taken over when their controller is gone.

    units/000007/0000/lease.json      who works on it: host, process; its date changes while that lives
    units/000007/0000/claim.json      result files of earlier claims that count for this one
    units/000007/0000/part-00000-<digest>.parquet   see result_files.py
    done/000007                       the claim whose results count, and its result files; created once

A claim folder appears whole by one rename. A controller whose unit was taken over and that wakes up again writes into
its own old claim, whose later files nobody reads. When a lease has run out says lease_watch.py.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from batchinfer.checked_json import json_text, publish_json, read_json
from batchinfer.controller.lease_watch import LeaseWatch
from batchinfer.controller.result_files import own_files, sound_files
from batchinfer.host_info import node_name, task_name, task_restarts
from batchinfer.progress import note
from batchinfer.records import ConfigError, DamagedFileError
from batchinfer.run.liveness import is_dead, this_process
from batchinfer.rundir import RunDir
from batchinfer.whole_files import TEMPORARY, cannot_write, create_exclusively, remove_leftovers

HEARTBEAT_S = 5.0


@dataclass(frozen=True, slots=True)
class Claim:
    """A unit held by this process."""

    unit: int
    folder: Path
    inherited: tuple[Path, ...]  # result files of earlier claims

    @property
    def name(self) -> str:
        return self.folder.name


class UnitClaims:
    """Takes units for this process and keeps their leases alive."""

    watch_s = 15.0

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._held: dict[int, Claim] = {}
        self._watch = LeaseWatch()
        self.completed: set[int] = set()  # units
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="lease heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._heart.join()
        for claim in list(self._held.values()):
            try:
                self.release(claim)
            except ConfigError as error:
                note(f"warning: {error}; unit {claim.unit} is free when its lease runs out")

    def try_claim(self, unit: int) -> Claim | None:
        """Take a unit unless it is done or somebody alive holds it."""
        if self._watch.is_still_held(unit):
            return None
        if self._run.done(unit).exists():
            self._watch.forget(unit)
            return None
        earlier = _claim_folders(self._run.unit(unit))
        if earlier and self._watch.is_held(unit, earlier[-1]):
            return None
        inherited = sound_files(self._run, result_files(earlier[-1])) if earlier else []
        target = self._run.claim(unit, _next_name(earlier))
        with self._lock:
            claim = self._publish(unit, target, inherited)
            if claim is not None:
                self._held[unit] = claim
                self._watch.forget(unit)
        return claim

    def lapses_s(self, unit: int) -> float:
        """When, by the monotonic clock, the lease of a unit that others hold runs out unless it is renewed."""
        return self._watch.lapses_s(unit)

    def add(self, claim: Claim, path: Path) -> None:
        """On a file system a result file counts as soon as it has its name."""

    def commit(self, claim: Claim) -> None:
        """See `add`."""

    def complete(self, claim: Claim) -> None:
        """Mark the unit done with this claim's results; the first claim to say so counts."""
        files = [*claim.inherited, *own_files(claim.folder)]
        sizes = {path.relative_to(self._run.root).as_posix(): path.stat().st_size for path in files}
        mark = {"unit": claim.unit, "claim": claim.name, "files": sizes}
        create_exclusively(self._run.done(claim.unit), json_text(mark))
        self.completed.add(claim.unit)
        self.release(claim)

    def release(self, claim: Claim) -> None:
        """Give a unit back; what is committed in its claim stays and counts."""
        with self._lock:
            self._held.pop(claim.unit, None)
            publish_json(claim.folder / "lease.json", _lease(released=True))

    def _publish(self, unit: int, target: Path, inherited: list[Path]) -> Claim | None:
        made = _new_folder(self._run.unit(unit))
        names = [str(path.relative_to(self._run.root)) for path in inherited]
        # whole before anybody sees them: the folder gets its name afterwards
        _write(made / "lease.json", _lease(released=False))
        _write(made / "claim.json", {"inherited": names})
        if not _put(made, target):
            return None
        return Claim(unit, target, tuple(inherited))

    def _beat(self) -> None:
        while not self._stopped.wait(HEARTBEAT_S):
            with self._lock:
                for claim in self._held.values():
                    try:
                        os.utime(claim.folder / "lease.json")  # the file system's own time
                    except OSError as error:
                        # the lease may run out and another controller take over; results stay correct
                        note(f"warning: cannot renew the lease of unit {claim.unit}: {error.strerror}")


def result_files(claim: Path) -> list[Path]:
    """All result files that count for a claim: inherited ones first, then its own in order."""
    try:
        inherited = read_json(claim / "claim.json", "inherited")["inherited"]
    except DamagedFileError as error:
        note(f"warning: {error.path} is damaged ({error.reason}); what it inherits is computed again")
        inherited = []
    unit, run_root = claim.parent, claim.parent.parent.parent
    # only ever of its own unit: another unit's would be double
    return [run_root / name for name in inherited if (run_root / name).parent.parent == unit] + own_files(claim)


@dataclass(frozen=True, slots=True)
class DoneMark:
    """What says that a unit is done."""

    claim: Path  # whose results count
    files: dict[Path, int]  # its result files with their sizes; digests are in their names


def done_mark(run: RunDir, unit: int) -> DoneMark | None:
    """The mark of a unit; None while it is not done.

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
    """The newest claim folder of a unit, or None when nobody has claimed it."""
    folders = _claim_folders(run.unit(unit))
    return folders[-1] if folders else None


def counted_files(mark: DoneMark | None, claim: Path | None) -> list[Path]:
    """The result files that count for a unit: by its mark, or by its newest claim while it is not done."""
    if mark is not None:
        return list(mark.files)
    return [] if claim is None else result_files(claim)


def is_released(claim: Path) -> bool:
    """Whether its controller has given the unit back; with a damaged lease nobody knows: no."""
    try:
        return bool(read_json(claim / "lease.json", "released")["released"])
    except DamagedFileError:
        return False


def offer_again(run: RunDir, unit: int, *, inherited: list[Path], fill: Callable[[Path], None]) -> bool:
    """Add a claim that nobody holds, with other results than the last one's; whoever claims next inherits them.

    Args:
        inherited: result files of earlier claims that count for the new one.
        fill: writes further result files into the folder it gets.

    Returns:
        False when somebody else claimed the unit meanwhile; nothing has changed then.
    """
    name = _next_name(_claim_folders(run.unit(unit)))
    made = _new_folder(run.unit(unit))
    _write(made / "lease.json", _lease(released=True))
    _write(made / "claim.json", {"inherited": [str(path.relative_to(run.root)) for path in inherited]})
    fill(made)
    return _put(made, run.claim(unit, name))


def num_claims(run: RunDir, unit: int) -> int:
    """How often the unit was claimed."""
    return len(_claim_folders(run.unit(unit)))


def _next_name(folders: list[Path]) -> str:
    """Behind all these claims, also where one of them was deleted: a name that is taken could never be had."""
    return f"{int(folders[-1].name) + 1:04d}" if folders else "0000"


def _lease(*, released: bool) -> dict[str, Any]:
    """Who holds a unit, as the lease says it."""
    return {
        **this_process(),
        "node": node_name(),
        "task": task_name(),
        "restarts": task_restarts(),
        "released": released,
    }


def _new_folder(unit: Path) -> Path:
    """A claim folder without a name yet; those that dead processes left in a unit claimed before are deleted.

    Raises:
        ConfigError: the disk is full or read only.
    """
    made = unit / f".claim-{secrets.token_hex(6)}{TEMPORARY}"
    try:
        try:
            unit.mkdir(parents=True)
        except FileExistsError:
            _remove_nameless(unit)
        made.mkdir()
    except OSError as error:
        raise cannot_write(unit, error) from None
    return made


def _remove_nameless(unit: Path) -> None:
    """Delete claim folders that never got a name: those of the known dead at once, others when they are old."""
    nameless = list(unit.glob(f".claim-*{TEMPORARY}"))
    for made in nameless:
        try:
            if is_dead(read_json(made / "lease.json", "host", "pid", "process")):
                shutil.rmtree(made)
        except (ConfigError, FileNotFoundError):  # not written that far, or deleted by another process
            continue
    if nameless:
        remove_leftovers(unit)


def _write(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON document into a folder that nobody knows yet.

    Raises:
        ConfigError: the disk is full or read only.
    """
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(json_text(value))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(path, error) from None


def _put(made: Path, target: Path) -> bool:
    """Give a finished claim folder its name; False when another process was quicker: its folder is not empty."""
    try:
        made.rename(target)
    except OSError as error:
        # on NFS it may be done and the answer lost: asked again, the server finds nothing to rename
        if error.errno == errno.ENOENT and _is_own(target):
            return True
        shutil.rmtree(made, ignore_errors=True)
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise cannot_write(target, error) from None
        return False
    return True


def _is_own(claim: Path) -> bool:
    """Whether this process made a claim."""
    try:
        lease = read_json(claim / "lease.json")
    except DamagedFileError:
        return False
    return this_process().items() <= lease.items()


def _claim_folders(unit: Path) -> list[Path]:
    """From the first to the last."""
    try:
        with os.scandir(unit) as entries:
            found = [Path(entry.path) for entry in entries if entry.name.isdecimal() and entry.is_dir()]
    except FileNotFoundError:  # nobody has claimed it yet
        return []
    return sorted(found, key=lambda folder: int(folder.name))
