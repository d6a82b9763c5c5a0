"""Done marks, results and claims of a run folder in an object store, copied to this node as a disk would have them.

Readers (finish, status, report, peek, verify) then look at files. Dates of files are moved by what this host's clock
differs from the store's, so that ages are right.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from batchinfer.checked_json import parse_json, read_json
from batchinfer.data.bucket import Bucket, Listed
from batchinfer.data.parquet import read_rows
from batchinfer.manifest import Manifest, file_checksums
from batchinfer.records import ConfigError, DamagedFileError
from batchinfer.rundir import CLAIM, RunDir, read_state, worker_lease
from batchinfer.whole_files import published

Each = Callable[[Callable[[Any], object], Iterable[Any]], None]
OLD_S = 3600.0  # a worker that has not written for so long


class ClaimsCopy:
    """Copier of done marks, results, claims and leases between the bucket and this node."""

    def __init__(self, bucket: Bucket, run: RunDir, each: Each) -> None:
        self._bucket, self._run, self._each = bucket, run, each
        self._done, self._open = set[int](), set[int]()  # units whose marks were fetched, or their last claims
        self._have: dict[str, str] = {}  # versions of the objects that were fetched
        self._clock_s: float | None = None  # this host's less the store's

    def fetch_results(self) -> None:
        """Fetch every done mark and the results that it names."""
        listed = {int(PurePosixPath(item.name).name): item for item in self._bucket.objects("done")}
        manifest = Manifest(self._run.root, read_state(self._run).get("files"))
        units = set(listed)
        if self._run.units in manifest:  # it is not while a plan is made again
            rows = read_rows(self._run.units, manifest)
            units |= {row["unit"] for row in rows}  # the listing may be older than a mark
        self._each(lambda unit: self._fetch_mark(unit, listed.get(unit)), sorted(units))
        self._done = {unit for unit in units if self._run.done(unit).exists()}
        dates = {unit: self._run.done(unit).stat().st_mtime for unit in self._done}
        self._each(self._fetch_result, [(*item, dates[unit]) for unit in self._done for item in self._named(unit)])

    def fetch_open(self) -> None:
        """Fetch the last claims of units that are not done, the results that count for them, and workers' leases."""
        self._mirror(worker_lease(self._run, "x").parent)
        begun = {int(name) for name in self._bucket.names("units") if name.isdecimal()}
        self._open = begun - self._done
        found: list[tuple[str, int, float]] = []
        self._each(lambda unit: found.extend(self._fetch_claim(unit)), sorted(self._open))
        self._each(self._fetch_result, found)

    def fetch_signs(self) -> None:
        """Fetch the heartbeats of sessions."""
        self._mirror(self._run.heartbeat("x").parent)

    def _mirror(self, folder: Path) -> None:
        """Make the copy of a folder equal to the bucket's: the same documents with their dates."""
        listed = {item.name: item for item in self._bucket.objects(folder.relative_to(self._run.root).as_posix())}
        for path in folder.glob("[!.]*"):
            if path.relative_to(self._run.root).as_posix() not in listed:
                path.unlink(missing_ok=True)
        for name, item in listed.items():
            with published(self._run.root / name) as temporary:
                is_there = self._bucket.fetch(name, temporary)
            if is_there:
                self.note(name, item)
            else:
                (self._run.root / name).unlink(missing_ok=True)

    def _fetch_claim(self, unit: int) -> list[tuple[str, int, float]]:
        """Fetch the document of a unit's last claim; return names, sizes and dates of the results that it may count."""
        self._run.unit(unit).mkdir(parents=True, exist_ok=True)
        listed = {item.name: item for item in self._bucket.objects(f"units/{unit:06d}")}
        numbers = [parts[2] for name in listed if (parts := name.split("/"))[2].isdecimal()]
        for number in set(numbers):
            self._run.claim(unit, number).mkdir(parents=True, exist_ok=True)
        if not numbers:
            return []
        name = f"units/{unit:06d}/{max(numbers, key=int)}/{CLAIM}"
        path = self._run.root / name
        if name in listed and not self.is_here(name, listed[name]):
            with published(path) as temporary:
                self._bucket.fetch(name, temporary)
            self.note(name, listed[name])
        own = {found for found in listed if found.startswith(name.removesuffix(CLAIM) + "part-")}
        counted = sorted(own.union(_inherited(path)).intersection(listed))
        return [(found, listed[found].num_bytes, self._date_s(listed[found])) for found in counted]

    def put_what_was_set_aside(self) -> None:
        """Move marks and units to quarantine/ in the bucket, as was done in the copy."""
        for path in sorted(path for path in self._run.quarantine.rglob("*") if path.is_file()):
            self._bucket.put(path.relative_to(self._run.root).as_posix(), path)
        for unit in sorted(self._done):
            if not self._run.done(unit).exists():
                self._bucket.delete(f"done/{unit:06d}")
        for unit in sorted(self._open | self._done):
            if not self._run.unit(unit).exists():
                self._each(self._bucket.delete, [item.name for item in self._bucket.objects(f"units/{unit:06d}")])

    def collect_garbage(self) -> None:
        """Delete results that no mark names, stale workers, and meetings and KV transfers of killed groups."""
        counted = {name for unit in self._done for name, _ in self._named(unit)}
        results = (item.name for item in self._bucket.objects("units") if not item.name.endswith(f"/{CLAIM}"))
        orphans = [name for name in results if name not in counted]
        workers = list(self._bucket.objects("work/workers"))
        now_s = time.time() - self._clock() if workers else 0.0
        orphans += [item.name for item in workers if now_s - item.written_s > OLD_S]
        left = ("work/meeting-", "work/transfers-")
        orphans += [item.name for item in self._bucket.objects("work") if item.name.startswith(left)]
        self._each(self._bucket.delete, orphans)

    def is_here(self, name: str, listed: Listed) -> bool:
        """Return whether the copy has the listed version of an object, fetched by this process."""
        return self._have.get(name) == listed.version and (self._run.root / name).exists()

    def note(self, name: str, listed: Listed) -> None:
        """Give the copy of a fetched object the object's date, by this host's clock."""
        self._have[name] = listed.version
        date_s = self._date_s(listed)
        os.utime(self._run.root / name, (date_s, date_s))

    def _fetch_mark(self, unit: int, listed: Listed | None) -> None:
        path, name = self._run.done(unit), f"done/{unit:06d}"
        if listed is not None and self.is_here(name, listed):
            return
        found = self._bucket.read(name)
        if found is None:
            path.unlink(missing_ok=True)
            return
        with published(path) as temporary:
            temporary.write_bytes(found.data)
        # also of a damaged mark: a unit without a folder is one that was set aside
        self._run.unit(unit).mkdir(parents=True, exist_ok=True)
        if listed is not None:
            self.note(name, listed)

    def _named(self, unit: int) -> list[tuple[str, int]]:
        """Return the results that a unit's mark names; [] if the mark is damaged, which its readers find."""
        try:
            mark = parse_json(self._run.done(unit).read_bytes(), self._run.done(unit), "unit", "claim", "files")
        except (ConfigError, FileNotFoundError):
            return []
        for number in range(int(mark["claim"]) + 1):  # as many as there were
            self._run.claim(unit, f"{number:04d}").mkdir(parents=True, exist_ok=True)
        return list(mark["files"].items())

    def _fetch_result(self, item: tuple[str, int, float]) -> None:
        """Fetch a result, of which name, size and date are given, if it is not here; speeds go by its date."""
        name, num_bytes, date_s = item
        path = self._run.root / name
        try:
            if path.stat().st_size == num_bytes and path.stem.endswith(file_checksums(path).digest):
                return
        except (OSError, DamagedFileError):  # not here, or damaged: it is fetched
            pass
        with published(path) as temporary:
            if not self._bucket.fetch(name, temporary):
                temporary.write_bytes(b"")  # it is gone: no digest fits
        if not path.stat().st_size:
            path.unlink()
            return
        os.utime(path, (date_s, date_s))

    def _date_s(self, listed: Listed) -> float:
        return listed.written_s + self._clock()

    def _clock(self) -> float:
        """Return the seconds that this host's clock is ahead of the store's, by writing an object."""
        if self._clock_s is None:
            name = f"work/clock-{secrets.token_hex(4)}"
            self._bucket.put(name, b"now")
            written = [item.written_s for item in self._bucket.objects("work") if item.name == name]
            self._bucket.delete(name)
            self._clock_s = time.time() - written[0] if written else 0.0
        return self._clock_s


def _inherited(path: Path) -> list[str]:
    """Return the results that a claim's document names, [] if the document is damaged, which its readers find."""
    try:
        names: list[str] = read_json(path, "inherited")["inherited"]
    except DamagedFileError:
        return []
    return names
