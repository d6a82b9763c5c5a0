"""Tokenising and checking of every row of a shard, before any accelerator is used.

Each input row becomes one row of tokens/<shard>.parquet (schemas.TOKENS); a bad row has an error sentence there.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from batchinfer.config import JobConfig
from batchinfer.data.choices import ChoiceChecks, Choices
from batchinfer.data.column_checks import wanted_columns
from batchinfer.data.columns import column_type, list_lengths, python_values
from batchinfer.data.encoders import Encoders, Pieces
from batchinfer.data.formats.line_rows import AS_JSON, bad_lines
from batchinfer.data.formats.values import RESPELLED, column_roles, keeps_values, role_of
from batchinfer.data.inputs import read_batches
from batchinfer.data.kept_fields import cast_kept_columns
from batchinfer.data.overrides import SamplingOverrides, warnings_of
from batchinfer.data.parquet import own_parquet, table_writer
from batchinfer.data.prompts import PromptChecks, PromptLimits, RowBatch
from batchinfer.data.row_ids import IdColumn
from batchinfer.data.row_values import (
    VALUES,
    chats_without_date,
    first_lost_null,
    rows_with_calls,
    rows_with_tools,
    without_nulls,
)
from batchinfer.data.schemas.internal import TOKENS, smallest_token_type, with_token_type
from batchinfer.data.shard_schemas import file_schema, shard_schema
from batchinfer.data.wide_rows import BATCH_BYTES
from batchinfer.manifest import Manifest
from batchinfer.records import Sampling, Shard
from batchinfer.whole_files import Publisher

GROUP_ROWS = 16384  # rows per row group of tokens/<shard>.parquet
GROUP_BYTES = 16 << 20
MOST_WARNINGS = 20  # different ones of a shard
OTHER_WARNINGS = "other parts of structured outputs have no effect, too"
_FOUND = b"batchinfer.found"  # key of the file's metadata that has ShardRows as JSON


@dataclass(slots=True)
class ShardRows:
    """Counts and warnings of one shard's rows."""

    num_rows: int = 0
    num_bad: int = 0
    num_capped: int = 0  # good rows whose max_tokens was cut to the model's window
    first_error: str | None = None  # "row <row>: <sentence>" of the first bad row
    id_missing: bool = False  # the shard has no id column
    num_plain: int = 0  # good rows whose prompt is raw text without a control token
    num_double_bos: int = 0  # good rows of raw text with the BOS token that the tokenizer adds itself
    num_unwritten_tools: int = 0  # good rows with tools that the chat template does not write
    num_unwritten_calls: int = 0  # good rows with earlier tool calls that the chat template does not write
    num_dateless: int = 0  # good rows of OpenAI's chats without the date that the chat template writes
    lost_null: str | None = None  # "<key> in row <row>" of the first null of a tool that prompts leave out
    lost_const: str | None = None  # the same of a const in the sampling column, which schemas leave out
    warnings: dict[str, int] = field(default_factory=dict)  # rows by sentence about their structured outputs

    def add(self, batch: RowBatch, job: JobConfig, *, writes_tools: bool, writes_calls: bool, lacks_date: bool) -> None:
        """Count the shard's next rows, after they were checked.

        Args:
            writes_tools: whether the chat template writes tools.
            writes_calls: whether the chat template writes tool calls of earlier messages.
            lacks_date: whether the chat template writes a date, and the job gives none.
        """
        if batch.errors and self.first_error is None:
            row = min(batch.errors)
            self.first_error = f"row {self.num_rows + row}: {batch.errors[row]}"
        if self.lost_null is None:
            self.lost_null = self._lost_null(batch, job.input.tools)
        if self.lost_const is None:
            self.lost_const = self._lost_null(batch, job.input.sampling, keys=("const",))
        if not writes_tools:
            self.num_unwritten_tools += rows_with_tools(job, batch.columns, batch.errors)
        if not writes_calls:
            self.num_unwritten_calls += rows_with_calls(job, batch.columns, batch.errors)
        if lacks_date and job.input.format == "openai":
            self.num_dateless += chats_without_date(batch.columns, batch.errors)
        if (
            job.input.prompt_kind in ("prompt", "template")
            and not job.input.makes_chats
            and batch.holds_control is not None
        ):
            is_plain = ~batch.holds_control
            is_plain[list(batch.errors)] = False
            self.num_plain += int(np.count_nonzero(is_plain))
        self.num_rows += batch.num_rows
        self.num_bad += len(batch.errors)

    def _lost_null(self, batch: RowBatch, column: object, keys: Sequence[str] = VALUES) -> str | None:
        if not isinstance(column, str) or column not in batch.columns.schema.names:
            return None
        lost = first_lost_null(batch.columns[column], keys)
        return None if lost is None else f"{lost[1]} in row {self.num_rows + lost[0]}"

    def warn(self, sentence: str) -> None:
        """Count a row with a warning; beyond MOST_WARNINGS different warnings, OTHER_WARNINGS counts all others."""
        if sentence not in self.warnings and len(self.warnings) >= MOST_WARNINGS:
            sentence = OTHER_WARNINGS
        self.warnings[sentence] = self.warnings.get(sentence, 0) + 1


