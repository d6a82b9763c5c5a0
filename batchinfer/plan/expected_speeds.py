"""Expected speeds of a job's ranks: those of an earlier run, else simulated ones."""

import numpy as np

from batchinfer.model.page_format import PageFormat
from batchinfer.plan.earlier_run import Speeds
from batchinfer.plan.forecast import PlannedWork
from batchinfer.plan.inputs import Prepared
from batchinfer.progress import note
from batchinfer.records import ConfigError


def expected_speeds(prepared: Prepared, work: PlannedWork) -> tuple[Speeds | None, int | None]:
    """Return the speeds of the earlier run, else simulated speeds of cluster.gpu; and the GPUs per node.

    A value is None if it is not known.
    """
    cluster, learned = prepared.job.cluster, prepared.learned.speeds
    if cluster.gpu is None:
        return learned, None
    # imported here because the simulator is slow to load, and only jobs with cluster.gpu need it
    from batchinfer.sim.hardware import accelerator
    from batchinfer.sim.speeds import Ranks, paper_speeds

    gpu = accelerator(cluster.gpu, None)
    gpus_per_node = gpu.gpus_per_node
    if learned is not None or len(work.prompt_tokens) == 0:
        return learned, gpus_per_node
    if prepared.job.model.dtype != "fp8":
        note(f"warning: no time is predicted for {cluster.gpu}: only dtype fp8 can be simulated")
        return None, gpus_per_node
    ranks = Ranks(
        gpu=cluster.gpu,
        prefill_ranks=cluster.num_prefill_ranks,
        decode_ranks=cluster.num_decode_ranks,
        redundant_experts=cluster.redundant_experts,
        overlap=cluster.overlap if isinstance(cluster.overlap, bool) else None,
        prefill_tokens=cluster.prefill_tokens,
        decode_requests=cluster.decode_requests,
        page_bytes=cluster.page_bytes,
        pages=PageFormat.of(prepared.job),
    )
    answers = np.maximum(1, np.ceil(work.answer_tokens)).astype(np.int64)
    cached = np.minimum(work.shared_tokens, work.prompt_tokens - 1)
    try:
        found = paper_speeds(work.prompt_tokens, cached, answers, prepared.model, ranks)
    except ConfigError as error:
        note(f"warning: no time is predicted for {cluster.gpu}: {error}")
        return None, gpus_per_node
    note(f"time and cost on {gpu.name} are predicted by {gpu.rates_source}")
    speeds = Speeds(
        found.prefill_tokens_per_s,
        found.decode_tokens_per_s,
        seconds_per_busy_second=1.0,
        startup_s=0.0,
        longest_answer_s=found.longest_answer_s,
        is_simulated=True,
    )
    return speeds, gpus_per_node
