"""Conversion of a checkpoint to the form in which operations hold weights of one dtype, read instead of packing them.

For the C++ operations ranks map it. For GPUs it is copied there layer by layer, in every sweep.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from batchinfer.checked_json import json_text
from batchinfer.model.config import load_model_config
from batchinfer.model.headers import read_headers
from batchinfer.model.ops import Ops
from batchinfer.model.packed_files import write_parts
from batchinfer.model.packed_folder import ENDS, LAYOUT, MANIFEST, MTP, layer_name, read_packed
from batchinfer.model.tensor_names import why_no_mtp
from batchinfer.model.weight_bytes import mtp_bytes, weight_bytes
from batchinfer.model.weight_loading import open_loader, read_ends, read_mtp
from batchinfer.records import ConfigError
from batchinfer.sanitize import size_text
from batchinfer.whole_files import TEMPORARY, cannot_write, sync_file, sync_folder

_TEMPLATES = "additional_chat_templates"
_CARRIED = (".json", ".jinja", ".model", ".txt")  # tokenizer, templates, defaults; no weights and no code


def convert_model(
    source: Path,
    target: Path,
    ops: Ops,
    *,
    dtype: torch.dtype,
    name: str,
    on_read: Callable[[int, int], None],
    device: torch.device | str = "cpu",
) -> int:
    """Write the model of `source` to the new folder `target`; it is whole or absent. Returns its bytes.

    One layer is in memory at a time.

    Args:
        ops: the operations that will read it, with the bits of the dtype.
        dtype: of rows.
        name: model.dtype of the jobs that are to use it.
        on_read: as for load_weights.
        device: of the operations, where each layer is packed.

    Raises:
        ConfigError: the target is there already or cannot be written, or its disk has not the room.
        ModelError: the source cannot be read.
    """
    config = load_model_config(source)
    if read_packed(source) is not None:
        raise ConfigError(f"{source} is converted already; give the folder that it was made from")
    config.check_dtype(name)
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} is there already; name another folder or delete it")
    folder = target.parent / f".{target.name}.{secrets.token_hex(4)}{TEMPORARY}"
    try:
        folder.mkdir(parents=True)
        has_mtp = why_no_mtp(read_headers(source, config.carrier), config) is None
        needed = weight_bytes(config, name) + (mtp_bytes(config, name) if has_mtp else 0)
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise ConfigError(
                f"{source} takes {size_text(needed)} in {name}, and {target.parent} has {size_text(free)} free; "
                "free space or choose another folder"
            )
        loader = open_loader(source, config, dtype=dtype, ops=ops, mtp=has_mtp, on_read=on_read, device=device)
        write = partial(write_parts, aligned=ops.on_gpus)
        files = {ENDS: write(folder / ENDS, read_ends(loader))}
        for layer in range(config.num_hidden_layers):
            files[layer_name(layer)] = write(folder / layer_name(layer), loader.layer(layer))
        if has_mtp:
            files[MTP] = write(folder / MTP, read_mtp(loader))
        _carry(source, folder)
        sizes = {file: (folder / file).stat().st_size for file in files}
        manifest = {
            "dtype": name,
            "layout": LAYOUT,
            "source": str(source.absolute()),
            **({"for_gpus": True} if ops.on_gpus else {}),
            "files": {file: {"bytes": sizes[file], "xxh3_128": checksum} for file, checksum in files.items()},
        }
        (folder / MANIFEST).write_text(json_text(manifest), encoding="utf-8")
        sync_file(folder / MANIFEST)
        sync_folder(folder)
        folder.rename(target)
        sync_folder(target.parent)
        return sum(sizes.values())
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise cannot_write(target, error) from None
        raise


def _carry(source: Path, folder: Path) -> None:
    """Copy config.json, the tokenizer's files, chat templates and generation settings."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _CARRIED and not path.name.endswith(".safetensors.index.json"):
            shutil.copyfile(path, folder / path.name)
            sync_file(folder / path.name)
    if (templates := source / _TEMPLATES).is_dir():
        (folder / _TEMPLATES).mkdir()
        _carry(templates, folder / _TEMPLATES)
        sync_folder(folder / _TEMPLATES)
