"""Who is alive, by objects in a bucket that a living process writes anew: nobody's clock is compared with another's.

    workers/<token>     a process that holds units
    locks/plan          who plans, finishes or retries

A lease holds a counter that its process raises every BEAT_S, each time only if nobody else has written (If-Match). It
has run out when a watcher has seen the same version for LEASE_S of its own monotonic clock; then the watcher may write
over exactly that version. An owner whose next write is refused knows that it was taken over.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from batchinfer.checked_json import json_text, parse_json
from batchinfer.data.bucket import Bucket, Found
from batchinfer.host_info import node_name, task_name, task_restarts
from batchinfer.progress import note
from batchinfer.records import ConfigError, StoreError
from batchinfer.run.liveness import is_dead, this_process

BEAT_S = 15.0
LEASE_S = 60.0
LOOK_S = 1.0  # at a lock whose owner may be dead
LOCK = "locks/plan"


def holder() -> dict[str, Any]:
    """Who this process is, as a lease says it."""
    return {**this_process(), "node": node_name(), "task": task_name(), "restarts": task_restarts()}


class Lease:
    """An object that this process writes anew while it lives."""

    def __init__(self, bucket: Bucket, name: str) -> None:
        self.name, self.token = name, secrets.token_hex(8)
        self.is_lost = False  # somebody else has written
        self._bucket, self._counter, self._version = bucket, 0, ""
        self._stopped = threading.Event()
        self._heart = threading.Thread(target=self._beat, name=f"lease {name}", daemon=True)

    def take(self, over: str | None = None) -> bool:
        """Begin: as a new object, or `over` a version that has run out; False when somebody else was quicker."""
        data = self._document(released=False)
        written = self._bucket.create(self.name, data) if over is None else self._bucket.replace(self.name, data, over)
        if written is None:
            return False
        self._version = written
        self._heart.start()
        return True

    def end(self, *, delete: bool) -> None:
        """Stop, and say so; where that fails the lease runs out."""
        self._stopped.set()
        self._heart.join()
        try:
            if delete:
                self._bucket.delete(self.name)
            elif not self.is_lost:
                self._bucket.replace(self.name, self._document(released=True), self._version)
        except StoreError as error:
            note(f"warning: {error}; others go on when the lease {self.name} has run out")

    def _document(self, *, released: bool) -> bytes:
        self._counter += 1
        said = {**holder(), "token": self.token, "counter": self._counter, "released": released}
        return json_text(said).encode()

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_S):
            try:
                written = self._bucket.replace(self.name, self._document(released=False), self._version)
            except StoreError as error:
                note(f"warning: cannot renew a lease: {error}")  # others may take over; results stay correct
                continue
            if written is None:
                self.is_lost = True
                note(f"warning: the lease {self.name} has run out and is gone; others have taken over")
                return
            self._version = written


class Watch:
    """What this process has seen of others' leases."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, float]] = {}  # name -> version, when it was first seen so

    def has_run_out(self, name: str, found: Found | None) -> bool:
        """Whether a lease's owner is gone: it said so, is known to be dead, or has not written for LEASE_S."""
        if found is None:
            return True
        try:
            said = parse_json(found.data, name, "released", "host", "pid", "process")
            if said["released"] or is_dead(said):
                return True
        except ConfigError:  # damaged: only its age can tell
            pass
        version, since = self._seen.get(name, ("", 0.0))
        if version != found.version:
            self._seen[name] = (found.version, time.monotonic())
            return False
        return time.monotonic() - since >= LEASE_S

    def lapses_s(self, name: str) -> float:
        """When, by the monotonic clock, a lease that was seen runs out unless it is renewed."""
        return self._seen[name][1] + LEASE_S


@contextmanager
def locked_in(bucket: Bucket, *, doing: str) -> Iterator[None]:
    """Hold the run's lock; waits for a lease that may have run out, not for an owner that lives.

    Raises:
        ConfigError: another process holds it.
    """
    lease, watch = Lease(bucket, LOCK), Watch()
    first: Found | None = None
    has_lock = lease.take()
    while not has_lock:
        found = bucket.read(LOCK)
        if found is None or watch.has_run_out(LOCK, found):
            has_lock = lease.take(over=None if found is None else found.version)
            continue
        if first is None:
            first = found
            note(f"{_owner(found)} plans or finishes {bucket.uri}, or was killed; this shows within {LEASE_S:g} s")
        elif first.version != found.version:
            raise ConfigError(f"{_owner(found)} plans or finishes {bucket.uri}; wait for it or stop it, then {doing}")
        time.sleep(LOOK_S)
    try:
        yield
    finally:
        lease.end(delete=False)


def _owner(found: Found) -> str:
    try:
        said = json.loads(found.data)
        return f"a process on {said['node']} ({said['pid']})"
    except (ValueError, KeyError):
        return "another process"
