"""Tokens per second of a job's products on this host, measured in a process of their own before ranks start.

The process (rank/product_speed.py) reads one layer of each kind, as a rank that streams its weights does, and runs
a prefill step and a decode step through them.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass

from batchinfer import own_process
from batchinfer.config import JobConfig
from batchinfer.launch.rank_process import RankEnvironment, rank_variables
from batchinfer.model.page_format import PageFormat
from batchinfer.model.stream_forecast import JobTokens, ProductSpeeds
from batchinfer.records import ConfigError

MOST_STEP_TOKENS = 2048  # prompt tokens of the measured step


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """The steps to measure.

    prefill_tokens: of the prefill step, in prompts of prompt_tokens each.
    decode_requests: rows of the decode step, each with kv_tokens in its pages.
    """

    folder: str
    dtype: str
    backend: str
    fp8_pages: bool
    prefill_tokens: int
    prompt_tokens: int
    decode_requests: int
    kv_tokens: int


def measure_products(job: JobConfig, tokens: JobTokens, num_at_once: int, num_local_ranks: int = 1) -> ProductSpeeds:
    """Return the tokens per second of a rank's products, without waiting for weights.

    One rank of several is measured alone, with its share of the cores. It computes all experts of its own tokens: as
    many rows as its own experts get from all ranks. The rows' way between ranks is not measured.

    Args:
        tokens: of the rank.
        num_at_once: requests that run at once on the rank.
        num_local_ranks: ranks that share this host's cores.

    Raises:
        ConfigError: the folder cannot be run here; the message is that of the process.
    """
    cluster = job.cluster
    steps = MeasuredSteps(
        folder=job.model.path,
        dtype=job.model.dtype,
        backend=cluster.backend,
        fp8_pages=PageFormat.of(job).is_fp8,
        prefill_tokens=min(cluster.prefill_tokens, MOST_STEP_TOKENS, max(1, tokens.new)),
        prompt_tokens=max(1, round(tokens.mean_prompt)),
        decode_requests=min(cluster.decode_requests, num_at_once),
        kv_tokens=max(1, round(tokens.mean_prompt + tokens.mean_answer / 2)),
    )
    ended = subprocess.run(
        own_process.command("batchinfer.rank.product_speed", json.dumps(asdict(steps))),
        env=rank_variables(RankEnvironment(0), num_ranks=num_local_ranks),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        reason = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        raise ConfigError(f"products of {job.model.path} cannot be measured: {reason.removeprefix('error: ')}")
    return ProductSpeeds(*json.loads(ended.stdout))
