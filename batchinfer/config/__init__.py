"""The job file: its schema, every default and every check.

job.py has the file and its parts, sampling.py how tokens are picked, structured_outputs.py what an answer must be,
problems.py what to tell of a wrong file.
"""

from batchinfer.config.job import (
    DEFAULT_S3,
    FREE_SHARE,
    PAGE_TOKENS,
    VALUE_BYTES,
    ClusterConfig,
    JobConfig,
    ModelPart,
    S3Config,
    checked,
    dump_job,
    dump_parts,
    is_uri,
    job_of_table,
    load_job,
    read_toml,
)
from batchinfer.config.problems import did_you_mean
from batchinfer.config.sampling import SamplingConfig

__all__ = [
    "DEFAULT_S3",
    "FREE_SHARE",
    "PAGE_TOKENS",
    "VALUE_BYTES",
    "ClusterConfig",
    "JobConfig",
    "ModelPart",
    "S3Config",
    "SamplingConfig",
    "checked",
    "did_you_mean",
    "dump_job",
    "dump_parts",
    "is_uri",
    "job_of_table",
    "load_job",
    "read_toml",
]
