"""outputs/: one Parquet file per readable shard, the same rows in the same order."""

from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa

from batchinfer.config import JobConfig
from batchinfer.data.parquet import kept_fields, table_writer
from batchinfer.data.schemas import OUTPUTS_WITH_REASONING, output_schema
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.finish.join import output_rows
from batchinfer.finish.kept_columns import KeptRows
from batchinfer.finish.token_texts import TokenTexts
from batchinfer.finish.tool_calls import tool_calls
from batchinfer.manifest import Manifest
from batchinfer.progress import Progress
from batchinfer.records import IncompleteRunError, Shard
from batchinfer.run.fingerprint import check_same
from batchinfer.rundir import RunDir, read_state

BATCH_ROWS = 4096


def write_outputs(
    connection: duckdb.DuckDBPyConnection,
    run: RunDir,
    manifest: Manifest,
    job: JobConfig,
    shards: list[Shard],
    id_type: pa.DataType,
    expected: int,
) -> tuple[int, int]:
    """Write outputs/<name> for every readable shard; returns the number of rows and of error rows.

    Args:
        manifest: vouches for the outputs afterwards.
        expected: output rows that the plan counted.

    Raises:
        ModelError: texts of tokens are asked for, and the model has no tokenizer that can be read.
        RunMismatchError: its tokenizer is another one than the plan's.
    """
    readable = [shard for shard in shards if shard.problem is None]
    kept = kept_fields(shards, job.output.keep_columns, job.s3)
    columns = {"with_reasoning": job.output.reasoning != "none", "with_tools": job.input.tools is not None}
    own = output_schema(id_type, [], **columns)
    schema = output_schema(id_type, kept, **columns, with_texts=job.output.token_texts)
    texts = _token_texts(run, job) if job.output.token_texts else None
    num_rows = num_errors = 0
    with Progress("finish", expected, "rows") as progress:
        for shard in readable:
            reader = _output_reader(connection, run, shard, own)
            kept_rows = KeptRows(shard, kept, job.s3)
            with (
                table_writer(run.output(shard.name), schema, scratch=run.finish_scratch, manifest=manifest) as writer,
            ):
                for batch in reader:
                    shown = batch if texts is None else texts.add(batch)
                    table = pa.table([*shown.columns, *kept_rows.take(batch["row"])], schema=schema)
                    writer.write_table(table)
                    num_rows += len(table)
                    num_errors += sum(status == "error" for status in batch["status"].to_pylist())
                    progress.advance(len(table))
    if num_rows != expected:
        raise IncompleteRunError(f"{expected} rows were asked for, but {num_rows} written; please report this fault")
    return num_rows, num_errors


def _token_texts(run: RunDir, job: JobConfig) -> TokenTexts:
    tokenizer = load_tokenizer(Path(job.model.path))
    check_same(read_state(run)["fingerprint"], {"tokenizer and template": tokenizer.digest}, run.root)
    return TokenTexts(lambda token_id: tokenizer.decode([token_id], with_special=True))


def _output_reader(
    connection: duckdb.DuckDBPyConnection, run: RunDir, shard: Shard, own: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """One shard's output rows in order, without the kept columns and texts of tokens."""
    asked_for = "".join(f", {name}" for name in own.names if name in OUTPUTS_WITH_REASONING.schema.names)
    reader = connection.sql(
        f"""
        SELECT {"id::BIGINT" if own.field("id").type == pa.int64() else "id"} AS id, row, sample, status, error, text,
               token_ids, finish_reason, stop_reason, prompt_tokens,
               cached_memory_tokens + cached_disk_tokens + cached_duplicate_tokens AS cached_tokens,
               completion_tokens, logprobs{asked_for}
        FROM ({output_rows(run, [shard])}) ORDER BY row, sample
        """
    ).to_arrow_reader(BATCH_ROWS)
    for batch in reader:
        calls = [tool_calls(batch["text"])] if "tool_calls" in own.names else []
        yield pa.RecordBatch.from_arrays([*batch.columns, *calls], names=own.names).cast(own)
