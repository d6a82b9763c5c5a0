"""The files in jobs/ that a launcher sends, filled in or with arguments: a person may name others."""

import sys
from pathlib import Path

from batchinfer.records import ConfigError


def find_template(name: str, own: Path | None) -> Path:
    """The file to send: the one a person names, or the one that came with batchinfer.

    Args:
        name: in jobs/, `array.sbatch` or `k8s/tasks.yaml` for example.
        own: a person's own file, if given.

    Raises:
        ConfigError: there is no such file.
    """
    beside = Path(__file__).parents[2] / "jobs" / name  # a working copy
    installed = Path(sys.prefix) / "share" / "batchinfer" / "jobs" / name
    candidates = [beside, installed] if own is None else [own.absolute()]
    for path in candidates:
        if path.is_file():
            return path
    looked = " or ".join(str(path) for path in candidates)
    kind = "Slurm template" if name.endswith(".sbatch") else "template"
    raise ConfigError(f"there is no {kind} {looked}; name one with --template or --finish-template")
