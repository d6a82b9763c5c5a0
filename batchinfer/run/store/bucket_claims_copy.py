"""Done marks, results and claims of a run folder in an object store, copied to this node as a disk would have them.

Readers (finish, status, report, peek, verify) then look at files. Dates of files are moved by what this host's clock
differs from the store's, so that ages are right.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import PurePosixPath
from typing import Any

from batchinfer.checked_json import json_text, parse_json
from batchinfer.data.bucket import Bucket, Listed
from batchinfer.data.parquet import read_rows
from batchinfer.manifest import Manifest, file_checksums
from batchinfer.records import ConfigError, DamagedFileError
from batchinfer.rundir import RunDir, read_state
from batchinfer.whole_files import published

Each = Callable[[Callable[[Any], object], Iterable[Any]], None]
OLD_S = 3600.0  # a worker that has not written for so long


class ClaimsCopy:
    """See module docstring."""

    def __init__(self, bucket: Bucket, run: RunDir, each: Each) -> None:
        self._bucket, self._run, self._each = bucket, run, each
        self._done: set[int] = set()  # units whose marks were fetched
        self._leases: set[int] = set()  # units whose leases were
        self._have: dict[str, str] = {}  # versions of the objects that were fetched
        self._clock_s: float | None = None  # this host's less the store's

    def fetch_results(self) -> None:
        """Have every done mark, and the results that it names."""
        listed = {int(PurePosixPath(item.name).name): item for item in self._bucket.objects("done")}
        manifest = Manifest(self._run.root, read_state(self._run).get("files"))
        units = set(listed)
        if self._run.units in manifest:  # it is not while a plan is made again
            units |= {
                row["unit"] for row in read_rows(self._run.units, manifest)
            }  # the listing may be older than a mark
        self._each(lambda unit: self._fetch_mark(unit, listed.get(unit)), sorted(units))
        self._done = {unit for unit in units if self._run.done(unit).exists()}
        self._each(self._fetch_result, [item for unit in self._done for item in self._named(unit)])

    def fetch_open(self) -> None:
        """Have the claims of units that are not done, and their durable results."""
        workers = {item.name: item for item in self._bucket.objects("workers")}
        listed = [int(PurePosixPath(item.name).name) for item in self._bucket.objects("leases")]
        units = sorted(set(listed) - self._done)
        found: dict[int, dict[str, Any]] = {}

        def read(unit: int) -> None:
            lease = self._bucket.read(f"leases/{unit:06d}")
            if lease is not None:
                found[unit] = parse_json(lease.data, self._run.unit(unit) / "lease", "claim", "files", "worker")

        self._each(read, units)
        self._leases = set(found)
        for unit, lease in found.items():
            self._write_claim(unit, lease, workers.get(lease["worker"]))
        self._each(self._fetch_result, [item for lease in found.values() for item in lease["files"].items()])

    def fetch_signs(self) -> None:
        """Have the signs of life of sessions."""
        folder = self._run.heartbeat("x").parent
        listed = {item.name: item for item in self._bucket.objects("work/sessions")}
        for path in folder.glob("*.json"):
            if path.relative_to(self._run.root).as_posix() not in listed:
                path.unlink(missing_ok=True)
        for name, item in listed.items():
            with published(self._run.root / name) as temporary:
                is_there = self._bucket.fetch(name, temporary)
            if is_there:
                self.note(name, item)
            else:
                (self._run.root / name).unlink(missing_ok=True)

    def put_what_was_set_aside(self) -> None:
        """Do in the bucket what was done to the copy: marks and units that are under quarantine/ now."""
        for path in sorted(path for path in self._run.quarantine.rglob("*") if path.is_file()):
            self._bucket.put(path.relative_to(self._run.root).as_posix(), path)
        for unit in sorted(self._done):
            if not self._run.done(unit).exists():
                self._bucket.delete(f"done/{unit:06d}")
        for unit in sorted(self._leases | self._done):
            if not self._run.unit(unit).exists():
                self._bucket.delete(f"leases/{unit:06d}")

    def collect_garbage(self) -> None:
        """Delete results that no mark names, stale workers, and meetings and KV transfers of killed groups."""
        counted = {name for unit in self._done for name, _ in self._named(unit)}
        orphans = [item.name for item in self._bucket.objects("units") if item.name not in counted]
        workers = list(self._bucket.objects("workers"))
        now_s = time.time() - self._clock() if workers else 0.0
        orphans += [item.name for item in workers if now_s - item.written_s > OLD_S]
        left = ("work/meeting-", "work/transfers-")
        orphans += [item.name for item in self._bucket.objects("work") if item.name.startswith(left)]
        self._each(self._bucket.delete, orphans)

    def is_here(self, name: str, listed: Listed) -> bool:
        """Whether this process has fetched the version of an object that was listed."""
        return self._have.get(name) == listed.version and (self._run.root / name).exists()

    def note(self, name: str, listed: Listed) -> None:
        """An object was fetched: its copy gets its date, by this host's clock."""
        self._have[name] = listed.version
        date_s = listed.written_s + self._clock()
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
        if listed is not None:
            self.note(name, listed)

    def _named(self, unit: int) -> list[tuple[str, int]]:
        """The results that a unit's mark names; none when it is damaged, which its readers find."""
        try:
            mark = parse_json(self._run.done(unit).read_bytes(), self._run.done(unit), "unit", "claim", "files")
        except (ConfigError, FileNotFoundError):
            return []
        for number in range(int(mark["claim"]) + 1):  # as many as there were
            self._run.claim(unit, f"{number:04d}").mkdir(parents=True, exist_ok=True)
        return list(mark["files"].items())

    def _fetch_result(self, item: tuple[str, int]) -> None:
        name, num_bytes = item
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

    def _write_claim(self, unit: int, lease: dict[str, Any], worker: Listed | None) -> None:
        """A claim's folder; its date is the last sign of life of its worker."""
        folder = self._run.claim(unit, lease["claim"])
        folder.mkdir(parents=True, exist_ok=True)
        own = f"units/{unit:06d}/{lease['claim']}/"
        inherited = [name for name in lease["files"] if not name.startswith(own)]
        held_by = {**lease["holder"], "released": lease["released"]}
        for path, value in ((folder / "lease.json", held_by), (folder / "claim.json", {"inherited": inherited})):
            text = json_text(value)
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                with published(path) as temporary:
                    temporary.write_text(text, encoding="utf-8")
        date_s = 0.0 if worker is None else worker.written_s + self._clock()
        os.utime(folder / "lease.json", (date_s, date_s))

    def _clock(self) -> float:
        """Seconds that this host's clock is ahead of the store's, by an object that is written for it."""
        if self._clock_s is None:
            name = f"work/clock-{secrets.token_hex(4)}"
            self._bucket.put(name, b"now")
            written = [item.written_s for item in self._bucket.objects("work") if item.name == name]
            self._bucket.delete(name)
            self._clock_s = time.time() - written[0] if written else 0.0
        return self._clock_s
