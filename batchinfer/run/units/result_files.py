"""Result files of units: named by what they hold, part-<number>-<digest>.parquet, so that damage shows by the name."""

from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.data.parquet import own_file
from batchinfer.manifest import content_checksums, file_checksums
from batchinfer.progress import note
from batchinfer.records import DamagedFileError, RequestKey
from batchinfer.run.quarantine import set_aside
from batchinfer.run.store.interface import Storage
from batchinfer.rundir import RunDir
from batchinfer.whole_files import published

REUSED_FOLDER = "reused-"  # how the name of a folder with answers of an earlier run begins


def write_results(folder: Path, number: int, table: pa.Table) -> Path:
    """Publish a result file (schemas.RESULTS) in a claim's folder and return its path.

    Raises:
        ConfigError: it cannot be written.
    """
    sink = pa.BufferOutputStream()
    # without dictionaries half the time and, for columns that zstd shrinks to nothing or not at all, a third less
    pq.write_table(table, sink, compression="zstd", use_dictionary=False)
    content = memoryview(sink.getvalue())
    path = folder / f"part-{number:05d}-{content_checksums(content).digest}.parquet"
    with published(path) as temporary:
        temporary.write_bytes(content)
    return path


def own_files(claim: Path) -> list[Path]:
    """Return the result files that a claim itself has written, in order."""
    return sorted(claim.glob("part-*.parquet"))


def is_result(path: Path) -> bool:
    """Return whether a file has the name of a result file."""
    return path.match("part-*.parquet")


def is_reused(path: Path) -> bool:
    """Return whether a result file has answers of an earlier run."""
    return path.parent.name.startswith(REUSED_FOLDER)


def damage(path: Path) -> str | None:
    """Return the reason if a result file does not fit the digest in its name, else None."""
    try:
        digest = file_checksums(path).digest
    except DamagedFileError as error:
        return error.reason
    return None if path.stem.rpartition("-")[2] == digest else "its bytes are not those that were written"


def sound_files(store: Storage, files: list[Path]) -> list[Path]:
    """Return the undamaged result files as local files; quarantine the others: their rows are computed again."""
    for path in files:
        if damage(path) is not None:
            with suppress(DamagedFileError):  # gone, which is found below
                store.local(path)
    return sound_local_files(store.run, files)


def sound_local_files(run: RunDir, files: list[Path]) -> list[Path]:
    """Return the undamaged result files; quarantine the others, so that their rows are computed again."""
    sound = []
    for path in files:
        reason = damage(path)
        if reason is None:
            sound.append(path)
        elif not set_aside(run, path, reason):
            note(f"warning: {path} is missing; its rows are computed again")
    return sound


def result_keys(path: Path) -> list[RequestKey]:
    """Return the requests whose results a result file has."""
    with own_file(path):
        table = pq.read_table(path, columns=["shard", "row", "sample"])
    return list(map(RequestKey, *(table[name].to_pylist() for name in ("shard", "row", "sample"))))


def memory_tokens(path: Path) -> dict[RequestKey, int]:
    """Return the prompt tokens from memory of each ok result in a result file."""
    with own_file(path):
        table = pq.read_table(path, columns=["shard", "row", "sample", "status", "cached_memory_tokens"])
    return {
        RequestKey(item["shard"], item["row"], item["sample"]): item["cached_memory_tokens"]
        for item in table.to_pylist()
        if item["status"] == "ok"
    }
