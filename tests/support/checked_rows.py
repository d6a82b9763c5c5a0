"""Shards tokenised and checked by themselves, without a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from batchinfer.config import JobConfig
from batchinfer.data.formats.values import column_roles
from batchinfer.data.prompts import PromptLimits
from batchinfer.data.shards import find_shards
from batchinfer.data.validate import tokenize_shard
from batchinfer.records import Shard
from support.open_encoders import encoders_of
from support.paths import RANDOM_MODEL

LIMITS = PromptLimits(window=2048, vocab_size=1024)


def make_job(
    files: Path | str, *, keep: list[str] | None = None, of_job: dict[str, Any] | None = None, **columns: Any
) -> JobConfig:
    return JobConfig.model_validate(
        {
            "input": {"files": [str(files)], **(columns or {"prompt": "prompt"})},
            "output": {"dir": "unused", "keep_columns": keep or []},
            "model": {"path": str(RANDOM_MODEL)},
            "sampling": {"max_tokens": 16, **(of_job or {})},
        }
    )


def checked(path: Path, job: JobConfig | None = None) -> tuple[Shard, list[dict[str, Any]]]:
    """(the shard, rows of tokens/<shard>.parquet)."""
    job = job or make_job(path)
    encoders = encoders_of(job, window=LIMITS.window)
    roles = column_roles(job, encoders.columns)
    (shard,) = find_shards(job.input.files, format=job.input.format, roles=roles)
    assert shard.problem is None, shard.problem
    tokenize_shard(shard, job, encoders, LIMITS, path.parent / "tokens.parquet", lambda rows: None)
    rows = pq.read_table(path.parent / "tokens.parquet").to_pylist()
    assert [row["row"] for row in rows] == list(range(shard.num_rows))
    return shard, rows


def errors(path: Path, job: JobConfig | None = None) -> list[str | None]:
    return [row["error"] for row in checked(path, job)[1]]