def tokenize_shard(
    shard: Shard,
    job: JobConfig,
    encoders: Encoders,
    limits: PromptLimits,
    target: Path,
    progress: Callable[[int], None],
    *,
    manifest: Manifest | None = None,
    known: Callable[[int], pa.RecordBatch | None] | None = None,
    kept: Sequence[pa.Field] = (),
    id_type: pa.DataType | None = None,
    publisher: Publisher | None = None,
) -> ShardRows:
    """Write one checked row for every row of the shard, in its order.

    Args:
        target: the file to write; it appears whole or not at all.
        progress: called with the number of rows after each batch.
        manifest: gets the file's checksums.
        known: returns the next N rows as columns.ENCODED, or None if they must be encoded.
        kept: the kept columns as fields of the outputs.
        id_type: type of the outputs' ids.
        publisher: moves the file into place.

    Raises:
        InputError: the shard is damaged.
        StoreError, RunMismatchError: its store fails; the object was replaced.
        ConfigError: the target cannot be written, or a value of a kept column does not fit.
    """
    checker = _RowChecker(shard, job, encoders, limits, known, kept, id_type)
    with table_writer(target, checker.schema, plain="token_ids", manifest=manifest, publisher=publisher) as writer:
        for table in _grouped(checker.checked_batches(progress)):
            writer.write_table(table)
        writer.add_key_value_metadata({_FOUND: json.dumps(asdict(checker.found))})
    return checker.found


