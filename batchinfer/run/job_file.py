"""job.toml of a run folder, the settings of the last plan, and the checksum that run.json has of it."""

import time
from contextlib import suppress
from typing import Any

import xxhash

from batchinfer.checked_json import publish_json
from batchinfer.config import JobConfig, dump_job, load_job
from batchinfer.records import DamagedFileError
from batchinfer.rundir import RunDir, read_state
from batchinfer.whole_files import publish_text

JOB = "job"  # key of run.json
REMEDY = "`batchinfer plan` with the job's own .toml file writes it again; other settings are given to it or by --set"
REWRITE_S = 1.0  # in which a plan has written both files


def publish_job(run: RunDir, job: JobConfig, state: dict[str, Any]) -> dict[str, Any]:
    """Write job.toml even if the fingerprint is the same: other settings may have changed.

    Returns:
        `state`, what run.json says, with the checksum; run.json says that, too.
    """
    text = dump_job(job)
    publish_text(run.job, text)
    vouched = {**state, JOB: _checksum(text.encode())}
    if vouched != state:
        publish_json(run.run_json, vouched)
    return vouched


def recorded_job(run: RunDir, overrides: tuple[str, ...] = ()) -> JobConfig:
    """Return the job of a run folder.

    Raises:
        DamagedFileError: job.toml is not the one that the last plan wrote.
        ConfigError: it, or an override, says something that is wrong.
    """
    deadline = time.monotonic() + REWRITE_S
    while not _is_vouched_for(run):
        if time.monotonic() > deadline:
            raise DamagedFileError(run.job, "it is not what the plan wrote", remedy=REMEDY)
        time.sleep(REWRITE_S / 10)
    return load_job(run.job, overrides)


def _is_vouched_for(run: RunDir) -> bool:
    """Return whether run.json has the checksum of job.toml; True if run.json is damaged or an earlier version's."""
    expected = None
    with suppress(DamagedFileError):
        expected = read_state(run).get(JOB)
    try:
        return expected in (None, _checksum(run.job.read_bytes()))
    except OSError as error:
        raise DamagedFileError(run.job, error.strerror or str(error), remedy=REMEDY) from None


def _checksum(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
