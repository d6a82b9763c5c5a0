"""Writing of outputs/: a Parquet file per readable shard with its rows in order, and line files by output.format."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from itertools import chain, groupby, pairwise
from operator import itemgetter
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.config import JobConfig
from batchinfer.data.duckdb_sql import read_parquet
from batchinfer.data.kept_fields import kept_fields
from batchinfer.data.parquet import lines_writer, table_writer
from batchinfer.data.prompt_tokenizer import PromptTokenizer, token_bytes
from batchinfer.data.schemas.outputs import asked_for, output_schema
from batchinfer.data.schemas.table import LOGPROBS, LOGPROBS_WITH_TEXTS
from batchinfer.data.wide_rows import runs_of_rows
from batchinfer.finish.answers import AnswerReader
from batchinfer.finish.join import output_rows, query
from batchinfer.finish.json_lines import JsonLines, Lines
from batchinfer.finish.kept_columns import KeptRows
from batchinfer.finish.long_answers import LongAnswers
from batchinfer.finish.openai_answers import OpenAIAnswers, TokenOf
from batchinfer.finish.tool_calls import ToolCalls
from batchinfer.manifest import Manifest
from batchinfer.progress import Progress
from batchinfer.records import IncompleteRunError, Shard
from batchinfer.rundir import RunDir, output_files
from batchinfer.whole_files import Publisher


class TokenTexts:
    """A converter that adds texts to columns of log-probabilities; each token id is decoded once.

    Args:
        decode: returns the text of a token id.
    """

    def __init__(self, decode: Callable[[int], str]) -> None:
        self._decode = decode
        self._ids, self._texts = pa.array([], pa.int32()), pa.array([], pa.string())

    def add(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows with each column of type LOGPROBS converted to LOGPROBS_WITH_TEXTS."""
        for place, field in enumerate(batch.schema):
            if field.type == LOGPROBS:
                with_texts = self._with_texts(batch.column(place)).cast(LOGPROBS_WITH_TEXTS)
                batch = batch.set_column(place, field.with_type(LOGPROBS_WITH_TEXTS), with_texts)
        return batch

    def _with_texts(self, lists: pa.ListArray) -> pa.ListArray:
        """Add a field `token` after token_id to lists of {token_id, logprob, …}, and to the lists `top` inside them."""
        entries = lists.flatten()  # without those of null lists
        ends = pc.cumulative_sum(pc.fill_null(lists.value_lengths(), 0))
        offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends.cast(pa.int32())])
        columns = dict(zip(entries.type.names, entries.flatten(), strict=True))
        token_ids = columns.pop("token_id")
        found = {"token_id": token_ids, "token": self._texts_of(token_ids), **columns}
        if "top" in found:
            found["top"] = self._with_texts(found["top"])
        structs = pa.StructArray.from_arrays([*found.values()], [*found], mask=entries.is_null())
        return pa.ListArray.from_arrays(offsets, structs, mask=lists.is_null())

    def _texts_of(self, token_ids: pa.Array) -> pa.Array:
        asked = pc.unique(token_ids.drop_null())
        new = asked.filter(pc.invert(pc.is_in(asked, self._ids)))
        self._ids = pa.concat_arrays([self._ids, new])
        self._texts = pa.concat_arrays([self._texts, pa.array(map(self._decode, new.to_pylist()), pa.string())])
        return self._texts.take(pc.index_in(token_ids, self._ids))


BATCH_ROWS = 4096  # most rows of a table
_SQL_OF = {"tool_calls": "NULL::STRUCT(name VARCHAR, arguments VARCHAR)[] AS tool_calls"}  # filled in later