def checked_rows(
    shard: Shard,
    job: JobConfig,
    encoders: Encoders,
    limits: PromptLimits,
    *,
    known: Callable[[int], pa.RecordBatch | None] | None,
    id_type: pa.DataType | None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows that `tokenize_shard` would write, without writing them; arguments and errors are the same."""
    yield from _RowChecker(shard, job, encoders, limits, known, (), id_type).checked_batches(lambda num_rows: None)


def rows_found(path: Path, manifest: Manifest) -> ShardRows | None:
    """Return the counts that `tokenize_shard` wrote into a token file's metadata; None if there are none.

    Raises:
        DamagedFileError: the file is missing or damaged.
    """
    with own_parquet(path, manifest) as file:
        noted = (file.metadata.metadata or {}).get(_FOUND)
    return None if noted is None else ShardRows(**json.loads(noted))


def _grouped(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield the batches joined to row groups of GROUP_ROWS rows or GROUP_BYTES bytes."""
    group: list[pa.RecordBatch] = []
    rows, size = 0, 0
    for batch in batches:
        group.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= GROUP_ROWS or size >= GROUP_BYTES:
            yield pa.Table.from_batches(group)
            group, rows, size = [], 0, 0
    if group:
        yield pa.Table.from_batches(group)


@dataclass(slots=True)
class _Started:
    """A batch whose texts are being encoded by workers."""

    batch: RowBatch
    prompts: Pieces = field(default_factory=list)
    choices: Choices | None = None

    @property
    def num_pieces(self) -> int:
        return len(self.prompts) + (len(self.choices.pieces) if self.choices is not None else 0)


def _read_as_json(shard: Shard, job: JobConfig, of_prompts: list[str]) -> list[str]:
    """Return the columns of templates that are read as JSON, since one type for all rows would change values."""
    if shard.format not in ("jsonl", "csv"):
        return []
    roles, schema = column_roles(job, of_prompts), file_schema(shard)
    named = [name for name in of_prompts if roles[name] in ("variable", "id") and name in schema.names]
    if shard.format == "csv":
        return [name for name in named if role_of(schema.field(name)) == RESPELLED]
    return [name for name in named if not keeps_values(schema.field(name))]


class _RowChecker:
    def __init__(
        self,
        shard: Shard,
        job: JobConfig,
        encoders: Encoders,
        limits: PromptLimits,
        known: Callable[[int], pa.RecordBatch | None] | None,
        kept: Sequence[pa.Field],
        id_type: pa.DataType | None,
    ) -> None:
        self._shard = shard
        self._known = known
        self._kept = kept
        self._s3 = job.s3
        self._window = limits.window
        self.schema = with_token_type(TOKENS.schema, smallest_token_type(limits.vocab_size))
        self._job_sampling = job.sampling.to_sampling()
        self._sampling, self._choices = job.input.sampling, job.input.choices
        self._of_prompts = encoders.columns
        self._job, self._encoders = job, encoders
        self._overrides = SamplingOverrides(
            job.sampling,
            "body" if job.input.format == "openai" else self._sampling or "",
            vocab_size=limits.vocab_size,
            with_choices=self._choices is not None,
            nulls_count=job.input.format == "openai",
            ends_thinking=encoders.ends_thinking,
        )
        self._num_workers = encoders.num_workers
        self._prompts = PromptChecks(job, encoders, limits)
        self._choice_checks = ChoiceChecks(self._choices, encoders, limits) if self._choices is not None else None
        schema = shard_schema(shard)
        self._ids = IdColumn(job, schema, id_type)
        self.found = ShardRows(id_missing=self._ids.are_missing)
        found = [(column.key, column.problem(schema)) for column in wanted_columns(job, encoders.columns)]
        problems = [self._ids.problem, *(problem for _, problem in found)]
        self._problem = next((problem for problem in problems if problem is not None), None)  # that makes all rows bad
        self._has_sampling = ("sampling", None) in found
        as_json = _read_as_json(shard, job, encoders.columns)
        of_prompts = [f"{AS_JSON}{name}" if name in as_json else name for name in self._of_prompts]
        named = (job.input.id, *of_prompts, self._sampling, self._choices)
        wanted = dict.fromkeys(name for name in named if name is not None)
        # kept columns are read here too: damage, or a value that does not fit, is found before anything is computed
        wanted |= dict.fromkeys(job.output.keep_columns)
        self._columns = [name for name in wanted if column_type(schema, name.removeprefix(AS_JSON)) is not None]

    def checked_batches(self, progress: Callable[[int], None]) -> Iterator[pa.RecordBatch]:
        for started in self._started():
            batch, checked = started.batch, self._check(started)
            self.found.add(
                batch,
                self._job,
                writes_tools=self._encoders.writes_tools,
                writes_calls=self._encoders.writes_calls,
                lacks_date=self._encoders.lacks_date,
            )
            yield checked
            progress(batch.num_rows)

    def _started(self) -> Iterator[_Started]:
        """Yield the batches in order, with enough batches encoded ahead that no worker waits."""
        ahead: deque[_Started] = deque()
        for columns in read_batches(self._shard, self._columns, s3=self._s3):
            cast_kept_columns(columns, self._kept, self._shard)
            batch = RowBatch(columns, columns.num_rows, bad_lines(columns))
            started = _Started(batch)
            found = self._known(batch.num_rows) if self._known is not None else None
            if self._problem is None:
                started.prompts = self._prompts.start(batch, found)
                started.choices = self._choice_checks.start(batch) if self._choice_checks is not None else None
            ahead.append(started)
            while ahead and (
                not ahead[0].num_pieces
                or sum(started.num_pieces for started in ahead) > 2 * self._num_workers
                or sum(started.batch.columns.nbytes for started in ahead) > self._num_workers * BATCH_BYTES
            ):
                yield ahead.popleft()
        yield from ahead

    # ---- rows

    def _check(self, started: _Started) -> pa.RecordBatch:
        batch, num_rows = started.batch, started.batch.num_rows
        ids = self._ids.of(batch)
        if self._problem is not None:
            batch.blame_all(self._problem)
            prompts = pa.nulls(num_rows, self.schema.field("token_ids").type)
        else:
            prompts = self._prompts.checked(batch, started.prompts)
        lengths = list_lengths(prompts)
        n, max_tokens, sampling = self._samplings(batch)
        self._prompts.check_room(batch, lengths, max_tokens)
        has_double_bos = self._prompts.have_double_bos(prompts)
        choices = pa.nulls(num_rows, self.schema.field("choices").type)
        if self._choice_checks is not None and started.choices is not None:
            choices = self._choice_checks.checked(batch, started.choices, lengths)
        for row in batch.errors:
            max_tokens[row], sampling[row] = 0, None
        room = self._window - lengths
        is_bad = np.zeros(num_rows, dtype=bool)
        is_bad[list(batch.errors)] = True
        self.found.num_double_bos += int(np.count_nonzero(has_double_bos & ~is_bad))
        self.found.num_capped += int(np.count_nonzero((max_tokens > room) & ~is_bad))
        errors = [batch.errors.get(row) for row in range(num_rows)] if batch.errors else [None] * num_rows
        return pa.RecordBatch.from_arrays(
            [
                pa.array(np.full(num_rows, self._shard.index), pa.int32()),
                pa.array(np.arange(num_rows) + self.found.num_rows, pa.int64()),
                ids,
                pa.array(n, pa.int32()),
                _without(prompts, is_bad).cast(self.schema.field("token_ids").type),
                pa.array(np.where(is_bad, 0, np.minimum(max_tokens, room)), pa.int32()),
                pa.array(sampling, pa.string()),
                pa.array(errors, pa.string()),
                pa.array(np.zeros(num_rows, bool) if batch.holds_control is None else batch.holds_control),
                _without(choices, is_bad).cast(self.schema.field("choices").type),
            ],
            schema=self.schema,
        )

    def _samplings(self, batch: RowBatch) -> tuple[np.ndarray, np.ndarray, list[str | None]]:
        """Return [R] n, [R] max_tokens and [R] sampling as JSON or None, by rows' overrides; blame bad overrides."""
        job = self._job_sampling
        n = np.full(batch.num_rows, job.n, dtype=np.int64)
        max_tokens = np.full(batch.num_rows, job.max_tokens, dtype=np.int64)
        texts: list[str | None] = [None] * batch.num_rows
        if self._sampling is None or not self._has_sampling:
            return n, max_tokens, texts
        for row, override in enumerate(python_values(batch.columns[self._sampling])):
            if override is None:
                continue
            if isinstance(override, UnicodeDecodeError):
                batch.blame(row, f"{self._sampling} is not valid UTF-8")
                continue
            if isinstance(override, str):
                sampling, texts[row], problem = self._overrides.resolve_json(override)
            else:  # Arrow pads structs with nulls, also structs of schemas and of logit_bias
                sampling, texts[row], problem = self._overrides.resolve(without_nulls(override))
            if problem is None and sampling.structured != self._job_sampling.structured:
                for sentence in warnings_of(sampling):
                    self.found.warn(sentence)
            if self._choices is not None and problem is None:
                problem = self._problem_of_scored(sampling)
            if problem is not None:
                batch.blame(row, problem)
            if self._choices is None:
                n[row] = sampling.n
            max_tokens[row] = sampling.max_tokens
        return n, max_tokens, texts

    def _problem_of_scored(self, sampling: Sampling) -> str | None:
        """Return why a row's sampling does not go with choices, None if it does; such a job generates nothing."""
        if (sampling.n, sampling.max_tokens) != (1, 0):
            keys = f"{self._sampling}.n and .max_tokens"
            return f"{keys} must be 1 and 0: a job with input.choices generates nothing"
        if sampling.prompt_logprobs is not None:
            return f"{self._sampling}.prompt_logprobs does not go with input.choices; leave it out"
        return None


def _without(lists: pa.Array, is_bad: np.ndarray) -> pa.Array:
    """Return the lists with null in the bad rows."""
    if not is_bad.any():
        return lists
    return lists.take(pa.array(np.arange(len(is_bad)), mask=is_bad))
