"""Which file of a model folder says what the model is."""

from pathlib import Path

HUGGING_FACE, MISTRAL = "config.json", "params.json"


def config_file(folder: Path) -> Path:
    """config.json, or params.json where there is only that: as Mistral's own code writes it."""
    own = folder / MISTRAL
    return own if own.is_file() and not (folder / HUGGING_FACE).exists() else folder / HUGGING_FACE