def write_outputs(
    connection: duckdb.DuckDBPyConnection,
    run: RunDir,
    manifest: Manifest,
    job: JobConfig,
    shards: list[Shard],
    state: dict[str, Any],
    answers: LongAnswers,
    tokenizer: Callable[[], PromptTokenizer],
) -> tuple[int, int]:
    """Write outputs/<name> for every readable shard; return the number of rows and of error rows.

    Args:
        manifest: gets the checksums of the outputs.
        state: content of run.json.
        answers: the long answers, which the view `delivered` lacks.
        tokenizer: loads the plan's tokenizer; called only if outputs have texts or bytes of tokens.

    Raises:
        ModelError: token texts are requested, but the model's tokenizer cannot be read.
        RunMismatchError: the model's tokenizer is not the plan's.
    """
    rows = OutputRows(connection, run, job, shards, state, answers, tokenizer)
    token_of, expected = _token_of(tokenizer), state["counts"]["rows"]
    num_rows = num_errors = 0
    readable = [shard for shard in shards if shard.problem is None]
    with Progress("finish", expected, "rows") as progress, Publisher() as publisher:
        for shard, tables in rows.by_shard(connection, readable):
            target, *targets = output_files(run, shard.name, job.output.format)
            open_table = partial(table_writer, scratch=run.finish_scratch, manifest=manifest, publisher=publisher)
            open_lines = partial(lines_writer, scratch=run.finish_scratch, manifest=manifest, publisher=publisher)
            with ExitStack() as stack:
                writer = stack.enter_context(open_table(target, rows.schema))
                puts = [stack.enter_context(open_lines(path)) for path in targets]
                lines = _lines(connection, run, job, shard, rows, token_of)
                for table in tables:
                    writer.write_table(table)
                    for file, data in lines.encode(table):
                        puts[file](data)
                    num_rows += len(table)
                    num_errors += sum(status == "error" for status in table["status"].to_pylist())
                    progress.advance(len(table))
                for file, data in lines.flush():
                    puts[file](data)
    if num_rows != expected:
        raise IncompleteRunError(f"{expected} rows were asked for, but {num_rows} written; please report this fault")
    return num_rows, num_errors


def commonest_error(connection: duckdb.DuckDBPyConnection, run: RunDir, shards: list[Shard]) -> tuple[str | None, int]:
    """Return the most frequent reason of error rows in outputs/ and the number of its rows; (None, 0) without any."""
    files = [output_files(run, shard.name, "parquet")[0] for shard in shards if shard.problem is None]
    found = connection.execute(query("commonest_error", outputs=read_parquet(*files))).fetchall()
    return found[0] if found else (None, 0)


def _lines(
    connection: duckdb.DuckDBPyConnection,
    run: RunDir,
    job: JobConfig,
    shard: Shard,
    rows: "OutputRows",
    token_of: TokenOf,
) -> Lines:
    """Return the writer of line files for output.format."""
    if job.output.format == "openai":
        bad = f"SELECT row::BIGINT AS row FROM {read_parquet(run.tokens(shard.index))} WHERE error IS NOT NULL"
        refused = connection.cursor().sql(bad).to_arrow_table()["row"].combine_chunks()
        return OpenAIAnswers(job, shard, rows.num_own, token_of, refused, rows.answer_reader)
    return JsonLines(connection) if job.output.format == "jsonl" else Lines()


