"""The records of submissions in a run folder."""

from pathlib import Path
from typing import Any

from batchinfer.checked_json import read_json
from batchinfer.rundir import RunDir, submission_records


def sent_records(run: RunDir, launcher: str, *needs: str) -> list[tuple[Path, dict[str, Any]]]:
    """Return all records of submissions to one launcher, in order, each with its file.

    Raises:
        DamagedFileError: a record is damaged, or lacks one of the keys `needs`.
    """
    return [(path, read_json(path, *needs)) for path in submission_records(run, [launcher])]
