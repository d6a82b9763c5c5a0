"""A run folder in an object store, and this node's copy of it.

    run.json                          put last, by a condition: what it vouches for is there
    job.toml  plan/… tokens/…         by their paths; plan and tokens with their digests in the name
    units/<unit>/<claim>/claim.json   created once: who has the unit, and the results that the claim inherits
    units/<unit>/<claim>/part-…       results of a claim; the claim that counts is the last one, or named by a done mark
    done/<unit>                       created once; names the results that count, with their sizes
    work/workers/… locks/plan         who is alive (watch.py, bucket_lease.py)
    stats/… outputs/… dataset/…       as on a disk;   work/sessions/… signs of life
    work/meeting-… work/transfers-…   of groups over several hosts: where they meet, and KV between them

Data goes first, then what names it. An object that nothing names is ignored, and deleted by the last `finish`. Listings
say what may be skipped, never what counts: what a stale one lacks is asked for by its name.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from batchinfer.checked_json import json_text, parse_json
from batchinfer.config import DEFAULT_S3, S3Config
from batchinfer.data.bucket import Bucket
from batchinfer.data.stores import s3_endpoint
from batchinfer.records import ConfigError
from batchinfer.run.store.bucket_copy import BucketCopy
from batchinfer.run.store.bucket_files import BucketFiles, copies_folder, make_copy
from batchinfer.run.store.bucket_lease import locked_in
from batchinfer.run.store.bucket_probe import check_bucket
from batchinfer.run.store.interface import Found, Listed, Storage
from batchinfer.run.store.lock import locked
from batchinfer.rundir import RunDir

# of what a plan leaves that was killed, or that has not committed yet
OWN_NAMES = {"job.toml", "plan", "tokens", "units", "done", "locks", "stats", "work", "quarantine"}


class BucketStorage(Storage):
    """See module docstring.

    Args:
        work_dir: folder for this node's copies; None: one of this user in the temporary folder.
    """

    beat_s = 15.0
    look_s = 1.0
    watch_s = math.inf  # each look is a request

    def __init__(self, uri: str, s3: S3Config = DEFAULT_S3, work_dir: str | None = None) -> None:
        self.bucket = Bucket(uri, s3)
        self.run = RunDir(_copy_of(self.bucket.uri, s3, work_dir), self.bucket.uri)
        self._files = BucketFiles(self.bucket, self.run)
        self.copy: BucketCopy = BucketCopy(self.bucket, self.run, self._files)

    def check(self) -> None:
        check_bucket(self.bucket)
        if not self.copy.has_run and self.bucket.read("run.json") is None:
            foreign = self.bucket.names() - OWN_NAMES
            if foreign:
                raise ConfigError(
                    f"output.dir {self.bucket.uri} holds {min(foreign)} but no run; choose an empty or a new folder"
                )

    @contextmanager
    def locked(self, *, doing: str) -> Iterator[None]:
        make_copy(self.run)
        with locked(self.run, doing=doing), locked_in(self.bucket, doing=doing):
            self.fetch("state")  # what the owner before has left
            try:
                yield
            finally:
                self.copy.put_what_was_set_aside()

    def create(self, path: Path, data: bytes) -> bool:
        return self.bucket.create(self._files.name(path), data) is not None

    def put(self, path: Path, data: bytes | None = None) -> None:
        if data is None:
            self._files.put_changed(path)
        else:
            self.bucket.put(self._files.name(path), data)

    def get(self, path: Path) -> bytes | None:
        return self._files.read(path)

    def find(self, path: Path) -> Found | None:
        found = self.bucket.read(self._files.name(path))
        return None if found is None else Found(found.data, found.version)

    def touch(self, path: Path, data: bytes) -> None:
        self.put(path, json_text({**parse_json(data, path), "write": secrets.token_hex(8)}).encode())

    def names(self, folder: Path) -> Iterable[str]:
        return self.bucket.names(self._files.name(folder))

    def list(self, folder: Path) -> Iterator[Listed]:
        for item in self.bucket.objects(self._files.name(folder)):
            yield Listed(self.run.root / item.name, item.num_bytes, item.written_s)

    def delete(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._files.delete(path)

    def delete_folder(self, folder: Path) -> None:
        self._files.delete_below(self._files.name(folder))

    def local(self, path: Path) -> Path:
        self._files.fetch(self._files.name(path), path)
        return path


def _copy_of(uri: str, s3: S3Config, work_dir: str | None) -> Path:
    """Return the folder of this node's copy."""
    name = hashlib.blake2b(f"{s3_endpoint(s3) or ''} {uri}".encode(), digest_size=8).hexdigest()
    return (copies_folder() if work_dir is None else Path(work_dir)) / name / PurePosixPath(uri).name
