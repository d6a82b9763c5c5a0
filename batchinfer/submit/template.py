"""The templates in jobs/ that a launcher submits; a user may name other files."""

import sys
from pathlib import Path

from batchinfer.records import ConfigError


def find_template(name: str, own: Path | None) -> Path:
    """Return the template to submit: the user's file if given, else the file that came with batchinfer.

    Args:
        name: path in jobs/, for example `array.sbatch` or `k8s/tasks.yaml`.
        own: the user's own file.

    Raises:
        ConfigError: the file does not exist.
    """
    in_working_copy = Path(__file__).parents[2] / "jobs" / name
    installed = Path(sys.prefix) / "share" / "batchinfer" / "jobs" / name
    candidates = [in_working_copy, installed] if own is None else [own.absolute()]
    for path in candidates:
        if path.is_file():
            return path
    looked = " or ".join(str(path) for path in candidates)
    kind = "Slurm template" if name.endswith(".sbatch") else "template"
    raise ConfigError(f"there is no {kind} {looked}; name one with --template or --finish-template")
