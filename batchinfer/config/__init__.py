"""The job file: its schema, every default and every check.

job.py has the parts of the file; the largest parts have separate files: input.py, cluster.py and sampling.py, with
structured_outputs/ for constraints on answers. loading.py reads the file and writes error sentences,
exact_json.py keeps every digit of numbers.
"""

from batchinfer.config.cluster import FREE_SHARE, ClusterConfig
from batchinfer.config.job import DEFAULT_S3, PAGE_TOKENS, VALUE_BYTES, JobConfig, ModelPart, S3Config
from batchinfer.config.loading import checked, dump_job, job_of_table, load_job
from batchinfer.config.sampling import SamplingConfig
from batchinfer.config.spelling import did_you_mean
from batchinfer.config.toml_text import dump_parts, read_toml
from batchinfer.config.uris import is_uri

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
