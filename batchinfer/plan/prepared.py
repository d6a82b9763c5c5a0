"""What planning works with, handed from one of its steps to the next."""

from dataclasses import dataclass

import pyarrow as pa

from batchinfer.config import JobConfig
from batchinfer.data.encoders import Encoders
from batchinfer.manifest import Manifest
from batchinfer.model.config import ModelConfig
from batchinfer.plan.earlier_run import Learned
from batchinfer.plan.earlier_tokens import EarlierTokens
from batchinfer.rundir import RunDir


@dataclass(frozen=True, slots=True)
class Prepared:
    """See module docstring."""

    job: JobConfig
    run: RunDir
    manifest: Manifest  # of what it writes
    encoders: Encoders
    model: ModelConfig
    learned: Learned
    earlier: EarlierTokens
    kept: list[pa.Field]  # input columns as the outputs will have them
