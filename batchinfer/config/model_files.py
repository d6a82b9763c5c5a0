"""The configuration file of a model folder."""

from pathlib import Path

HUGGING_FACE, MISTRAL = "config.json", "params.json"


def config_file(folder: Path) -> Path:
    """Return the path of config.json, or of params.json (of Mistral's own code) if only that exists."""
    own = folder / MISTRAL
    return own if own.is_file() and not (folder / HUGGING_FACE).exists() else folder / HUGGING_FACE
