"""The results that count for the units of a run, as readers of a run find them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from batchinfer.data.parquet import read_rows
from batchinfer.manifest import Manifest
from batchinfer.progress import note
from batchinfer.records import DamagedFileError, IncompleteRunError
from batchinfer.run.quarantine import set_aside
from batchinfer.run.units.claims import counted_files, done_mark, last_claim, num_claims, result_files
from batchinfer.run.units.result_files import sound_local_files
from batchinfer.rundir import RunDir
from batchinfer.sanitize import count_text


@dataclass(frozen=True, slots=True)
class CountedUnit:
    """The claim of a unit that counts, and its results."""

    claim: Path
    files: list[Path]  # undamaged result files
    num_claims: int  # how often the unit was claimed


def counted_units(run: RunDir, manifest: Manifest, *, allow_partial: bool) -> dict[int, CountedUnit]:
    """Return the claim that counts for each unit, with its results, whose checksums are compared.

    Damaged results are moved to quarantine with the done mark of their unit, so that the next `work` computes the lost
    rows again.

    Raises:
        IncompleteRunError: units are not done, or damaged (without `allow_partial`).
        DamagedFileError: the plan is damaged.
    """
    counted, missing, damaged = {}, [], []
    units = [row["unit"] for row in read_rows(run.units, manifest)]
    for unit in units:
        try:
            mark = done_mark(run, unit)
        except DamagedFileError as error:
            set_aside(run, error.path, error.reason)
            damaged.append(unit)
            mark = None
        if mark is None:
            missing.append(unit)
        else:
            files = sound_local_files(run, list(mark.files))
            if len(files) == len(mark.files):
                counted[unit] = CountedUnit(mark.claim, files, num_claims(run, unit))
                continue
            set_aside(run, run.done(unit), "results that it vouches for are")
            damaged.append(unit)
        claim = last_claim(run, unit)
        if allow_partial and claim is not None:
            counted[unit] = CountedUnit(claim, sound_local_files(run, result_files(claim)), num_claims(run, unit))
    if (damaged or missing) and not allow_partial:
        of_units = f"of {count_text(len(units), 'work unit')} in {run.shown}"
        are = "is" if len(missing) == 1 else "are"
        damage, waiting = (
            f"results of {len(damaged)} {of_units} are damaged",
            f"{len(missing)} {of_units} {are} not done",
        )
        raise IncompleteRunError(
            f"{damage if damaged else waiting}; run `batchinfer work {run.shown}`, "
            f"{'which computes only the rows that are gone, ' if damaged else ''}or finish with --allow-partial"
        )
    return counted


def run_results(run: RunDir, manifest: Manifest) -> Iterator[Path]:
    """Yield the result files that count for the units of a run, done or not; their content is not read.

    Raises:
        DamagedFileError: the plan is damaged.
    """
    for row in read_rows(run.units, manifest):
        try:
            mark = done_mark(run, row["unit"])
        except DamagedFileError as error:
            note(f"warning: {error.path} is damaged ({error.reason}); results of the unit's last claim are read")
            mark = None
        yield from counted_files(mark, last_claim(run, row["unit"]))
