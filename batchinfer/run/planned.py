"""The run folder and job that a person names, by job file or run folder."""

from __future__ import annotations

from pathlib import Path

from batchinfer.config import JobConfig, load_job
from batchinfer.records import ConfigError
from batchinfer.run.fingerprint import check_same, settings_fingerprint
from batchinfer.run.trust import trust_run
from batchinfer.rundir import RunDir, read_json


def planned_run(target: Path, overrides: tuple[str, ...]) -> tuple[RunDir, JobConfig]:
    """The run folder and job behind a job file or a run folder.

    Raises:
        ConfigError: there is no such file or folder, the job has no plan yet, or others may write in its folder.
        RunMismatchError: the job's settings are not those of the plan.
    """
    if target.is_dir():
        run = RunDir(target.absolute())
        if not run.run_json.exists() or not run.job.exists():
            raise ConfigError(f"{target} is not a run folder of batchinfer; give a job file or a job's output.dir")
        # the folder itself counts, not the output.dir written in it: it may have been moved
        job = load_job(run.job, overrides)
    elif not target.exists() and target.suffix != ".toml":
        raise ConfigError(f"there is no run folder {target}; give a job's output.dir or its .toml file")
    else:
        job = load_job(target, overrides)
        run = RunDir(Path(job.output.dir))
    has_plan = run.run_json.exists()
    if has_plan:
        trust_run(run, job)
        has_plan = read_json(run.run_json)["state"] != "planning"
    if not has_plan:
        raise ConfigError(f"{run.root} has no complete plan yet; run `batchinfer plan {target}` first")
    check_same(read_json(run.run_json)["fingerprint"], settings_fingerprint(job), run.root)
    return run, job