class OutputRows:
    """The rows of outputs/ in their final form.

    Raises:
        ModelError, RunMismatchError: as `write_outputs`.
    """

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        run: RunDir,
        job: JobConfig,
        shards: list[Shard],
        state: dict[str, Any],
        answers: LongAnswers,
        tokenizer: Callable[[], PromptTokenizer],
    ) -> None:
        self._run, self._job, self._answers = run, job, answers
        # the plan may have found a column in a shard that turned out to be damaged when its rows were read
        is_damaged = any(shard.problem is not None for shard in shards)
        self._kept = kept_fields(shards, job.output.keep_columns, may_be_missing=is_damaged)
        tables = asked_for(job, prompt_logprobs=_wants_prompt_logprobs(connection, run, job))
        id_type = pa.type_for_alias(state["id_type"])
        self._own = output_schema(id_type, [], tables)
        self.schema = output_schema(id_type, self._kept, tables, with_texts=job.output.token_texts)
        self._texts = _token_texts(tokenizer()) if job.output.token_texts else None
        # by the plan, from the model folder; plans of earlier versions have none
        self.answer_reader = AnswerReader(state.get("tool_forms") or [])

    @property
    def num_own(self) -> int:
        """The number of columns before the kept ones."""
        return len(self._own.names)

    def by_shard(
        self, connection: duckdb.DuckDBPyConnection, shards: list[Shard], where: str = "true"
    ) -> Iterator[tuple[Shard, Iterator[pa.Table]]]:
        """Yield each shard with its rows in order, in tables of at most BATCH_ROWS (fewer if kept columns are wide).

        Args:
            connection: a connection with the view `delivered`.
            shards: readable shards in the order of their indices.
            where: SQL condition that selects rows.
        """
        for first, end in runs_of_rows(np.array([shard.num_rows for shard in shards]), BATCH_ROWS, BATCH_ROWS):
            neighbours = shards[first:end]
            reader = _output_reader(connection, self._run, neighbours, self._own, self._answers, where)
            found = groupby(reader, key=itemgetter(0))
            index, batches = next(found, (None, iter(())))
            for shard in neighbours:
                if shard.index == index:
                    yield shard, self._tables(shard, (batch for _, batch in batches))
                    index, batches = next(found, (None, iter(())))
                else:
                    yield shard, iter(())

    def _tables(self, shard: Shard, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
        kept_rows = KeptRows(shard, self._kept, self._job.s3)
        calls = ToolCalls(self._job, shard, self.answer_reader) if "tool_calls" in self._own.names else None
        for batch in batches:
            shown = batch if calls is None else calls.add(batch)
            shown = shown if self._texts is None else self._texts.add(shown)
            for num_rows, kept in kept_rows.of(batch["row"]):
                yield pa.table([*shown.slice(0, num_rows).columns, *kept], schema=self.schema)
                shown = shown.slice(num_rows)


def _token_texts(tokenizer: PromptTokenizer) -> TokenTexts:
    return TokenTexts(lambda token_id: tokenizer.decode([token_id], with_special=True))


def _token_of(tokenizer: Callable[[], PromptTokenizer]) -> TokenOf:
    """Return a function for texts and bytes of tokens, which loads the tokenizer at its first call."""
    return cache(lambda id: (tokenizer().decode([id], with_special=True), token_bytes(tokenizer(), id)))


def _output_reader(
    connection: duckdb.DuckDBPyConnection,
    run: RunDir,
    shards: list[Shard],
    own: pa.Schema,
    answers: LongAnswers,
    where: str,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (shard, its next output rows) in order, without kept columns, token texts and tool calls."""
    rows = query("choices" if "choice" in own.names else "samples", output_rows=output_rows(run, shards))
    columns = [_SQL_OF.get(name, name) for name in own.names]
    if own.field("id").type == pa.int64():
        columns[0] = "id::BIGINT AS id"
    ordered = connection.sql(
        f"SELECT shard, answer_place, {', '.join(columns)} FROM ({rows}) WHERE {where} ORDER BY shard, row, sample"
    )
    for batch in chain.from_iterable(map(answers.filled, ordered.to_arrow_reader(BATCH_ROWS))):
        rows_of_all = pa.RecordBatch.from_arrays([batch[name] for name in own.names], names=own.names).cast(own)
        indices, firsts = np.unique(batch["shard"].to_numpy(), return_index=True)
        for index, (first, end) in zip(indices.tolist(), pairwise([*firsts.tolist(), len(batch)]), strict=True):
            yield index, rows_of_all.slice(first, end - first)


def _wants_prompt_logprobs(connection: duckdb.DuckDBPyConnection, run: RunDir, job: JobConfig) -> bool:
    """Return whether outputs need the log-probabilities of prompts, by the job or by a row."""
    if job.sampling.prompt_logprobs is not None or job.input.choices is not None:
        return job.input.choices is None
    found = connection.execute(f"SELECT coalesce(max(score_from), 0) > 0 FROM {read_parquet(run.requests)}").fetchall()
    return bool(found[0][0])
