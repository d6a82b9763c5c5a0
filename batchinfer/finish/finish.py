"""Finishing of a run: a check of every row, then writing of outputs/ and stats/, and their publication."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

from batchinfer.checked_json import publish_json
from batchinfer.config import JobConfig
from batchinfer.data.inputs import with_schemas
from batchinfer.data.parquet import read_rows
from batchinfer.data.prompt_tokenizer import PromptTokenizer
from batchinfer.data.shards import refuse_changed
from batchinfer.finish.dataset_folder import card_of, dataset_files, write_dataset
from batchinfer.finish.join import join_results, open_database
from batchinfer.finish.long_answers import LongAnswers
from batchinfer.finish.outputs import commonest_error, write_outputs
from batchinfer.finish.statistics import write_request_stats, write_run_stats, write_unit_stats
from batchinfer.manifest import Manifest
from batchinfer.progress import note
from batchinfer.records import BatchinferError, DamagedFileError, ExitCode, Shard
from batchinfer.run.equality import run_equality
from batchinfer.run.fingerprint import planned_tokenizer
from batchinfer.run.publish import publish_run
from batchinfer.run.session import Session, keep_last_signs
from batchinfer.run.store.interface import Storage
from batchinfer.run.store.open import storage_of
from batchinfer.run.units.counted import CountedUnit, counted_units, run_results
from batchinfer.run.units.reused import REUSED
from batchinfer.run.units.step_journal import keep_lost_steps
from batchinfer.rundir import LINE_FILES, RunDir, output_files, read_state, shards_of_state
from batchinfer.sanitize import count_text
from batchinfer.whole_files import remove_leftovers


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The result of finishing a run."""

    num_rows: int
    num_errors: int
    num_missing: int  # rows that were not computed (--allow-partial)
    unreadable: tuple[str, ...]  # paths of shards without outputs
    commonest_error: str | None = None  # the most frequent reason of error rows, without the number of the line
    num_commonest: int = 0  # error rows with that reason

    @property
    def exit_code(self) -> int:
        return ExitCode.ROW_ERRORS if self.num_errors or self.unreadable else ExitCode.OK


def finish_run(run: RunDir, job: JobConfig, session: Session, *, allow_partial: bool = False) -> FinishedRun:
    """Check that no row is missing or double, write outputs/ and stats/, and publish them if output.publish is set.

    Raises:
        ConfigError: the run folder was deleted or replaced meanwhile.
        IncompleteRunError: rows are missing (without `allow_partial`), or a result is double.
        RunMismatchError: an input shard is not the file that was planned; or output.publish is another job's.
        StoreError: an object store does not answer or refuses to.
    """
    storage = storage_of(job)
    with _scratch(storage, is_last=not allow_partial):
        storage.fetch("plan", "tokens", "results", "stats", "outputs", "signs", *(("claims",) if allow_partial else ()))
        keep_last_signs(storage)
        try:
            result = _finish(run, job, session, allow_partial=allow_partial)
        except Exception:
            session.check_run()  # without the folder any error may come
            raise
        storage.commit()
        if job.output.publish is not None:
            _publish(run, job, result)
            storage.commit()
    return result


def _publish(run: RunDir, job: JobConfig, result: FinishedRun) -> None:
    try:
        num_objects = publish_run(run, job, asdict(result))
    except BatchinferError as error:
        where = f"the results are all in {run.outputs}: run `batchinfer finish {run.shown}` to publish them"
        error.args = (f"{error}; {where}",)  # the classes of errors have different constructors
        raise
    files = count_text(num_objects, "file")
    note(f"{files} put into {job.output.publish}" if num_objects else f"{job.output.publish} is up to date")


def _finish(run: RunDir, job: JobConfig, session: Session, *, allow_partial: bool) -> FinishedRun:
    """Gather the results that count, write rows from them, then the statistics and run.json that vouch for the rows."""
    state = read_state(run)
    manifest = Manifest(run.root, state.get("files"))
    shards = shards_of_state(state)
    forms = [job.output.format, job.output.push]
    is_as_asked = state.get("forms", ["parquet", None]) == forms
    is_written = state["state"] == "finished" and is_as_asked and _is_written(run, job, manifest, shards)
    units: dict[int, CountedUnit] = {}
    if not is_written:
        manifest.check(
            run.requests, run.duplicates, *(run.tokens(shard.index) for shard in shards if not shard.problem)
        )
        units = counted_units(run, manifest, allow_partial=allow_partial)
        keep_lost_steps(run)
    counted = run_results(run, manifest) if is_written else (path for unit in units.values() for path in unit.files)
    equality = asdict(run_equality(run, state, counted))
    tokenizer = cache(partial(planned_tokenizer, job, state["fingerprint"], run.root))

    if is_written:
        result = FinishedRun(**{**state["finished"], "unreadable": tuple(state["finished"]["unreadable"])})
    else:
        result = _write_rows(run, job, session, state, manifest, shards, units, tokenizer, allow_partial=allow_partial)

    session.check_run()  # run.json of another run must not be overwritten
    write_run_stats(run, job, shards, state["counts"], equality, manifest)  # again if written: prices may have changed
    finished = {**asdict(result), "unreadable": list(result.unreadable)}
    now = "partial" if result.num_missing else "finished"
    found = {"finished": finished, "forms": forms, "files": manifest.as_json()}
    publish_json(run.run_json, {**state, "state": now, **found, **equality})
    return result


