"""The run folder and job that a person names, by job file or run folder."""

import os
from pathlib import Path

from batchinfer.config import JobConfig, load_job
from batchinfer.ownership import SHARED_UMASK, check_folder, group_id
from batchinfer.progress import note
from batchinfer.records import ConfigError
from batchinfer.run.fingerprint import VERSION, check_same, settings_fingerprint
from batchinfer.run.job_file import recorded_job
from batchinfer.run.store.interface import Part, Storage, is_in_bucket, uri_of
from batchinfer.run.store.open import bucket_storage, storage_of
from batchinfer.rundir import RunDir, read_state, was_planned


def planned_run(
    target: Path, overrides: tuple[str, ...], *parts: Part, may_be_planning: bool = False, any_version: bool = False
) -> tuple[RunDir, JobConfig]:
    """Return the run folder and job of a job file or run folder; `parts` as in `run_folder`.

    Args:
        any_version: whether a run of another version of batchinfer is accepted, with a warning.

    Raises:
        ConfigError: there is no such file or folder, the job has no plan yet, or others may write in its folder.
        DamagedFileError: run.json is damaged or gone.
        RunMismatchError: the job's settings are not those of the plan.
    """
    job = job_of(target, overrides)
    remedy = f"run `batchinfer plan {target}` first"
    return run_of(job, remedy, *parts, may_be_planning=may_be_planning, any_version=any_version), job


def run_of(
    job: JobConfig, remedy: str, *parts: Part, may_be_planning: bool = False, any_version: bool = False
) -> RunDir:
    """Return the run folder of a planned job.

    Args:
        remedy: end of the error sentence if the job is not planned: what to do.
        parts: as in `run_folder`.
        any_version: as in `planned_run`.

    Raises:
        ConfigError, DamagedFileError, RunMismatchError: as `planned_run`.
    """
    storage = storage_of(job)
    storage.fetch("state", *parts)
    run, state = storage.run, None
    if was_planned(run):
        trust_run(run, job)
        state = read_state(run)
    if state is None or (state["state"] == "planning" and not may_be_planning):
        raise ConfigError(f"{run.shown} has no complete plan yet; {remedy}")
    recorded, current = state["fingerprint"], settings_fingerprint(job)
    if any_version and (old := recorded.get(VERSION)) != (new := current[VERSION]):
        # settings are not compared: each version has its own keys
        note(f"warning: {run.shown} was planned by batchinfer {old}; this version, {new}, may not show all of it")
    else:
        check_same(recorded, current, run.shown)
    return run


def run_folder(target: Path, *parts: Part) -> Path:
    """Return the run folder of a job file or run folder; for one in s3:// return this node's copy.

    Args:
        parts: parts to fetch into the copy, in addition to run.json and job.toml.

    Raises:
        ConfigError: there is no such file or folder, or the job file is wrong.
        StoreError: the object store does not answer or refuses access.
    """
    if target.is_dir():
        return target
    uri = uri_of(target)
    storage = storage_of(job_of(target, ())) if uri is None else bucket_storage(uri, None)
    storage.fetch("state", *parts)
    if uri is not None:
        _refuse_nothing(storage.run)
    return storage.run.root


def job_of(target: Path, overrides: tuple[str, ...]) -> JobConfig:
    """Return the job of a job file or run folder.

    Raises:
        ConfigError: the file or folder does not exist or has no job.
    """
    uri = uri_of(target)
    if uri is not None:
        return _job_in_bucket(bucket_storage(uri, None), overrides)
    if not target.is_dir():
        if not target.exists() and target.suffix != ".toml":
            raise ConfigError(f"there is no run folder {target}; give a job's output.dir or its .toml file")
        return load_job(target, overrides)
    run = RunDir(target.absolute())
    if not was_planned(run):
        raise ConfigError(f"{target} is not a run folder of batchinfer; give a job file or a job's output.dir")
    job = recorded_job(run, overrides)
    if is_in_bucket(job.output.dir):  # the folder is this node's copy of that
        return job
    # the folder itself counts, not the output.dir written in it: it may have been moved
    return job.model_copy(update={"output": job.output.model_copy(update={"dir": str(run.root)})})


def _job_in_bucket(storage: Storage, overrides: tuple[str, ...]) -> JobConfig:
    """Return the job of a run folder in a bucket, with this folder as output.dir even if it was copied."""
    storage.fetch("state")
    run = storage.run
    _refuse_nothing(run)
    job = recorded_job(run, overrides)
    return job.model_copy(update={"output": job.output.model_copy(update={"dir": run.shown})})


def _refuse_nothing(run: RunDir) -> None:
    if not run.job.exists() or not run.run_json.exists():
        raise ConfigError(f"{run.shown} holds no complete plan; give its job file, or `batchinfer plan` it first")


def trust_run(run: RunDir, job: JobConfig) -> None:
    """Check a run folder's owner and mode; new files of this process may then be changed by the group that shares it.

    Raises:
        ConfigError: others than its owner or its group may write in it, or a group of the job cannot be had.
    """
    group_id(job.kv.shared_group, "kv.shared_group")  # ranks would only go on without the store
    gid = group_id(job.output.shared_group, "output.shared_group") if run.uri is None else None  # a copy is private
    try:
        warning = check_folder(run.root, gid, setting="output.dir")
    except OSError as error:
        raise ConfigError(f"cannot look at {run.root}: {error.strerror or error}; name a folder of your own") from None
    if warning is not None:
        note(warning)
    if gid is not None:
        os.umask(SHARED_UMASK)
