"""Finishing of a run: a check of every row, then writing of outputs/ and stats/, and their publication."""

import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass

import pyarrow as pa

from batchinfer.checked_json import publish_json
from batchinfer.config import JobConfig
from batchinfer.data.inputs import with_schemas
from batchinfer.data.parquet import read_rows, table_writer
from batchinfer.data.schemas.statistics import STATS_NODES
from batchinfer.data.shards import refuse_changed
from batchinfer.finish.dataset_folder import card_of, dataset_files, write_dataset
from batchinfer.finish.join import counted_units, join_results, open_database
from batchinfer.finish.long_answers import LongAnswers
from batchinfer.finish.outputs import commonest_error, write_outputs
from batchinfer.finish.statistics import write_request_stats, write_run_stats, write_unit_stats
from batchinfer.manifest import Manifest
from batchinfer.progress import note
from batchinfer.records import BatchinferError, DamagedFileError, ExitCode, Shard
from batchinfer.run.equality import run_equality, run_results
from batchinfer.run.heartbeat import signs_of_life
from batchinfer.run.publish import publish_run
from batchinfer.run.store.interface import Storage, put_statistics
from batchinfer.run.store.open import storage_of
from batchinfer.run.units.reused import REUSED
from batchinfer.run.units.step_journal import keep_lost_steps
from batchinfer.rundir import LINE_FILES, RunDir, output_files, read_state, shards_of_state
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


def finish_run(run: RunDir, job: JobConfig, *, allow_partial: bool = False) -> FinishedRun:
    """Check that no row is missing or double, write outputs/ and stats/, and publish them if output.publish is set.

    Raises:
        IncompleteRunError: rows are missing (without `allow_partial`), or a result is double.
        RunMismatchError: an input shard is not the file that was planned; or output.publish is another job's.
        StoreError: an object store does not answer or refuses to.
    """
    storage = storage_of(job)
    with _scratch(storage, is_last=not allow_partial):
        storage.fetch("plan", "tokens", "results", "stats", "outputs", "signs", *(("claims",) if allow_partial else ()))
        keep_last_signs(storage)
        result = _finish(run, job, allow_partial=allow_partial)
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
    note(
        f"{num_objects:,} files put into {job.output.publish}" if num_objects else f"{job.output.publish} is up to date"
    )


def _finish(run: RunDir, job: JobConfig, *, allow_partial: bool) -> FinishedRun:
    state = read_state(run)
    manifest = Manifest(run.root, state.get("files"))
    shards = shards_of_state(state)
    forms = [job.output.format, job.output.push]
    is_as_asked = state.get("forms", ["parquet", None]) == forms
    if state["state"] == "finished" and is_as_asked and _is_written(run, job, manifest, shards):
        equality = asdict(run_equality(run, state, run_results(run, manifest)))
        write_run_stats(run, job, shards, state["counts"], equality, manifest)  # prices may have changed
        publish_json(run.run_json, {**state, "files": manifest.as_json()})
        return FinishedRun(**{**state["finished"], "unreadable": tuple(state["finished"]["unreadable"])})
    refuse_changed(shards, job.s3)
    shards = with_schemas(shards, job.s3)
    manifest.check(run.requests, run.duplicates, *(run.tokens(shard.index) for shard in shards if not shard.problem))
    units = counted_units(run, manifest, allow_partial=allow_partial)
    equality = asdict(run_equality(run, state, [path for unit in units.values() for path in unit.files]))
    with open_database(run) as connection, closing(LongAnswers(run.finish_scratch)) as answers:
        # the scores of choices are added up first
        apart = answers if job.input.choices is None else None
        # what a KV store holds changes the counts anyway
        as_planned = REUSED in state and job.kv.dir is None
        num_missing = join_results(connection, run, units, apart, allow_partial=allow_partial, as_planned=as_planned)
        _remove_other_formats(run, job, manifest, shards)
        id_type = pa.type_for_alias(state["id_type"])
        num_rows, num_errors = write_outputs(
            connection, run, manifest, job, shards, id_type, answers, state["counts"]["rows"]
        )
        commonest = commonest_error(connection, run, shards) if num_errors else (None, 0)
        write_dataset(connection, run, manifest, job, shards, state["fingerprint"]["model.weights"])
        write_request_stats(connection, run, shards, manifest=manifest)
        write_unit_stats(connection, run, units, manifest)
    refuse_changed(shards, job.s3)  # kept columns were read in the meantime
    keep_lost_steps(run)
    write_run_stats(run, job, shards, state["counts"], equality, manifest)
    unreadable = tuple(shard.path for shard in shards if shard.problem is not None)
    result = FinishedRun(num_rows, num_errors, num_missing, unreadable, *commonest)
    finished = {**asdict(result), "unreadable": list(unreadable)}
    now = "partial" if num_missing else "finished"
    found = {"finished": finished, "forms": forms, "files": manifest.as_json()}
    publish_json(run.run_json, {**state, "state": now, **found, **equality})
    return result


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


def keep_last_signs(storage: Storage) -> None:
    """Set the end of killed sessions in stats/nodes to their last heartbeat.

    Their own rows end with the last commit, which may be much earlier.

    Raises:
        ConfigError: a file is damaged or cannot be written.
    """
    for session, sign in signs_of_life(storage.run).items():
        path = storage.run.session_stats("nodes", session)
        if sign.may_live or not path.exists():
            continue
        (row,) = read_rows(path)
        if row["state"] == "running" and row["end_s"] < sign.time_s:
            with table_writer(path, STATS_NODES.schema) as writer:
                writer.write_table(pa.Table.from_pylist([{**row, "end_s": sign.time_s}], schema=STATS_NODES.schema))
            put_statistics(storage, session)


LOOK_S = 5.0  # between checks, each of which lists one folder


def wait_for_units(storage: Storage) -> None:
    """Wait until every unit of the plan is done; a signal ends the command earlier."""
    storage.fetch("state", "plan")
    run = storage.run
    rows = read_rows(run.units, Manifest(run.root, read_state(run).get("files")))
    wanted = {run.done(row["unit"]).name for row in rows}
    reported = None
    while left := len(wanted - set(storage.names(run.done_marks))):
        if left != reported:
            note(f"waiting: {left:,} of {len(wanted):,} units are not done yet")
            reported = left
        time.sleep(LOOK_S)
