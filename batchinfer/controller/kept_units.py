"""Results that a run keeps when it is planned again: those of units with the same rows as before."""

from batchinfer.data.parquet import own_parquet
from batchinfer.manifest import Manifest
from batchinfer.progress import note
from batchinfer.records import DamagedFileError, RequestKey
from batchinfer.run.quarantine import set_aside
from batchinfer.run.units.claims import counted_files, done_mark, last_claim
from batchinfer.run.units.result_files import result_keys, sound_local_files
from batchinfer.rundir import RunDir
from batchinfer.sanitize import count_text


def keep_same_units(run: RunDir, manifest: Manifest) -> None:
    """Set aside the results of units whose rows changed, and of units that the new plan lacks.

    Args:
        manifest: manifest of the new plan.

    Raises:
        ConfigError: a folder cannot be written.
    """
    planned = _planned_keys(run, manifest)
    folders = sorted(folder for folder in run.unit_folders.glob("*") if folder.name.isdecimal())
    kept = sum(_is_same(run, int(folder.name), planned.get(int(folder.name), set())) for folder in folders)
    units, were = count_text(len(folders), "unit"), "was" if len(folders) == 1 else "were"
    keep = "has the same rows as before and keeps its" if kept == 1 else "have the same rows as before and keep their"
    note(f"{kept:,} of {units} that {were} begun {keep} results")


def _is_same(run: RunDir, unit: int, planned: set[RequestKey]) -> bool:
    """Return whether a unit keeps its results; set them aside if not. `planned` is empty without the unit."""
    try:
        mark = done_mark(run, unit)
    except DamagedFileError as error:
        set_aside(run, error.path, error.reason)
        mark = None
    files = sound_local_files(run, counted_files(mark, last_claim(run, unit)))
    keys = {key for path in files for key in result_keys(path)}
    if mark is not None and (keys != planned or not planned):
        set_aside(run, run.done(unit), "the unit has other rows now, or results are gone")
    if planned and keys <= planned:
        return True
    set_aside(run, run.unit(unit), "it has other rows now")
    return False


def _planned_keys(run: RunDir, manifest: Manifest) -> dict[int, set[RequestKey]]:
    keys: dict[int, set[RequestKey]] = {}
    columns = ["unit", "shard", "row", "sample"]
    with own_parquet(run.requests, manifest) as file:
        for batch in file.iter_batches(columns=columns):
            for unit, *key in zip(*(batch[name].to_pylist() for name in columns), strict=True):
                keys.setdefault(unit, set()).add(RequestKey(*key))
    return keys
