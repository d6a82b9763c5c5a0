"""Done units whose results are gone or cut off: found by sizes alone, and opened again before a worker begins."""

from __future__ import annotations

import itertools
from pathlib import Path

from batchinfer.checked_json import parse_json
from batchinfer.progress import note
from batchinfer.records import DamagedFileError
from batchinfer.run.store.interface import Storage


def reopen_damaged_units(store: Storage) -> list[int]:
    """Set aside the done marks that are damaged, or vouch for results that are missing or have another size.

    The next claim of such a unit inherits its sound results, so only the others are computed again. Results are not
    read: `finish` compares their checksums.

    Returns:
        The units that are open again.
    """
    sizes = {item.path: item.num_bytes for item in store.list(store.run.unit_folders)}
    reopened = []
    for unit in sorted(int(name) for name in store.names(store.run.done_marks) if name.isdecimal()):
        reason = _damage_of_unit(store, unit, sizes)
        if reason is not None:
            _set_aside(store, store.run.done(unit), reason)
            reopened.append(unit)
    return reopened


def _damage_of_unit(store: Storage, unit: int, sizes: dict[Path, int]) -> str | None:
    """Return what is wrong with a done unit, None if nothing is or if it is not done."""
    path = store.run.done(unit)
    data = store.get(path)
    if data is None:
        return None
    try:
        mark = parse_json(data, path, "unit", "claim", "files")
    except DamagedFileError as error:
        return error.reason
    if mark["unit"] != unit:
        return f"it is the mark of unit {mark['unit']}"
    for name, size in mark["files"].items():
        file = store.run.root / name
        if sizes.get(file, size) != size:
            return f"{name}, which it vouches for, has {sizes[file]} bytes instead of {size}"
        if file not in sizes and store.get(file) is None:  # asked by its name: a listing may be older than the file
            return f"{name}, which it vouches for, is missing"
    return None


def _set_aside(store: Storage, path: Path, reason: str) -> None:
    """Move a damaged document to quarantine/."""
    data = store.get(path)
    if data is None:  # another worker was quicker
        return
    target = store.run.quarantine / path.relative_to(store.run.root)
    for number in itertools.count(2):
        if store.get(target) is None:
            break
        target = target.with_name(f"{path.name}.{number}")
    store.put(target, data)
    store.delete(path)
    note(f"warning: {path} is set aside as {target}: {reason}")
