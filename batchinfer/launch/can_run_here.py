"""Whether this machine runs what a job names: a backend, an exchange, a dtype. Its ranks know."""

from batchinfer.config import JobConfig
from batchinfer.host_info import has_gpu
from batchinfer.launch.rank_loader import RankLoader, join_message, open_local_ranks
from batchinfer.records import ConfigError
from batchinfer.run.open_storage import storage_of
from batchinfer.rundir import read_state
from batchinfer.stop import StopSignal


def refuse_what_cannot_run_here(job: JobConfig, ranks: RankLoader | None, stop: StopSignal) -> None:
    """Wait for the ranks' word on what the job names, where this machine decides whether it runs.

    A job that leaves backend and exchange to the machine is not held up.

    Args:
        ranks: started ahead; None: some are started for this question alone.

    Raises:
        BatchinferError: the job cannot run here; the sentence says what and why.
        InterruptedRunError: a signal came.
    """
    if not _depends_on_machine(job) or _is_planned(job):
        return
    if ranks is not None:
        ranks.refuse_if_unable()
        return
    asked = open_local_ranks(job, stop)
    try:
        asked.load_ahead(join_message(job, {}))
        asked.refuse_if_unable()
    finally:
        asked.close()


def _depends_on_machine(job: JobConfig) -> bool:
    cluster = job.cluster
    if cluster.backend not in ("auto", "reference") or (cluster.exchange != "auto" and cluster.num_ranks > 1):
        return True
    # a GPU for each rank, and one that multiplies in FP8
    return has_gpu() and cluster.backend == "auto" and (cluster.num_ranks > 1 or job.model.dtype in ("fp8", "int4"))


def _is_planned(job: JobConfig) -> bool:
    """Whether the run folder has a whole plan, or one that cannot be read, which the planner says."""
    storage = storage_of(job)
    storage.fetch("state")
    run = storage.run
    try:
        return run.run_json.exists() and read_state(run)["state"] != "planning"
    except (ConfigError, LookupError, TypeError):
        return True
