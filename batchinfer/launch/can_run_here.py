"""The check, by ranks, that this machine can run a job's backend, exchange and dtype, before the job is planned."""

from batchinfer.config import JobConfig
from batchinfer.host_info import has_gpu
from batchinfer.launch.rank_loader import RankLoader, decide_weights, join_message, open_local_ranks
from batchinfer.records import ConfigError
from batchinfer.run.store.open import storage_of
from batchinfer.rundir import read_state
from batchinfer.stop_signals import StopSignal


def refuse_if_job_cannot_run(job: JobConfig, ranks: RankLoader | None, stop: StopSignal) -> None:
    """Wait for the ranks' check of backend, exchange and dtype, if the result depends on this machine.

    A job that leaves backend and exchange to the machine does not wait.

    Args:
        ranks: ranks that were started ahead; None: ranks are started for this check alone.

    Raises:
        BatchinferError: the job cannot run here; the message gives the reason.
        InterruptedRunError: a signal came.
    """
    if not _depends_on_machine(job) or _is_planned(job):
        return
    if ranks is not None:
        ranks.wait_until_can_run()
        return
    job = decide_weights(job)
    asked = open_local_ranks(job, stop)
    try:
        asked.load_ahead(join_message(job, {}))
        asked.wait_until_can_run()
    finally:
        asked.close()


def _depends_on_machine(job: JobConfig) -> bool:
    cluster = job.cluster
    if cluster.backend not in ("auto", "reference") or (cluster.exchange != "auto" and cluster.num_ranks > 1):
        return True
    # a GPU for each rank, and one that multiplies in FP8
    return (
        has_gpu() and cluster.backend == "auto" and (cluster.num_ranks > 1 or job.model.dtype in ("fp8", "int4", "fp4"))
    )


def _is_planned(job: JobConfig) -> bool:
    """Return whether the run folder has a complete plan, or an unreadable one, which the planner reports."""
    storage = storage_of(job)
    storage.fetch("state")
    run = storage.run
    try:
        return run.run_json.exists() and read_state(run)["state"] != "planning"
    except (ConfigError, LookupError, TypeError):
        return True
