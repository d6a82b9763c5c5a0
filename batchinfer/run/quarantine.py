"""Quarantine of damaged files: moved to quarantine/ under their former paths, never read and never deleted."""

import itertools
from pathlib import Path

from batchinfer.progress import note
from batchinfer.rundir import RunDir
from batchinfer.whole_files import cannot_write, sync_folder


def set_aside(run: RunDir, path: Path, reason: str) -> bool:
    """Move a damaged file of the run folder away and say so.

    Returns:
        False when it is not there, or somebody else was quicker.

    Raises:
        ConfigError: the folder cannot be written.
    """
    target = run.quarantine / path.relative_to(run.root)
    if not path.exists():
        return False
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(2):
            if not target.exists():
                break
            target = target.with_name(f"{path.name}.{number}")
        path.rename(target)
        sync_folder(path.parent)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise cannot_write(target, error) from None
    note(f"warning: {path} is set aside as {target}: {reason}")
    return True
