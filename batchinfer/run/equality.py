"""Report on bit equality of a run: over all sessions with ranks, and the earlier run whose answers it reuses."""

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from batchinfer.data.parquet import read_rows
from batchinfer.equal_rows import EqualRows, combine
from batchinfer.run.units.result_files import is_reused
from batchinfer.run.units.reused import REUSED
from batchinfer.rundir import RunDir

_NAMES = [field.name for field in fields(EqualRows)]


def run_equality(run: RunDir, state: dict[str, Any], files: Iterable[Path]) -> EqualRows:
    """Return whether a row's bits do not depend on its batch, and the processors that computed the run's answers.

    Args:
        state: content of run.json.
        files: the result files that count; the earlier run is part of the report only if they have answers of it.
    """
    sessions = [read_rows(path)[0] for path in sorted((run.stats / "nodes").glob("*.parquet"))]
    # a session of an earlier version may have computed without recording its processor
    said = [
        _report(session)
        for session in sessions
        if session.get("processor") is not None or session.get("first_prefill_s") is not None
    ]
    if REUSED in state and any(map(is_reused, files)):
        said.append(_report(state[REUSED]))
    return combine(said)


def _report(record: dict[str, Any]) -> EqualRows:
    return EqualRows(**{name: record.get(name) for name in _NAMES})
