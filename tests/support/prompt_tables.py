"""Tables of prompts as Parquet files, and the rows that they are checked and tokenized to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.config import JobConfig
from batchinfer.data.prompts import PromptLimits
from batchinfer.data.shards import find_shards
from batchinfer.data.validate import ShardRows, tokenize_shard
from batchinfer.records import Shard
from support.open_encoders import encoders_of

SAMPLE = Path(__file__).parents[2] / "sample_data"
LIMITS = PromptLimits(window=2048, vocab_size=1024)
MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    """A Parquet file of these columns; options of pyarrow's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path


def map_of(kind: pa.DataType) -> pa.MapType:
    """A map from texts, as a Parquet file of a column `task` gives it back."""
    return pa.map_(pa.string(), pa.field("task", kind))


def one_shard(path: Path) -> Shard:
    """The only shard that this path is."""
    return find_shards([str(path)])[0]


def make_job(sampling: dict[str, Any] | None = None, /, **columns: str) -> JobConfig:
    """Return a job whose prompts are in these columns, with 16 tokens, two samples and the given sampling."""
    return JobConfig.model_validate(
        {
            "input": {"files": ["unused"], **(columns or {"prompt": "prompt"})},
            "output": {"dir": "unused"},
            "model": {"path": str(SAMPLE / "model")},
            "sampling": {"max_tokens": 16, "n": 2, **(sampling or {})},
        }
    )


def tokenize(
    shard: Shard,
    target: Path,
    job: JobConfig,
    limits: PromptLimits = LIMITS,
    progress: Callable[[int], None] = lambda rows: None,
) -> ShardRows:
    """Tokenise as a plan does, into this file."""
    return tokenize_shard(shard, job, encoders_of(job, window=limits.window), limits, target, progress)


def copy_with(tmp_path: Path, tokenizer_parts: dict[str, Any]) -> Path:
    """The sample model folder with another tokenizer.json."""
    folder = shutil.copytree(SAMPLE / "model", tmp_path / "model")
    parts = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(parts | tokenizer_parts))
    return folder


def check(
    tmp_path: Path, columns: dict[str, Any], job: JobConfig | None = None, limits: PromptLimits = LIMITS
) -> tuple[ShardRows, list[dict[str, Any]]]:
    """(what was found, rows of tokens/<shard>.parquet) for a shard of these columns."""
    shard = one_shard(write(tmp_path / "in.parquet", columns))
    done: list[int] = []
    found = tokenize(shard, tmp_path / "tokens.parquet", job or make_job(), limits, done.append)
    rows = pq.read_table(tmp_path / "tokens.parquet").to_pylist()
    assert sum(done) == found.num_rows == len(rows) == shard.num_rows
    assert [row["row"] for row in rows] == list(range(len(rows)))
    assert found.num_bad == sum(row["error"] is not None for row in rows)
    for row in rows:
        if row["error"] is not None:
            assert (row["token_ids"], row["max_tokens"], row["sampling"]) == (None, 0, None)
            assert "\n" not in row["error"]
    return found, rows
