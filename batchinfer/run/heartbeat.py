"""Heartbeats of the sessions in a run folder, with the progress of each.

    work/sessions/<session>.json   who it is and its meters; written anew every BEAT_S, gone with the session

What is left of a killed session says so by its process, where that would be seen here, or by its age.
"""

import os
import threading
import time
from dataclasses import dataclass
from typing import Any

from batchinfer.checked_json import json_text, read_json
from batchinfer.clock import unix_s
from batchinfer.host_info import node_name, task_name, task_restarts
from batchinfer.progress import current_figures, note
from batchinfer.records import DamagedFileError, StoreError
from batchinfer.run.liveness import SILENT_S, is_dead, this_process
from batchinfer.run.store.interface import Storage
from batchinfer.rundir import RunDir
from batchinfer.whole_files import file_system_s

BEAT_S = 5.0
_ABOUT = ("command", "node", "task", "restarts", "time_s", "under_way")  # keys of a heartbeat


class Heartbeat:
    """The heartbeat of a session of this process, from `start` to `stop`."""

    def __init__(self, storage: Storage, session: str, command: str) -> None:
        self._storage, self._path, self._command = storage, storage.run.heartbeat(session), command
        self._last_s = float("-inf")  # when it was kept
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="session heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to write heartbeats."""
        self.beat()
        self._thread.start()

    def beat(self) -> None:
        """Write a heartbeat now. Warn once if that fails, since other processes may take this session for dead."""
        about = {"command": self._command, "node": node_name(), "task": task_name(), "restarts": task_restarts()}
        text = json_text({**this_process(), **about, "time_s": unix_s(), "under_way": current_figures()})
        with self._lock:
            if self._stopped.is_set():
                return
            try:
                for folder in (self._storage.run.work, self._path.parent):  # a run folder that was deleted stays so
                    folder.mkdir(exist_ok=True)
                beside = self._path.with_suffix(".tmp")
                beside.write_text(text, encoding="utf-8")
                os.replace(beside, self._path)
                if time.monotonic() - self._last_s >= self._storage.beat_s:
                    self._storage.put(self._path)
                    self._last_s = time.monotonic()
            except (OSError, StoreError) as error:
                if not self._has_failed:
                    reason = error.strerror if isinstance(error, OSError) else error
                    note(f"warning: cannot write {self._path}: {reason}; `status` does not see this command")
                self._has_failed = True

    def stop(self) -> None:
        """Stop the heartbeats, and mark the session as ended."""
        with self._lock:
            self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            self._storage.delete(self._path)
            for folder in self._path.parents[:2]:
                folder.rmdir()
        except (OSError, StoreError):  # others have something in it, or it is gone
            return

    def _run(self) -> None:
        while not self._stopped.wait(BEAT_S):
            self.beat()


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """The last heartbeat of a session, and whether the session may be alive."""

    session: str
    command: str
    node: str
    task: str | None  # of a cluster
    restarts: int  # of that task
    time_s: float  # when, by its own clock
    silent_s: float  # since then, by the file system's
    is_dead: bool  # known to have ended
    under_way: list[dict[str, Any]]  # its meters' figures (progress.py)

    @property
    def may_live(self) -> bool:
        """Whether the session has neither ended nor gone silent."""
        return not self.is_dead and self.silent_s <= SILENT_S


def signs_of_life(run: RunDir) -> dict[str, SessionStatus]:
    """Return the heartbeats of sessions that have not ended, by name; leave out damaged files."""
    found = {}
    now_s = file_system_s(run.root)
    for path in sorted(run.heartbeat("x").parent.glob("*.json")):
        try:
            said = read_json(path, "host", "pid", "process", *_ABOUT)
            silent_s = max(0.0, now_s - path.stat().st_mtime)
        except (DamagedFileError, FileNotFoundError):  # it ends just now
            continue
        about = {key: said[key] for key in _ABOUT}
        found[path.stem] = SessionStatus(session=path.stem, is_dead=is_dead(said), silent_s=silent_s, **about)
    return found
