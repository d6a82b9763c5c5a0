"""The folder of a model that is given as a path, as a folder of the Hugging Face cache, or as owner/name[@revision].

    $HF_HUB_CACHE/models--owner--name/refs/main              the commit of a branch or tag
    $HF_HUB_CACHE/models--owner--name/snapshots/<commit>/    config.json, *.safetensors, tokenizer.json ...

Nothing is downloaded.
"""

import os
import re
from pathlib import Path

from batchinfer.records import ModelError

_HUB_NAME = re.compile(r"(?P<owner>\w[\w.-]*)/(?P<name>\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
_DEFAULT_REVISION = "main"


def model_folder(base: Path, text: str) -> str:
    """Return the absolute path of a model folder.

    Args:
        base: folder from which relative paths count.
        text: a path, or owner/name[@revision] of the Hugging Face hub; a path that exists is preferred.

    Returns:
        The folder, or the absolute path that `text` would be if it is in no cache either.
    """
    local = os.path.normpath(base / text)
    if os.path.isdir(local):
        return _snapshot(Path(local), None) or local
    hub_name = _HUB_NAME.fullmatch(text)
    if hub_name is None or os.path.lexists(local):
        return local
    folder = hub_cache() / f"models--{hub_name['owner']}--{hub_name['name']}"
    return _snapshot(folder, hub_name["revision"] or _DEFAULT_REVISION) or local


def cached_names() -> list[str]:
    """Return owner/name of the models in the Hugging Face cache."""
    return [
        path.name.removeprefix("models--").replace("--", "/", 1) for path in sorted(hub_cache().glob("models--*--*"))
    ]


def hub_cache() -> Path:
    """Return the folder in which `huggingface_hub` keeps models."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def _snapshot(folder: Path, revision: str | None) -> str | None:
    """Return the snapshot of a revision in a folder of the cache; None if this is no such folder or lacks it.

    Args:
        revision: branch, tag or commit; None: main, else the only snapshot.
    """
    snapshots = folder / "snapshots"
    if not snapshots.is_dir():
        return None
    name = revision or _DEFAULT_REVISION
    try:
        commit = (folder / "refs" / name).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        commit = name  # a commit itself
    if re.fullmatch(r"[\w.-]+", commit) and (snapshots / commit).is_dir():
        return str(snapshots / commit)
    present = [entry for entry in sorted(snapshots.iterdir()) if entry.is_dir()]
    return str(present[0]) if revision is None and len(present) == 1 else None


HUGGING_FACE, MISTRAL = "config.json", "params.json"

LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # the first bytes of a file that Git LFS has not fetched
MOST_POINTER_BYTES = 1024


def config_file(folder: Path) -> Path:
    """Return the path of config.json, or of params.json (of Mistral's own code) if only that exists."""
    own = folder / MISTRAL
    return own if own.is_file() and not (folder / HUGGING_FACE).exists() else folder / HUGGING_FACE


def refuse_pointers(folder: Path) -> None:
    """Raise ModelError if a file of weights is a pointer of Git LFS."""
    for path in sorted(folder.glob("*.safetensors")):
        if path.is_file() and path.stat().st_size < MOST_POINTER_BYTES and path.read_bytes().startswith(LFS_POINTER):
            raise ModelError(f"{path} is a pointer of Git LFS, not the file itself; run `git lfs pull` in its folder")
