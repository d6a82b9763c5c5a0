"""Ownership check of a run folder: only its owner, and the group of output.shared_group, may write in it."""

import os

from batchinfer.config import JobConfig
from batchinfer.ownership import SHARED_UMASK, check_folder, group_id
from batchinfer.progress import note
from batchinfer.records import ConfigError
from batchinfer.rundir import RunDir


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
