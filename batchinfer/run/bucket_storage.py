"""A run folder in an object store, and this node's copy of it.

    run.json                          put last, by a condition: what it vouches for is there
    job.toml  plan/… tokens/…         by their paths; plan and tokens with their digests in the name
    leases/<unit>                     who works on a unit, and its durable results (controller/bucket_claims.py)
    units/<unit>/<claim>/part-…       results; those count that a lease or a done mark names
    done/<unit>                       created once; names the results that count, with their sizes
    workers/… locks/plan              who is alive (bucket_lease.py)
    stats/… outputs/… dataset/…       as on a disk;   work/sessions/… signs of life
    work/meeting-… work/transfers-…   of groups over several hosts: where they meet, and KV between them

Data goes first, then what names it. An object that nothing names is ignored, and deleted by the last `finish`. Listings
say what may be skipped, never what counts: what a stale one lacks is asked for by its name.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from batchinfer.checked_json import publish_json
from batchinfer.config import DEFAULT_S3, S3Config
from batchinfer.data.bucket import Bucket
from batchinfer.data.stores import s3_endpoint
from batchinfer.manifest import Checksums, Manifest
from batchinfer.records import ConfigError, DamagedFileError
from batchinfer.run.bucket_claims_copy import ClaimsCopy
from batchinfer.run.bucket_files import BucketFiles, clear_copy, copies_folder, make_copy, part_of
from batchinfer.run.bucket_lease import locked_in
from batchinfer.run.bucket_probe import check_bucket
from batchinfer.run.lock import locked
from batchinfer.run.storage import MADE, Part
from batchinfer.rundir import RunDir, read_state
from batchinfer.whole_files import published

# of what a plan leaves that was killed, or that has not committed yet
OWN_NAMES = {"job.toml", "plan", "tokens", "leases", "units", "done", "workers", "locks", "stats", "work", "quarantine"}


class BucketStorage:
    """See module docstring; implements storage.Storage.

    Args:
        work_dir: folder for this node's copies; None: one of this user in the temporary folder.
    """

    beat_s = 15.0
    look_s = 1.0

    def __init__(self, uri: str, s3: S3Config = DEFAULT_S3, work_dir: str | None = None) -> None:
        self.bucket = Bucket(uri, s3)
        self.uri = self.bucket.uri
        self.run = RunDir(_copy_of(self.uri, s3, work_dir), self.uri)
        self._version: str | None = None  # of run.json, as last fetched or committed
        self._vouched: dict[str, Checksums] = {}  # by it
        self._files = BucketFiles(self.bucket, self.run)
        self._claims = ClaimsCopy(self.bucket, self.run, self._files.each)

    def check(self) -> None:
        check_bucket(self.bucket)
        if self._version is None and self.bucket.read("run.json") is None:
            foreign = self.bucket.top_names() - OWN_NAMES
            if foreign:
                raise ConfigError(
                    f"output.dir {self.uri} holds {min(foreign)} but no run; choose an empty or a new folder"
                )

    @contextmanager
    def locked(self, *, doing: str) -> Iterator[None]:
        make_copy(self.run)
        with locked(self.run, doing=doing), locked_in(self.bucket, doing=doing):
            self.fetch("state")  # what the owner before has left
            try:
                yield
            finally:
                self._claims.put_what_was_set_aside()

    def fetch(self, *parts: Part) -> None:
        if "state" in parts:
            self._fetch_state()
        if self._version is None:
            return
        manifest = Manifest(self.run.root, read_state(self.run).get("files"))
        wanted = [path for path in manifest if part_of(path, self.run) in parts]
        self._files.each(lambda path: self._files.fetch_vouched(path, manifest[path]), wanted)
        if "results" in parts:
            self._claims.fetch_results()
        if "claims" in parts:
            self._claims.fetch_open()
        if "stats" in parts:
            self._fetch_statistics()
        if "signs" in parts:
            self._claims.fetch_signs()
        if "sent" in parts:
            self._files.fetch_sent()

    def names(self, folder: Path) -> Iterable[str]:
        prefix = "leases" if folder == self.run.unit_folders else "done"
        return [PurePosixPath(item.name).name for item in self.bucket.objects(prefix)]

    def keep(self, path: Path) -> None:
        self._files.put(path)

    def kept(self, path: Path) -> bytes | None:
        return self._files.read(path)

    def keep_sent(self) -> None:
        self._files.keep_sent()

    def keep_statistics(self, session: str) -> None:
        for path in sorted(self.run.stats.glob(f"*/{session}*.parquet")):
            self._files.put_changed(path)

    def forget(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.bucket.delete(self._files.name(path))

    def forget_folder(self, folder: Path) -> None:
        self._files.delete_below(self._files.name(folder))

    def commit(self, *, anew: bool = False) -> None:
        state = read_state(self.run)
        if MADE not in state:
            for folder in ("done", "leases", "units", "stats"):  # of an earlier run here; nothing of this was computed
                self._files.delete_below(folder)
            state[MADE] = secrets.token_hex(8)
            publish_json(self.run.run_json, state)
        manifest = Manifest(self.run.root, state.get("files"))
        named = {self._files.vouched_name(path, manifest[path]): path for path in manifest}
        due = [name for name, path in named.items() if anew or self._vouched.get(name) != manifest[path]]
        self._files.each(lambda name: self.bucket.put(name, named[name]), due)
        others = [self.run.job, *self.run.stats.glob("*/*-lost.parquet")]
        others += set(self.run.stats.glob("*.parquet")).difference(manifest)
        single = (self.run.published, self.run.trace, self.run.dataset / "README.md")
        others += [path for path in single if path.exists()]
        self._files.each(self._files.put_changed, others)
        data = self.run.run_json.read_bytes()
        if self._version is None:
            written = self.bucket.create("run.json", data)
        else:
            written = self.bucket.replace("run.json", data, self._version)
        if written is None:
            raise ConfigError(
                f"another process has planned or finished {self.uri} meanwhile; run the same command again, which goes "
                "on from what is there now"
            )
        self._files.each(self.bucket.delete, sorted(self._vouched.keys() - named.keys()))
        self._note_vouched(manifest, written)

    def sweep(self) -> None:
        """Results that no done mark names, of claims that were taken over; and workers that are gone."""
        self._claims.sweep()

    # ---- state and files

    def _fetch_state(self) -> None:
        make_copy(self.run)
        found = self.bucket.read("run.json")
        local = _made(self.run)
        if found is None:
            # a plan of this node that was interrupted goes on; anything else is of a run that is gone
            if local is not None and not (local["state"] == "planning" and MADE not in local):
                clear_copy(self.run)
            self._version, self._vouched = None, {}
            return
        if found.version == self._version:
            return
        with published(self.run.run_json) as temporary:
            temporary.write_bytes(found.data)
        state = read_state(self.run)
        if local is None or local.get(MADE) != state.get(MADE):
            clear_copy(self.run)
            with published(self.run.run_json) as temporary:
                temporary.write_bytes(found.data)
        with published(self.run.job) as temporary:
            self.bucket.fetch("job.toml", temporary)
        self._note_vouched(Manifest(self.run.root, state.get("files")), found.version)

    def _note_vouched(self, manifest: Manifest, version: str) -> None:
        self._version = version
        self._vouched = {self._files.vouched_name(path, manifest[path]): manifest[path] for path in manifest}

    def _fetch_statistics(self) -> None:
        listed = {item.name: item for item in self.bucket.objects("stats")}
        due = [name for name, item in listed.items() if not self._claims.is_here(name, item)]
        self._files.each(lambda name: self._files.fetch(name, self.run.root / name), due)
        for name in due:
            self._claims.note(name, listed[name])
            self._files.note_kept(self.run.root / name)


def _made(run: RunDir) -> dict[str, Any] | None:
    try:
        return read_state(run)
    except DamagedFileError:
        return None


def _copy_of(uri: str, s3: S3Config, work_dir: str | None) -> Path:
    """Where this node's copy is."""
    name = hashlib.blake2b(f"{s3_endpoint(s3) or ''} {uri}".encode(), digest_size=8).hexdigest()
    return (copies_folder() if work_dir is None else Path(work_dir)) / name / PurePosixPath(uri).name
