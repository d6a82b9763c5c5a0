"""A run folder in an object store, and this node's copy of it.

    run.json                          put last, by a condition: what it vouches for is there
    job.toml  plan/… tokens/…         by their paths; plan and tokens with their digests in the name
    leases/<unit>                     who works on a unit, and its durable results (controller/bucket_claims.py)
    units/<unit>/<claim>/part-…       results; those count that a lease or a done mark names
    done/<unit>                       created once; names the results that count, with their sizes
    workers/… locks/plan              who is alive (bucket_lease.py)
    stats/… outputs/… dataset/…       as on a disk;   work/sessions/… signs of life

Data goes first, then what names it. An object that nothing names is ignored, and deleted by the last `finish`. Listings
say what may be skipped, never what counts: what a stale one lacks is asked for by its name.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from batchinfer.config import DEFAULT_S3, S3Config
from batchinfer.data.bucket import Bucket, check_bucket
from batchinfer.data.stores import s3_endpoint
from batchinfer.manifest import Checksums, Manifest, file_checksums
from batchinfer.ownership import check_folder, make_folder
from batchinfer.records import ConfigError, DamagedFileError
from batchinfer.run.bucket_claims_copy import ClaimsCopy
from batchinfer.run.bucket_lease import locked_in
from batchinfer.run.lock import locked
from batchinfer.run.storage import MADE, Part
from batchinfer.rundir import RunDir, publish_json, published, read_state

TRANSFERS = 8  # at a time
DIGEST_LETTERS = 16


class BucketStorage:
    """See module docstring; implements storage.Storage.

    Args:
        work_dir: folder for this node's copies; None: one of this user in the temporary folder.
    """

    beat_s = 15.0

    def __init__(self, uri: str, s3: S3Config = DEFAULT_S3, work_dir: str | None = None) -> None:
        self.bucket = Bucket(uri, s3)
        self.uri, self._work_dir = self.bucket.uri, work_dir
        endpoint = s3_endpoint(s3) or ""
        name = hashlib.blake2b(f"{endpoint} {self.uri}".encode(), digest_size=8).hexdigest()
        self._parent = Path(work_dir) if work_dir is not None else _own_temporary_folder()
        self.run = RunDir(self._parent / name / PurePosixPath(self.uri).name, self.uri)
        self._version: str | None = None  # of run.json, as last fetched or committed
        self._vouched: dict[str, Checksums] = {}  # by it
        self._kept: dict[Path, tuple[int, int]] = {}  # files that were put, as they were then
        self._claims = ClaimsCopy(self.bucket, self.run, self._each)

    def check(self) -> None:
        check_bucket(self.bucket)

    @contextmanager
    def locked(self, *, doing: str) -> Iterator[None]:
        self._make_folder()
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
        wanted = [path for path in manifest if _part_of(path, self.run) in parts]
        self._each(lambda path: self._fetch_file(self._object(path, manifest[path]), path, manifest[path]), wanted)
        if "results" in parts:
            self._claims.fetch_results()
        if "claims" in parts:
            self._claims.fetch_open()
        if "stats" in parts:
            self._fetch_statistics()
        if "signs" in parts:
            self._claims.fetch_signs()

    def names(self, folder: Path) -> Iterable[str]:
        prefix = "leases" if folder == self.run.unit_folders else "done"
        return [PurePosixPath(item.name).name for item in self.bucket.objects(prefix)]

    def keep(self, path: Path) -> None:
        self.bucket.put(self._name(path), path)

    def keep_statistics(self, session: str) -> None:
        for path in sorted(self.run.stats.glob(f"*/{session}*.parquet")):
            self._keep_changed(path)

    def forget(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.bucket.delete(self._name(path))

    def commit(self) -> None:
        state = read_state(self.run)
        if MADE not in state:
            self._clear_bucket()
            state[MADE] = secrets.token_hex(8)
            publish_json(self.run.run_json, state)
        manifest = Manifest(self.run.root, state.get("files"))
        due = [path for path in manifest if self._vouched.get(self._object(path, manifest[path])) != manifest[path]]
        self._each(lambda path: self.bucket.put(self._object(path, manifest[path]), path), due)
        others = [self.run.job, *self.run.stats.glob("*.parquet"), *self.run.stats.glob("*/*-lost.parquet")]
        single = (self.run.published, self.run.trace, self.run.dataset / "README.md")
        others += [path for path in single if path.exists()]
        self._each(self._keep_changed, others)
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
        gone = self._vouched.keys() - {self._object(path, manifest[path]) for path in manifest}
        self._each(self.bucket.delete, sorted(gone))
        self._note_vouched(manifest, written)

    def sweep(self) -> None:
        """Results that no done mark names, of claims that were taken over; and workers that are gone."""
        self._claims.sweep()

    # ---- state and files

    def _fetch_state(self) -> None:
        self._make_folder()
        found = self.bucket.read("run.json")
        local = _made(self.run)
        if found is None:
            # a plan of this node that was interrupted goes on; anything else is of a run that is gone
            if local is not None and not (local["state"] == "planning" and MADE not in local):
                self._clear()
            self._version, self._vouched = None, {}
            return
        if found.version == self._version:
            return
        with published(self.run.run_json) as temporary:
            temporary.write_bytes(found.data)
        state = read_state(self.run)
        if local is None or local.get(MADE) != state.get(MADE):
            self._clear()
            with published(self.run.run_json) as temporary:
                temporary.write_bytes(found.data)
        with published(self.run.job) as temporary:
            self.bucket.fetch("job.toml", temporary)
        self._note_vouched(Manifest(self.run.root, state.get("files")), found.version)

    def _note_vouched(self, manifest: Manifest, version: str) -> None:
        self._version = version
        self._vouched = {self._object(path, manifest[path]): manifest[path] for path in manifest}

    def _fetch_file(self, name: str, path: Path, checksums: Checksums) -> None:
        """Have a file that somebody vouches for; what is damaged in the store comes as it is, for readers to find."""
        try:
            if path.stat().st_size == checksums.num_bytes and file_checksums(path) == checksums:
                return
        except (OSError, DamagedFileError):
            pass
        self._download(name, path)

    def _download(self, name: str, path: Path) -> None:
        with published(path) as temporary:
            if not self.bucket.fetch(name, temporary):
                raise DamagedFileError(path, f"{self.uri}/{name} is gone")

    def _fetch_statistics(self) -> None:
        listed = {item.name: item for item in self.bucket.objects("stats")}
        due = [name for name, item in listed.items() if not self._claims.is_here(name, item)]
        self._each(lambda name: self._download(name, self.run.root / name), due)
        for name in due:
            self._claims.note(name, listed[name])
            self._kept[self.run.root / name] = _as_it_is(self.run.root / name)

    def _keep_changed(self, path: Path) -> None:
        now = _as_it_is(path)
        if self._kept.get(path) != now:
            self.keep(path)
            self._kept[path] = now

    def _each(self, call: Callable[[Any], object], items: Iterable[Any]) -> None:
        with ThreadPoolExecutor(TRANSFERS) as pool:
            for _ in pool.map(call, items):
                pass

    def _name(self, path: Path) -> str:
        return path.relative_to(self.run.root).as_posix()

    def _object(self, path: Path, checksums: Checksums) -> str:
        """The object of a file that run.json vouches for. Plans have their digest in the name: a process that has lost
        its lock, and does not know yet, cannot write over the plan of the one that has it now."""
        if _part_of(path, self.run) == "outputs":
            return self._name(path)
        return self._name(path.with_name(f"{path.stem}-{checksums.digest[:DIGEST_LETTERS]}{path.suffix}"))

    def _make_folder(self) -> None:
        """This node's copy, which nobody else may write in."""
        try:
            self._parent.parent.mkdir(parents=True, exist_ok=True)
            for folder in (self._parent, self.run.root.parent):
                make_folder(folder, None)
            make_folder(self.run.root, None)
            check_folder(self.run.root, None, setting="output.work_dir")
        except OSError as error:
            raise ConfigError(
                f"cannot make this node's copy of {self.uri} in {self._parent}: {error.strerror or error}; choose "
                "another output.work_dir"
            ) from None

    def _clear_bucket(self) -> None:
        """Delete what an earlier run in this place has left, of which nothing was computed."""
        for folder in ("done", "leases", "units", "stats"):
            self._each(self.bucket.delete, [item.name for item in self.bucket.objects(folder)])

    def _clear(self) -> None:
        """Delete what is of another run."""
        for path in self.run.root.iterdir():
            if path != self.run.lock:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _part_of(path: Path, run: RunDir) -> Part:
    """The part of a run folder that a file of its manifest belongs to."""
    if path.is_relative_to(run.outputs) or path.is_relative_to(run.dataset):
        return "outputs"
    return "tokens" if path.parent == run.tokens(0).parent else "plan"


def _made(run: RunDir) -> dict[str, Any] | None:
    try:
        return read_state(run)
    except DamagedFileError:
        return None


def _as_it_is(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _own_temporary_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"batchinfer-{os.getuid()}"
