"""Verification of a run folder: all files with checksums are read and compared, none is changed."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq

from batchinfer.checked_json import read_json
from batchinfer.data.parquet import own_file, sealed_table
from batchinfer.manifest import Manifest
from batchinfer.progress import Progress
from batchinfer.records import ConfigError, DamagedFileError
from batchinfer.run.job_file import REMEDY, recorded_job
from batchinfer.run.units.claims import counted_files, done_mark, last_claim, lease_of
from batchinfer.run.units.result_files import damage
from batchinfer.rundir import CLAIM, DELETE_STATISTICS, RunDir, read_state, replan_remedy, submission_records


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """A damaged file, with the reason and the remedy."""

    file: str  # below the run folder
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of a verification."""

    files: int
    damaged: list[DamagedFile]


Check = tuple[Path, Callable[[], object], str]  # file, function that raises if it is damaged, remedy


def verify_run(run: RunDir) -> Verified:
    """Check every file of a run folder that its plan, done marks or outputs depend on.

    Raises:
        ConfigError: `run` is not a run folder.
    """
    checks = list(_checks(run))
    if not checks:
        raise ConfigError(f"{run.root} is not a run folder of batchinfer; give a job's output.dir")
    damaged = []
    with Progress("verify", len(checks), "files") as progress:
        for path, check, remedy in checks:
            try:
                check()
            except DamagedFileError as error:
                damaged.append(DamagedFile(path.relative_to(run.root).as_posix(), error.reason, remedy))
            except ConfigError as error:  # of job.toml
                damaged.append(DamagedFile(path.name, str(error), remedy))
            progress.advance(1)
    return Verified(len(checks), damaged)


def _checks(run: RunDir) -> Iterator[Check]:
    manifest = Manifest(run.root)
    if run.run_json.exists() or run.job.exists():
        yield run.run_json, partial(read_state, run), replan_remedy(run.root)
        yield run.job, partial(recorded_job, run), REMEDY
        with suppress(DamagedFileError):  # found by the check above
            manifest = Manifest(run.root, read_state(run).get("files"))
    for path in manifest:
        yield path, partial(manifest.check, path), manifest.remedy(path)
    yield from _unit_checks(run)
    for path in sorted(set(run.stats.rglob("*.parquet")).difference(manifest)):
        yield path, partial(_read_through, path), DELETE_STATISTICS
    for path in [*submission_records(run), *run.root.glob(run.published.name)]:
        yield path, partial(read_json, path), "delete it"


def _unit_checks(run: RunDir) -> Iterator[Check]:
    repair = f"`batchinfer finish {run.root}` sets it aside, and `batchinfer work` computes what is gone"
    # a done mark also names a unit whose folder is missing
    named = [*run.unit_folders.glob("*"), *run.done_marks.glob("*")]
    for unit in sorted({int(path.name) for path in named if path.name.isdecimal()}):
        mark = None
        try:
            mark = done_mark(run, unit)
        except DamagedFileError:
            yield run.done(unit), partial(done_mark, run, unit), repair
        claim = last_claim(run, unit)
        for path in counted_files(mark, claim):
            yield path, partial(_compare, path), repair
        if mark is None and claim is not None:
            documents = {claim / CLAIM: "inherited"}
            if (lease := lease_of(claim)) is not None:
                documents[lease] = "released"
            for path, needs in documents.items():
                yield path, partial(read_json, path, needs), "the next `batchinfer work` does without it"


def _compare(path: Path) -> None:
    reason = damage(path)
    if reason is not None:
        raise DamagedFileError(path, reason)


def _read_through(path: Path) -> None:
    with own_file(path), pq.ParquetFile(sealed_table(path), page_checksum_verification=True) as file:
        for _ in file.iter_batches():
            pass
