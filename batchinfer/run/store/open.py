"""Opening the storage of a job's run folder."""

from __future__ import annotations

from pathlib import Path

from batchinfer.config import JobConfig
from batchinfer.run.store.folder import FolderStorage
from batchinfer.run.store.interface import Storage, is_in_bucket
from batchinfer.rundir import RunDir


def storage_of(job: JobConfig) -> Storage:
    """Return the storage of a job's run folder, without a request to an object store.

    Raises:
        ConfigError: the URI names no bucket, or the library for it is not installed.
    """
    if is_in_bucket(job.output.dir):
        return bucket_storage(job.output.dir, job)
    return FolderStorage(RunDir(Path(job.output.dir)))


def bucket_storage(uri: str, job: JobConfig | None) -> Storage:
    """Return the storage of a run folder in an object store.

    Args:
        job: says how the store is reached and where this node's copy is; None: the environment and the defaults.
    """
    from batchinfer.run.store.bucket import BucketStorage  # its library is an extra

    if job is None:
        return BucketStorage(uri)
    return BucketStorage(uri, job.s3, job.output.work_dir)
