"""Journal of the steps since the last commit, by which the report counts them if the controller is killed.

    stats/steps/<session>.journal        a line per step: checksum and JSON, written when the step is reported; the
                                         next commit deletes the file
    stats/steps/<session>-lost.parquet   the steps of a killed session's journal, written by `finish`

Lines are written without fsync: they survive the process, but not a crash of the machine.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from msgspec import Struct
from msgspec.structs import asdict

from batchinfer.data.parquet import own_file, sealed_table, table_writer
from batchinfer.data.schemas.statistics import STATS_STEPS
from batchinfer.progress import note
from batchinfer.rundir import RunDir
from batchinfer.sanitize import count_text

_LOST = "-lost.parquet"


class StepJournal:
    """The journal of one session."""

    def __init__(self, run: RunDir, session: str) -> None:
        self._run, self._session = run, session
        self._path = run.step_journal(session)
        self._handle: int | None = None
        self._has_failed = False

    def add(self, steps: Iterable[tuple[int, int, Struct]]) -> None:
        """Append steps as (rank, number, record). Warn once if that fails; the next commit reports more."""
        lines = []
        for rank, step, record in steps:
            content = msgspec.json.encode({**asdict(record), "session": self._session, "rank": rank, "step": step})
            lines.append(_checksum(content) + b" " + content + b"\n")
        try:
            if self._handle is None:
                for folder in (self._run.stats, self._path.parent):  # a run folder that was deleted stays so
                    folder.mkdir(exist_ok=True)
                self._handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.write(self._handle, b"".join(lines))
        except OSError as error:
            if not self._has_failed:
                note(
                    f"warning: cannot write {self._path}: {error.strerror}; if this is killed, the report misses steps"
                )
            self._has_failed = True

    def clear(self) -> None:
        """Delete the journal after a commit: its steps are in stats/steps."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
            self._path.unlink(missing_ok=True)
            # a `finish` may have counted these steps as lost while this process was stopped
            _lost_file(self._run, self._session).unlink(missing_ok=True)


def keep_lost_steps(run: RunDir) -> None:
    """Write the journals' steps that no commit has to <session>-lost.parquet in stats/steps.

    A session that still runs commits such steps later. Its commit deletes the file; if the commit came before the
    file was written, the steps are removed from the file here.

    Raises:
        ConfigError: a file is damaged or cannot be written.
    """
    folder = run.stats / "steps"
    for path in sorted(folder.glob("*.journal")):
        lost = _not_committed(run, path.stem, _read_steps(path))
        if lost:
            _write_steps(_lost_file(run, path.stem), lost)
    for path in sorted(folder.glob(f"*{_LOST}")):
        steps = _read_lost(path)
        lost = _not_committed(run, path.name.removesuffix(_LOST), steps)
        if len(lost) < len(steps):
            _write_steps(path, lost)  # also without steps: a deleted file would stay in an object store


def _not_committed(run: RunDir, session: str, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    known = _known_steps(run, session) if steps else set()
    return [step for step in steps if (step["rank"], step["step"]) not in known]


def _read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the sound steps of a journal; warn of damaged ones."""
    # the last line has no end if the process was killed while it wrote
    lines = [line[:-1] for line in _content(path).splitlines(keepends=True) if line.endswith(b"\n")]
    parts = [line.partition(b" ") for line in lines]
    sound = [json.loads(content) for checksum, _, content in parts if checksum == _checksum(content)]
    if len(sound) < len(lines):
        num_lost = len(lines) - len(sound)
        lost = f"{num_lost:,} of {count_text(len(lines), 'step')} {'is' if num_lost == 1 else 'are'}"
        note(f"warning: {path} is damaged: {lost} in no statistics")
    return sound


def _read_lost(path: Path) -> list[dict[str, Any]]:
    content = _content(path)
    if not content:
        return []
    with own_file(path):
        steps: list[dict[str, Any]] = pq.read_table(sealed_table(content)).to_pylist()
    return steps


def _content(path: Path) -> bytes:
    """Return a file's content, b"" if a commit has just deleted the file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _write_steps(path: Path, steps: list[dict[str, Any]]) -> None:
    with table_writer(path, STATS_STEPS.schema) as writer:
        writer.write_table(pa.Table.from_pylist(steps, schema=STATS_STEPS.schema))


def _checksum(content: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(content).encode()


def _known_steps(run: RunDir, session: str) -> set[tuple[int, int]]:
    """Return the (rank, step) pairs that a session has committed."""
    known: set[tuple[int, int]] = set()
    for path in (run.stats / "steps").glob(f"{session}-[0-9]*.parquet"):
        with own_file(path):
            table = pq.read_table(sealed_table(path), columns=["session", "rank", "step"]).to_pydict()
        rows = zip(*table.values(), strict=True)
        known |= {(rank, step) for name, rank, step in rows if name == session}
    return known


def _lost_file(run: RunDir, session: str) -> Path:
    return run.stats / "steps" / f"{session}{_LOST}"
