"""One row's prompt as the model gets it, made from the input as a plan makes it; nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.config import JobConfig
from batchinfer.data.columns import ENCODED
from batchinfer.data.encoders import Encoders
from batchinfer.data.prompts import PromptLimits
from batchinfer.data.shard_schemas import id_type
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.data.tokenizer_process import TokenizerProcess
from batchinfer.data.validate import checked_rows
from batchinfer.model.config import load_model_config
from batchinfer.plan.inputs import find_inputs
from batchinfer.records import ConfigError, InputError, Shard


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """A row's prompt: texts are decoded from the token ids, special tokens included."""

    where: str  # the row, for a heading
    num_tokens: int
    text: str
    choices: tuple[tuple[int, str], ...]  # tokens and text of each choice that is scored after the prompt


def show_prompt(job: JobConfig, name: str, *, tokenizer: TokenizerProcess | None = None) -> ShownPrompt:
    """Return the prompt of the first row with an id, or of a row by its number in the input, from 0.

    Args:
        name: the id; or the number, if no row has this id.
        tokenizer: the tokenizer process, if it was started already.

    Raises:
        ConfigError: there is no such row, or the job or its model cannot work.
        InputError: the row is bad, or no shard can be read.
    """
    model = load_model_config(Path(job.model.path))
    limits = PromptLimits(window=model.max_positions, vocab_size=model.vocab_size)
    with Encoders(job, window=model.max_positions, process=tokenizer) as encoders:
        shards, _ = find_inputs(job, encoders, strict=False)
        readable = [shard for shard in shards if shard.problem is None]
        kind = id_type(shards, job.input.id)

        def rows(shard: Shard, wanted: int | None) -> Iterator[pa.RecordBatch]:
            yield from checked_rows(shard, job, encoders, limits, known=_only_around(wanted), id_type=kind)

        shard, number = _find(readable, lambda shard: rows(shard, None), name)
        first = 0
        for batch in rows(shard, number):
            if number < first + len(batch):
                return _shown(job, shard, batch.slice(number - first, 1).to_pylist()[0])
            first += len(batch)
    raise ConfigError(f"{shard.path} has no row {number} any more")


def _find(shards: list[Shard], rows: Callable[[Shard], Iterator[pa.RecordBatch]], name: str) -> tuple[Shard, int]:
    """Return the shard of the named row and the row's position there."""
    for shard in shards:
        first = 0
        for batch in rows(shard):
            place = pc.index(batch["id"], name).as_py()
            if place >= 0:
                return shard, first + place
            first += len(batch)
    num_rows = sum(shard.num_rows for shard in shards)
    if name.isdecimal() and int(name) < num_rows:
        number = int(name)
        for shard in shards:
            if number < shard.num_rows:
                return shard, number
            number -= shard.num_rows
    numbers = "row has the number 0" if num_rows == 1 else f"{num_rows:,} rows have the numbers 0 to {num_rows - 1:,}"
    raise ConfigError(f"no row has the id {name!r}, and the {numbers}")


def _only_around(row: int | None) -> Callable[[int], pa.RecordBatch]:
    """Return the `known` of `checked_rows` that leaves only the batch with this row to be encoded; None: no batch."""
    first = 0

    def known(num_rows: int) -> pa.RecordBatch | None:
        nonlocal first
        begin, first = first, first + num_rows
        if row is not None and begin <= row < first:
            return None
        empty = {"token_ids": [], "error": "not read", "control_tokens": False}
        return pa.RecordBatch.from_pylist([empty] * num_rows, schema=ENCODED)

    return known


def _shown(job: JobConfig, shard: Shard, row: dict) -> ShownPrompt:
    named = "" if row["id"] is None else f", id {row['id']}"
    where = f"row {row['row']} of {shard.path}{named}"
    if row["error"] is not None:
        raise InputError(f"{where} is bad: {row['error']}")
    tokenizer = load_tokenizer(Path(job.model.path))
    choices = tuple((len(ids), tokenizer.decode(ids, with_special=True)) for ids in row["choices"] or ())
    return ShownPrompt(where, len(row["token_ids"]), tokenizer.decode(row["token_ids"], with_special=True), choices)
