"""Common arguments of the steps of planning."""

from dataclasses import dataclass

import pyarrow as pa

from batchinfer.config import JobConfig
from batchinfer.data.encoders import Encoders
from batchinfer.manifest import Manifest
from batchinfer.model.config import ModelConfig
from batchinfer.plan.earlier_run import Learned
from batchinfer.plan.earlier_tokens import EarlierTokens
from batchinfer.plan.reuse import EarlierAnswers
from batchinfer.rundir import RunDir


@dataclass(frozen=True, slots=True)
class Prepared:
    """Job, run folder, model, tokenizer and statistics of earlier runs that the steps of planning use."""

    job: JobConfig
    run: RunDir
    manifest: Manifest  # checksums of the plan's files
    encoders: Encoders
    model: ModelConfig
    learned: Learned
    earlier: EarlierTokens
    answers: EarlierAnswers | None  # of an earlier run
    kept: list[pa.Field]  # kept input columns as fields of the outputs
