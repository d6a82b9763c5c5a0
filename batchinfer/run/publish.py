"""A copy of outputs/, dataset/ and stats/ in an object store, or on another file system named by URI: output.publish.

_JOB                whose results these are; put by plan, which so finds out whether it may write there
outputs/… dataset/… stats/…   each object appears whole
_SUCCESS            put last: its objects with their sizes (`_PARTIAL` after `finish --allow-partial`)
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pyarrow import fs

from batchinfer.checked_json import publish_json, read_json
from batchinfer.config import JobConfig
from batchinfer.data.stores import Place, locate, store_errors
from batchinfer.progress import Progress, note
from batchinfer.records import DamagedFileError, RunMismatchError, StoreError
from batchinfer.run.fingerprint import Fingerprint
from batchinfer.rundir import RunDir, read_state

JOB, SUCCESS, PARTIAL = "_JOB", "_SUCCESS", "_PARTIAL"
CHUNK_BYTES = 8 << 20
PUTS = 4  # files copied at a time


def claim_place(job: JobConfig, fingerprint: Fingerprint) -> None:
    """Make sure that results of this job, and no others, can be put where output.publish says; if it says anything.

    Raises:
        StoreError, ConfigError: the place cannot be reached or written.
        RunMismatchError: it holds the results of another job.
    """
    if job.output.publish is None:
        return
    place = locate(job.output.publish, job.s3)
    mine = hashlib.blake2b(json.dumps(fingerprint, sort_keys=True).encode(), digest_size=16).hexdigest()
    owner = _owner(place.below(JOB))
    if owner is None:
        if any(_exists(place.below(mark)) for mark in (SUCCESS, PARTIAL)):
            raise RunMismatchError(f"{place.uri} holds results of something else; choose another output.publish")
        _put_text(place.below(JOB), json.dumps({"job": mine}) + "\n")
    elif owner != mine:
        raise RunMismatchError(
            f"{place.uri} belongs to another job (its {JOB} says so); choose another output.publish, or empty it"
        )


def publish_run(run: RunDir, job: JobConfig, finished: dict[str, Any]) -> int:
    """Put what is new of results and statistics where output.publish says, with a mark at the end; call again to go on.

    Args:
        finished: counts for the mark; `num_missing` says which one.

    Returns:
        The number of objects put.

    Raises:
        StoreError, ConfigError: the place cannot be reached or written; the run folder holds everything still.
        RunMismatchError: the place belongs to another job.
    """
    assert job.output.publish is not None
    claim_place(job, read_state(run)["fingerprint"])
    place = locate(job.output.publish, job.s3)
    files = {str(path.relative_to(run.root)): path for path in _files(run)}
    states = {name: _state(path) for name, path in files.items()}
    mark, other = (PARTIAL, SUCCESS) if finished["num_missing"] else (SUCCESS, PARTIAL)
    due = _not_put_yet(run, place, states) if _exists(place.below(mark)) else list(files)
    if not due:
        return 0
    _remove(place.below(other))
    if any(not name.startswith("stats/") for name in due):
        _remove(place.below(mark))  # until all are there again
    with Progress("publish", len(due), "files") as progress, ThreadPoolExecutor(PUTS) as pool:
        for _ in pool.map(lambda name: put_file(files[name], place.below(name)), due):
            progress.advance(1)
    objects = {name: size for name, (size, _) in states.items()}
    _put_text(place.below(mark), json.dumps({**finished, "objects": objects}, indent=1) + "\n")
    publish_json(run.published, {"place": place.uri, "files": states})
    return len(due)


def _files(run: RunDir) -> list[Path]:
    wanted = [(run.outputs, (".parquet", ".jsonl")), (run.dataset, (".parquet", ".md")), (run.stats, (".parquet",))]
    return sorted(path for folder, ends in wanted for path in folder.rglob("*") if path.suffix in ends)


def _state(path: Path) -> list[int]:
    """Return [size in bytes, time of writing in ns] of a file, which identify its version: files are only replaced."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _not_put_yet(run: RunDir, place: Place, states: dict[str, list[int]]) -> list[str]:
    """Return the files that no earlier `finish` has uploaded in this version, or whose object has another size."""
    earlier = _last_published(run)
    if earlier.get("place") != place.uri:
        return list(states)
    names = list(states)
    with store_errors(f"read {place.uri}"):
        found = place.files.get_file_info([place.below(name).path for name in names])
    return [
        name
        for name, info in zip(names, found, strict=True)
        if earlier["files"].get(name) != states[name] or info.size != states[name][0]
    ]


def _last_published(run: RunDir) -> dict[str, Any]:
    """Return the record of the last publishing `finish`, {} if it is damaged: then all files are published again."""
    if not run.published.exists():
        return {}
    try:
        return read_json(run.published, "place", "files")
    except DamagedFileError as error:
        note(f"{error.path} is damaged ({error.reason}); all results are published again")
        return {}


# ---- objects


def _exists(place: Place) -> bool:
    with store_errors(f"read {place.uri}"):
        return bool(place.files.get_file_info(place.path).type == fs.FileType.File)


def _owner(place: Place) -> str | None:
    """Return the job that owns the place, None if it has no owner."""
    if not _exists(place):
        return None
    with store_errors(f"read {place.uri}"), place.files.open_input_stream(place.path) as file:
        return str(json.loads(file.read())["job"])


def _remove(place: Place) -> None:
    if _exists(place):
        with store_errors(f"delete {place.uri}"):
            place.files.delete_file(place.path)


def _put_text(place: Place, text: str) -> None:
    with store_errors(f"write {place.uri}"):
        target = _beside(place)
        with place.files.open_output_stream(target) as file:
            file.write(text.encode())
        _give_name(place, target)


def put_file(source: Path, place: Place) -> None:
    """Copy a file to where it shows only when it is whole.

    Raises:
        StoreError: the store fails, or has something else afterwards.
    """
    with store_errors(f"write {place.uri}"):
        target = _beside(place)
        fs.copy_files(
            str(source),
            target,
            source_filesystem=fs.LocalFileSystem(),
            destination_filesystem=place.files,
            chunk_size=CHUNK_BYTES,
        )
        _give_name(place, target)
        size = place.files.get_file_info(place.path).size
    if size != source.stat().st_size:
        raise StoreError(f"{place.uri} has {size} bytes instead of {source.stat().st_size}; finish the run again")


def _beside(place: Place) -> str:
    """Return the path to write to before the rename; the final path in a store, which shows whole objects only."""
    if place.is_whole_at_once:
        return place.path
    folder, _, name = place.path.rpartition("/")
    if folder:
        place.files.create_dir(folder, recursive=True)
    return f"{folder}/.{name}.tmp" if folder else f".{name}.tmp"


def _give_name(place: Place, target: str) -> None:
    if target != place.path:
        place.files.move(target, place.path)
