"""What runs found in a KV store and wrote to it: one small file per session, the latest 1,000 kept."""

from __future__ import annotations

import json
import time
from typing import Any

from batchinfer.kv_store.session import StoreSession
from batchinfer.kv_store.store_dir import StoreDir, list_folder, publish_private

MAX_SESSIONS = 1000


def publish_history(session: StoreSession) -> None:
    """Write a session's counters as they are now.

    Raises:
        OSError: the file cannot be written.
    """
    counts, identity, store = session.counters.as_dict(), session.identity, session.store
    document = {
        "session": session.name,
        "model": identity.describe()["model"],
        "identity": identity.digest.hex(),
        "started_s": session.started_s,
        "last_s": time.time(),
        "hit_tokens": counts["hit_blocks"] * identity.block_tokens,
        "written_tokens": counts["written_blocks"] * identity.block_tokens,
        **counts,
    }
    publish_private(store.history / f"{session.name}.json", document)
    # names begin with the time: the oldest come first
    finished = [name for name in list_folder(store.history) if not name.startswith(".")]
    for name in finished[:-MAX_SESSIONS]:
        (store.history / name).unlink(missing_ok=True)


def read_history(store: StoreDir) -> list[dict[str, Any]]:
    """The counters of all sessions, the oldest first; what cannot be read (just being removed, damaged) is left out."""
    found = []
    for name in list_folder(store.history):
        if name.startswith("."):
            continue
        try:
            document = json.loads((store.history / name).read_bytes())
        except (FileNotFoundError, ValueError):
            continue
        if isinstance(document, dict) and "session" in document:
            found.append(document)
    return found
