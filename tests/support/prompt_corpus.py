"""Many tokenised prompts with common beginnings, generated part by part, and a run folder that holds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.data.parquet import table_writer
from batchinfer.data.schemas.internal import TOKENS
from batchinfer.records import Shard
from batchinfer.rundir import RunDir

VOCAB_SIZE = 128_000
SYSTEM_TOKENS, EXAMPLE_TOKENS = 60, 30
NUM_SYSTEMS, NUM_BRANCHES = 50, 20
PART_PROMPTS = 16_384  # also the row group of tokens/*.parquet
SHARD_PARTS = 61  # about a million prompts

Prompts = tuple[np.ndarray, np.ndarray]  # flat token ids, offsets


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens with which both prompts begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(first), len(second)))


def few_shot_prompts(num_prompts: int) -> Iterator[Prompts]:
    """Yield prompts of 200 tokens on average: system prompt, two examples from a tree, a unique question.

    system (one of 50, 60 tokens) ── example (one of 20, 30 tokens) ── example (the same) ── 40 to 120 own tokens
    """
    rng = np.random.default_rng(0)
    systems = rng.integers(0, VOCAB_SIZE, (NUM_SYSTEMS, SYSTEM_TOKENS), dtype=np.int32)
    examples = rng.integers(0, VOCAB_SIZE, (2, NUM_BRANCHES, EXAMPLE_TOKENS), dtype=np.int32)
    for first in range(0, num_prompts, PART_PROMPTS):
        count = min(PART_PROMPTS, num_prompts - first)
        start_tokens = SYSTEM_TOKENS + 2 * EXAMPLE_TOKENS
        offsets = np.concatenate([[0], np.cumsum(start_tokens + rng.integers(40, 121, count))])
        token_ids = rng.integers(0, VOCAB_SIZE, offsets[-1], dtype=np.int32)
        shared = [systems[rng.integers(0, NUM_SYSTEMS, count)]]
        shared += [level[rng.integers(0, NUM_BRANCHES, count)] for level in examples]
        token_ids[offsets[:-1, None] + np.arange(start_tokens)] = np.concatenate(shared, axis=1)
        yield token_ids, offsets


def write_tokens(folder: Path, parts: Iterator[Prompts]) -> tuple[RunDir, list[Shard]]:
    """A run folder with the prompts as tokenised rows."""
    run = RunDir(folder)
    for shard, shard_parts in enumerate(_shards(parts)):
        with table_writer(run.tokens(shard), TOKENS.schema, plain="token_ids") as writer:
            first_row = 0
            for token_ids, offsets in shard_parts:
                writer.write_table(_rows(shard, first_row, token_ids, offsets))
                first_row += len(offsets) - 1
    return run, shards_of(run)


def shards_of(run: RunDir) -> list[Shard]:
    """The shards whose tokens a run folder holds."""
    files = sorted((run.root / "tokens").glob("*.parquet"))
    rows = [pq.read_metadata(file).num_rows for file in files]
    return [Shard(i, str(file), file.name, 0, "", rows[i]) for i, file in enumerate(files)]


def _shards(parts: Iterator[Prompts]) -> Iterator[Iterator[Prompts]]:
    """The same parts, as many at a time as make a shard."""
    for first in parts:
        yield chain([first], islice(parts, SHARD_PARTS - 1))


def _rows(shard: int, first_row: int, token_ids: np.ndarray, offsets: np.ndarray) -> pa.Table:
    rows = np.arange(first_row, first_row + len(offsets) - 1)
    columns = {
        "shard": np.full(len(rows), shard, dtype=np.int32),
        "row": rows,
        "id": pa.array(rows).cast(pa.string()),
        "n": np.ones(len(rows), dtype=np.int32),
        "token_ids": pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(token_ids)),
        "max_tokens": np.full(len(rows), 100, dtype=np.int32),
        "sampling": pa.nulls(len(rows), pa.string()),
        "error": pa.nulls(len(rows), pa.string()),
        "control_tokens": np.zeros(len(rows), dtype=bool),
        "choices": pa.nulls(len(rows), TOKENS.schema.field("choices").type),
    }
    return pa.table(columns, schema=TOKENS.schema)