def _write_rows(
    run: RunDir,
    job: JobConfig,
    session: Session,
    state: dict[str, Any],
    manifest: Manifest,
    shards: list[Shard],
    units: dict[int, CountedUnit],
    tokenizer: Callable[[], PromptTokenizer],
    *,
    allow_partial: bool,
) -> FinishedRun:
    """Write outputs/, dataset/, stats/requests and stats/units; `tokenizer` is called only if outputs need it."""
    refuse_changed(shards, job.s3)
    shards = with_schemas(shards, job.s3)
    files = [path for unit in units.values() for path in unit.files]
    with open_database(run) as connection, closing(LongAnswers(run.finish_scratch)) as answers:
        # the scores of choices are added up first
        apart = answers if job.input.choices is None else None
        # what a KV store holds changes the counts anyway
        as_planned = REUSED in state and job.kv.dir is None
        num_missing = join_results(connection, run, files, apart, allow_partial=allow_partial, as_planned=as_planned)
        session.check_run()
        _remove_other_formats(run, job, manifest, shards)
        num_rows, num_errors = write_outputs(connection, run, manifest, job, shards, state, answers, tokenizer)
        commonest = commonest_error(connection, run, shards) if num_errors else (None, 0)
        write_dataset(connection, run, manifest, job, shards, state["fingerprint"]["model.weights"])
        write_request_stats(connection, run, shards, manifest=manifest)
        write_unit_stats(connection, run, units, manifest)
    refuse_changed(shards, job.s3)  # kept columns were read in the meantime
    unreadable = tuple(shard.path for shard in shards if shard.problem is not None)
    return FinishedRun(num_rows, num_errors, num_missing, unreadable, *commonest)


def _remove_other_formats(run: RunDir, job: JobConfig, manifest: Manifest, shards: list[Shard]) -> None:
    """Delete files of lines that an earlier finish wrote in another output.format."""
    files = {form: {file for shard in shards for file in output_files(run, shard.name, form)} for form in LINE_FILES}
    for path in set().union(*files.values()) - files[job.output.format]:
        path.unlink(missing_ok=True)
        manifest.remove(path)


@contextmanager
def _scratch(storage: Storage, *, is_last: bool) -> Iterator[None]:
    """Lock the run for finishing, with an empty scratch folder that is removed afterwards.

    Args:
        is_last: whether no worker can be active after success, so that leftovers of dead workers are removed, too.
    """
    run = storage.run
    with storage.locked(doing="finish this run"):
        shutil.rmtree(run.finish_scratch, ignore_errors=True)
        try:
            yield
            if is_last:
                storage.collect_garbage()
                shutil.rmtree(run.work, ignore_errors=True)
                remove_leftovers(run.root)
                for folder in (run.requests.parent, run.tokens(0).parent, run.unit_folders, run.done_marks, run.stats):
                    remove_leftovers(folder, deep=True)
        finally:
            shutil.rmtree(run.finish_scratch, ignore_errors=True)
            with suppress(OSError):  # other commands may have files in it
                run.work.rmdir()


def _is_written(run: RunDir, job: JobConfig, manifest: Manifest, shards: list[Shard]) -> bool:
    files = [file for one in shards if one.problem is None for file in output_files(run, one.name, job.output.format)]
    tables = [run.stats_file(table) for table in ("requests", "units", "run")]
    files += [table for table in tables if table in manifest]  # tables of an earlier version are not in the manifest
    try:
        manifest.check(*files, *(dataset_files(run, shards) if job.output.push else ()))
    except DamagedFileError as error:
        note(f"{error.path} is missing or damaged ({error.reason}); all outputs are written again")
        return False
    if job.output.push and not card_of(run).exists():
        return False
    return all(table.exists() for table in tables)


LOOK_S = 5.0  # between checks, each of which lists one folder


def wait_for_units(storage: Storage, session: Session) -> None:
    """Wait until every unit of the plan is done; a signal ends the command earlier.

    Raises:
        ConfigError: the run folder was deleted or replaced meanwhile.
    """
    storage.fetch("state", "plan")
    run = storage.run
    rows = read_rows(run.units, Manifest(run.root, read_state(run).get("files")))
    wanted = {run.done(row["unit"]).name for row in rows}
    reported = None
    while left := len(wanted - set(storage.names(run.done_marks))):
        if left != reported:
            units, are = count_text(len(wanted), "unit"), "is" if left == 1 else "are"
            note(f"waiting: {left:,} of {units} {are} not done yet")
            reported = left
        time.sleep(LOOK_S)
        session.check_run()
