"""The lease of a worker: one for all units that it holds, touched on a beat; others watch it (run/store/watch.py).

work/workers/<token>     host, process, node and task of the worker; deleted when the worker ends
"""

from __future__ import annotations

import secrets
import threading
from typing import Self

from batchinfer.checked_json import json_text
from batchinfer.host_info import node_name, task_name, task_restarts
from batchinfer.progress import note
from batchinfer.records import BatchinferError
from batchinfer.run.liveness import this_process
from batchinfer.run.store.interface import Storage
from batchinfer.rundir import worker_lease


class WorkerLease:
    """The lease of this process, for all units that it holds; renewed within `with`."""

    def __init__(self, store: Storage) -> None:
        self._store = store
        self.path = worker_lease(store.run, secrets.token_hex(8))
        about = {"node": node_name(), "task": task_name(), "restarts": task_restarts(), "released": False}
        self._data = json_text({**this_process(), **about}).encode()
        self._is_begun = False
        self._stopped = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="lease heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._heart.join()
        self.end()

    def begin(self) -> None:
        """Create the lease, unless that was done: before the first claim that names it."""
        if not self._is_begun:
            self._store.put(self.path, self._data)
            self._is_begun = True

    def renew(self) -> None:
        """Give one sign of life; warn where that fails: others may take over, and results stay correct."""
        if not self._is_begun:
            return
        try:
            self._store.touch(self.path, self._data)
        except FileNotFoundError:  # another command has finished the run, and with it all work
            if self.path.parent.exists():
                note("warning: the lease of this worker was deleted; others may take over its units")
        except (BatchinferError, OSError) as error:
            note(f"warning: cannot renew the lease of this worker: {error}")

    def end(self) -> None:
        """Delete the lease, which gives all units back; where that fails the lease runs out."""
        if not self._is_begun:
            return
        self._is_begun = False
        try:
            self._store.delete(self.path)
        except (BatchinferError, OSError) as error:
            note(f"warning: {error}; units of this worker are free when its lease has run out")

    def _beat(self) -> None:
        while not self._stopped.wait(self._store.beat_s):
            self.renew()
