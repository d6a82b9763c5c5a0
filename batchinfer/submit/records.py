"""What was sent to clusters, by the records in a run folder."""

from pathlib import Path
from typing import Any

from batchinfer.checked_json import read_json
from batchinfer.rundir import RunDir, submission_records


def sent_records(run: RunDir, launcher: str, *needs: str) -> list[tuple[Path, dict[str, Any]]]:
    """Each record of what one launcher was ever given, in order, with its file.

    Raises:
        DamagedFileError: one is damaged, or lacks one of these keys.
    """
    return [(path, read_json(path, *needs)) for path in submission_records(run, [launcher])]
