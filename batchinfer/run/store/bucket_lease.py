"""The lock of a run in a bucket: a lease that its owner renews, and that another process may take over (watch.py).

    locks/plan          who plans, finishes or retries

The lease holds a counter that its process raises every BEAT_S, each time only if nobody else has written (If-Match).
When it has run out another process may write over exactly the version that it has read. An owner whose next write is
refused knows that it was taken over.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from batchinfer.checked_json import json_text
from batchinfer.data.bucket import Bucket, Found
from batchinfer.host_info import node_name, task_name, task_restarts
from batchinfer.progress import note
from batchinfer.records import RunBusyError, StoreError
from batchinfer.run.liveness import this_process
from batchinfer.run.store import watch
from batchinfer.run.store.watch import Watch

BEAT_S = 15.0
LOOK_S = 1.0  # at a lock whose owner may be dead
LOCK = "locks/plan"


def _holder() -> dict[str, Any]:
    """Return the identity of this process, as a lease has it."""
    return {**this_process(), "node": node_name(), "task": task_name(), "restarts": task_restarts()}


class Lease:
    """An object that this process writes again and again while it lives."""

    def __init__(self, bucket: Bucket, name: str) -> None:
        self.name, self.token = name, secrets.token_hex(8)
        self.is_lost = False  # another process has taken it over
        self._bucket, self._counter, self._version = bucket, 0, ""
        self._stopped = threading.Event()
        self._heart = threading.Thread(target=self._beat, name=f"lease {name}", daemon=True)

    def take(self, over: str | None = None) -> bool:
        """Create the lease, or replace its expired version `over`; return False if another process was first."""
        data = self._document(released=False)
        written = self._bucket.create(self.name, data) if over is None else self._bucket.replace(self.name, data, over)
        if written is None:
            return False
        self._version = written
        self._heart.start()
        return True

    def end(self) -> None:
        """Stop renewing the lease, and release it; where that fails the lease runs out."""
        self._stopped.set()
        self._heart.join()
        try:
            if not self.is_lost:
                self._bucket.replace(self.name, self._document(released=True), self._version)
        except StoreError as error:
            note(f"warning: {error}; others go on when the lease {self.name} has run out")

    def _document(self, *, released: bool) -> bytes:
        self._counter += 1
        said = {**_holder(), "token": self.token, "counter": self._counter, "released": released}
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


@contextmanager
def locked_in(bucket: Bucket, *, doing: str) -> Iterator[None]:
    """Hold the run's lock; waits for a lease that may have run out, not for an owner that lives.

    Raises:
        RunBusyError: another process holds the lock.
    """
    lease, owners = Lease(bucket, LOCK), Watch(bucket.read)
    first: Found | None = None
    has_lock = lease.take()
    while not has_lock:
        found = bucket.read(LOCK)  # before the watch reads it: what is taken over is what has run out, or older
        if found is None or owners.has_run_out(LOCK):
            has_lock = lease.take(over=None if found is None else found.version)
            continue
        if first is None:
            first = found
            note(
                f"{_owner(found)} plans or finishes {bucket.uri}, or was killed; this shows within {watch.LEASE_S:g} s"
            )
        elif first.version != found.version:
            raise RunBusyError(f"{_owner(found)} plans or finishes {bucket.uri}; wait for it or stop it, then {doing}")
        time.sleep(LOOK_S)
    try:
        yield
    finally:
        lease.end()


def _owner(found: Found) -> str:
    try:
        said = json.loads(found.data)
        return f"a process on {said['node']} ({said['pid']})"
    except (ValueError, KeyError):
        return "another process"
