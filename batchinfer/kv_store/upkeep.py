"""The functions of `batchinfer kv`: describe, verify and shrink a store, find a block in it."""

import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from batchinfer.config import load_job
from batchinfer.kv_store.block_file import HEADER_BYTES, DamagedBlocksError, check_file, parse_header
from batchinfer.kv_store.blocks import NAME_BYTES, SHORT_BYTES
from batchinfer.kv_store.next_uses import BlockClaims
from batchinfer.kv_store.session import Counters, read_history
from batchinfer.kv_store.space_ledger import LockTimeoutError, open_ledger
from batchinfer.kv_store.space_manager import SpaceManager
from batchinfer.kv_store.store_dir import (
    StoredFile,
    StoreDir,
    check_version,
    quarantine,
    quarantined_files,
    read_key,
    remove_temporary_files,
    stored_files,
)
from batchinfer.ownership import check_folder, group_id, shared_with
from batchinfer.progress import note
from batchinfer.records import ConfigError
from batchinfer.sanitize import count_text, size_text

VERIFY_THREADS = 4
_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{infix}b": base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}


def parse_bytes(text: str) -> int:
    """Parse a number of bytes: plain, or with KB … PB (powers of 1000) or KiB … PiB (powers of 1024).

    Raises:
        ConfigError: it is neither.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{text!r} is no number of bytes; write for example 500000000, 10GB or 1.5TiB")
    size = _UNITS[match[2].lower()]
    return int(float(match[1]) * size) if "." in match[1] else int(match[1]) * size


def open_kv_store(target: Path) -> StoreDir:
    """Open the store in a folder, or the one that a job file (*.toml) names.

    Raises:
        ConfigError: the folder is no store, others may write in it, or the job has none.
    """
    folder, gid = target, None
    if target.suffix == ".toml" and not target.is_dir():
        job = load_job(target)
        if job.kv.dir is None:
            raise ConfigError(f"the job {target} has no KV store; set kv.dir in it or name the store's folder")
        folder, gid = Path(job.kv.dir), group_id(job.kv.shared_group, "kv.shared_group")
    check_version(StoreDir(folder))
    store = StoreDir(folder, shared_with(folder) if gid is None else gid)
    warning = check_folder(folder, store.gid, setting="kv.dir")
    if warning is not None:
        note(warning)
    return store


def describe_store(store: StoreDir) -> dict[str, Any]:
    """Return the content of a store, by model, and the counters of its sessions."""
    models: dict[str, dict[str, Any]] = {}
    for file in stored_files(store):
        if file.model not in models:
            models[file.model] = {**_label(store, file.model), "blocks": 0, "files": 0, "bytes": 0, "last_use_s": 0.0}
        assert file.name is not None
        entry = models[file.model]
        entry["blocks"] += len(file.name.blocks)
        entry["files"] += 1
        entry["bytes"] += file.num_bytes
        entry["last_use_s"] = max(entry["last_use_s"], _last_use_s(file))
    sessions = read_history(store)
    damaged = quarantined_files(store)
    totals = {key: sum(entry[key] for entry in models.values()) for key in ("blocks", "files", "bytes")}
    totals |= {
        key: sum(session.get(key, 0) for session in sessions)
        for key in ("hit_tokens", "hit_bytes", "written_tokens", "written_bytes", "dropped_blocks", "evicted_files")
    }
    return {
        "folder": str(store.root),
        **totals,
        "quarantined_files": len(damaged),
        "quarantined_bytes": sum(file.num_bytes for file in damaged),
        "problem": _problem_of_key(store),
        "models": list(models.values()),
        "sessions": sessions,
    }


def verify_store(store: StoreDir) -> dict[str, Any]:
    """Read and check every block; move damaged files to quarantine where permitted.

    Raises:
        ConfigError: the store's key is lost, damaged or readable by others.
    """
    files, key = list(stored_files(store)), _key_of(store)
    with ThreadPoolExecutor(VERIFY_THREADS) as threads:
        reasons = list(threads.map(lambda file: _problem_of(file, key), files))
    found = [(file, reason) for file, reason in zip(files, reasons, strict=True) if reason is not None]
    damaged = []
    for file, reason in found:
        stays = ""
        try:
            quarantine(store, file.path)
        except OSError as error:
            stays = f"; it stays where it is: {error.strerror}"
        damaged.append({"file": os.path.basename(file.path), "reason": reason + stays})
    return {
        "folder": str(store.root),
        "files": len(files),
        "blocks": sum(len(file.name.blocks) for file in files if file.name is not None),
        "bytes": sum(file.num_bytes for file in files),
        "damaged": damaged,
        "quarantine": str(store.quarantine),
    }


def shrink_store(store: StoreDir, max_bytes: int | None) -> dict[str, Any]:
    """Delete leftovers of killed processes and, given a bound, the files of least worth until all are below it.

    Raises:
        ConfigError: another process keeps the store locked, or it cannot be written.
    """
    counters = Counters()

    def count(file: StoredFile) -> None:
        counters.add(evicted_files=1, evicted_bytes=file.num_bytes)

    session = f"gc-{os.getpid()}-{int(time.time() * 1000)}"
    space = SpaceManager(store, BlockClaims(store, session), session, max_bytes, count)
    try:
        remove_temporary_files(store)
        with open_ledger(store) as ledger:
            before = ledger.recount()
        space.shrink()
        with open_ledger(store) as ledger:
            after = ledger.used_bytes
    except LockTimeoutError:
        raise ConfigError(
            f"another process keeps the KV store {store.root} locked; try again when it has ended"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot shrink the KV store {store.root}: {error.strerror or error}; run this as the user who owns it"
        ) from None
    return {
        "folder": str(store.root),
        "bytes_before": before,
        "bytes_after": after,
        "evicted_files": counters.evicted_files,
        "evicted_bytes": counters.evicted_bytes,
    }


def find_block(store: StoreDir, text: str) -> Path:
    """Return the file that holds a block.

    Args:
        text: its name in hex, or the first 12 digits of it or more.

    Raises:
        ConfigError: that is no name, or no file holds it.
    """
    if not re.fullmatch(rf"[0-9a-fA-F]{{{2 * SHORT_BYTES},{2 * NAME_BYTES}}}", text):
        raise ConfigError(
            f"{text!r} is no block: give its name in hex, {2 * SHORT_BYTES} to {2 * NAME_BYTES} digits of it"
        )
    short, key = bytes.fromhex(text[: 2 * SHORT_BYTES]), _key_of(store)
    for file in stored_files(store):
        if file.name is not None and short in file.name.blocks and _holds(file.path, text.lower(), key):
            return Path(file.path)
    raise ConfigError(f"the KV store {store.root} holds no block {text}")


def format_description(found: dict[str, Any]) -> str:
    """Format the result of `describe_store` for people."""
    blocks, files = count_text(found["blocks"], "block"), count_text(found["files"], "file")
    lines = [
        f"KV store {found['folder']}",
        f"  {blocks} in {files}, {size_text(found['bytes'])}",
    ]
    if found["problem"] is not None:
        lines.append(f"  no run can use them: {found['problem']}")
    if found["quarantined_files"]:
        lines.append(
            f"  quarantine: {count_text(found['quarantined_files'], 'file')}, {size_text(found['quarantined_bytes'])}"
        )
    for model in found["models"]:
        is_state = model.get("is_state", False)
        lines.append(
            f"  {model.get('model', '?')}  {model.get('dtype', '?')}, {model.get('numerics', '?')}, "
            f"{'states after ' if is_state else ''}blocks of {model.get('block_tokens', '?')} tokens: "
            f"{count_text(model['blocks'], 'state' if is_state else 'block')}, {size_text(model['bytes'])}, "
            f"last used {_when(model['last_use_s'])}"
        )
    lines.append(
        f"  {count_text(len(found['sessions']), 'session')} read {count_text(found['hit_tokens'], 'token')} "
        f"({size_text(found['hit_bytes'])}) "
        f"and wrote {found['written_tokens']:,} ({size_text(found['written_bytes'])})"
    )
    lines += [
        f"    {_when(session['started_s'])}  {session['model']}: {count_text(session['hit_tokens'], 'token')} read, "
        f"{session['written_tokens']:,} written, {count_text(session['dropped_blocks'], 'block')} dropped, "
        f"{count_text(session['damaged_files'], 'file')} damaged"
        + (f"; {session['switched_off']}" if session.get("switched_off") else "")
        for session in found["sessions"][-10:]
    ]
    return "\n".join(lines)


def _key_of(store: StoreDir) -> bytes:
    try:
        return read_key(store)
    except OSError as error:
        raise ConfigError(f"cannot read {store.key}: {error.strerror}; run this as the user who owns it") from None


def _problem_of_key(store: StoreDir) -> str | None:
    """Return why no run can use the store's blocks; None if one can."""
    try:
        _key_of(store)
    except ConfigError as error:
        return str(error)
    return None


def _holds(path: str, text: str, key: bytes) -> bool:
    """Return whether a file's header has a block whose name begins with `text`; a damaged header has none."""
    try:
        with open(path, "rb") as file:
            return any(block.hex().startswith(text) for block in parse_header(file.read(HEADER_BYTES), key).blocks)
    except (FileNotFoundError, DamagedBlocksError):
        return False


def _problem_of(file: StoredFile, key: bytes) -> str | None:
    assert file.name is not None
    identity_start, _, block_bytes = file.model.rpartition("-")
    try:
        check_file(file.path, file.name, key=key, identity_start=identity_start, block_bytes=int(block_bytes))
    except FileNotFoundError:  # evicted meanwhile
        return None
    except DamagedBlocksError as error:
        return str(error)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None


def _label(store: StoreDir, model: str) -> dict[str, Any]:
    """Return the content of identity.json; without it only the folder's name."""
    try:
        return {"folder": model, **json.loads((store.models / model / "identity.json").read_bytes())}
    except (FileNotFoundError, ValueError, TypeError):
        return {"folder": model}


def _last_use_s(file: StoredFile) -> float:
    try:
        return os.stat(file.path).st_mtime
    except FileNotFoundError:
        return 0.0


def _when(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))
