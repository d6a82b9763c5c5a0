"""What was sent to clusters, by the records in a run folder."""

from batchinfer.checked_json import read_json
from batchinfer.rundir import LAUNCHERS, RunDir, submission_records


def last_launcher(run: RunDir) -> str | None:
    """Where the run was sent last; None: it was never."""
    sent = [(read_json(path, "submitted_s")["submitted_s"], path.parent.name) for path in submission_records(run)]
    return max(sent)[1] if sent else None


def launchers_of(run: RunDir) -> list[str]:
    """Everywhere the run was ever sent."""
    found = {path.parent.name for path in submission_records(run)}
    return [name for name in LAUNCHERS if name in found]
