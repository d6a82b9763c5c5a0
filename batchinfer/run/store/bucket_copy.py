"""Working copy of a run folder in an object store, on this node: fetched in parts, committed by run.json."""

from __future__ import annotations

import secrets
from typing import Any

from batchinfer.checked_json import publish_json
from batchinfer.data.bucket import Bucket
from batchinfer.manifest import Checksums, Manifest
from batchinfer.records import ConfigError, DamagedFileError
from batchinfer.run.store.bucket_claims_copy import ClaimsCopy
from batchinfer.run.store.bucket_files import BucketFiles, clear_copy, make_copy, part_of
from batchinfer.run.store.interface import MADE, Part
from batchinfer.rundir import RunDir, read_state
from batchinfer.whole_files import published


class BucketCopy:
    """See module docstring; implements interface.WorkingCopy."""

    def __init__(self, bucket: Bucket, run: RunDir, files: BucketFiles) -> None:
        self.bucket, self.run, self._files = bucket, run, files
        self._version: str | None = None  # of run.json, as last fetched or committed
        self._vouched: dict[str, Checksums] = {}  # by it
        self._claims = ClaimsCopy(bucket, run, files.each)

    @property
    def has_run(self) -> bool:
        """Whether run.json existed at the last fetch or commit."""
        return self._version is not None

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

    def commit(self, *, again: bool) -> None:
        state = read_state(self.run)
        if MADE not in state:
            for folder in ("done", "units", "stats"):  # of an earlier run here; nothing of this was computed
                self._files.delete_below(folder)
            state[MADE] = secrets.token_hex(8)
            publish_json(self.run.run_json, state)
        manifest = Manifest(self.run.root, state.get("files"))
        named = {self._files.vouched_name(path, manifest[path]): path for path in manifest}
        due = [name for name, path in named.items() if again or self._vouched.get(name) != manifest[path]]
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
                f"another process has planned or finished {self.bucket.uri} meanwhile; run the same command again, "
                "which goes on from what is there now"
            )
        self._files.each(self.bucket.delete, sorted(self._vouched.keys() - named.keys()))
        self._note_vouched(manifest, written)

    def collect_garbage(self) -> None:
        """Delete results that no done mark names, and stale workers."""
        self._claims.collect_garbage()

    def put_what_was_set_aside(self) -> None:
        """Move the done marks and units to quarantine/ in the bucket that were moved there in the copy."""
        self._claims.put_what_was_set_aside()

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
