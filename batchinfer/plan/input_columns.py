"""Check of the columns that a job names against the shards' schemas, for mistakes that make every row bad."""

import json

import pyarrow as pa

from batchinfer.config import DEFAULT_S3, JobConfig, S3Config, did_you_mean
from batchinfer.config.toml_text import toml_value
from batchinfer.data.column_checks import NO_IDS, WantedColumn, id_column, prompt_settings, wanted_columns
from batchinfer.data.columns import column_type, part_without_dataset
from batchinfer.data.duckdb_sql import refuse_unknown_types
from batchinfer.data.formats.first_bytes import format_advice
from batchinfer.data.formats.line_rows import why_no_row
from batchinfer.data.formats.openai_batch import are_requests
from batchinfer.data.inputs import first_bytes
from batchinfer.data.kept_fields import kept_fields
from batchinfer.data.schemas.outputs import asked_for
from batchinfer.data.shard_schemas import schemas_of_rows
from batchinfer.records import ConfigError, ConfigErrors, Shard

NAMED_COLUMNS = 20  # in a message
_OF_BATCH = 'these are lines of an OpenAI batch: set input.format = "openai" instead'


def check_columns(job: JobConfig, shards: list[Shard], of_prompts: list[str]) -> list[pa.Field]:
    """Refuse columns that no shard has, or that have a wrong type in all shards.

    Args:
        of_prompts: the input columns that prompts are made of.

    Returns:
        The kept columns as fields of the outputs.

    Raises:
        ConfigErrors: each sentence names a column, the problem and the remedy.
        ConfigError: kept columns have types without a common type, or names of output columns.
    """
    found = schemas_of_rows(shards)
    # files whose lines are all broken have no known columns; error sentences describe the first schema
    schemas = [schema for _, schema in found if schema.names and why_no_row(schema) is None]
    if not schemas:
        raise ConfigError(why_no_rows(*found[0], job.s3))
    wanted = wanted_columns(job, of_prompts)
    ids = id_column(job)
    is_id_wanted = "id" in job.input.model_fields_set and ids.name != NO_IDS
    has_ids = any(ids.name in schema.names for schema in schemas)
    if is_id_wanted or has_ids:
        wanted.insert(0, ids)
    problems = [_problem(column, schemas) for column in wanted]
    if job.output.format == "openai" and not is_id_wanted and not has_ids:
        problems.append(
            f"output.format is 'openai', in which lines are answers by id, but no input shard has a column "
            f"{ids.name!r}; name the one of ids as input.id, or use jsonl"
        )
    for name in job.output.keep_columns:
        if not any(name in schema.names for schema in schemas):
            problems.append(f"output.keep_columns names {name!r}, which no shard has; {_instead(name, schemas[0])}")
    system = job.input.system
    if system and any(system in schema.names for schema in schemas):  # CSV from pandas has a column named ""
        first = "" if system.isidentifier() else "name it in letters, digits and _, and "
        remedy = toml_value(f"{{{{ {system if system.isidentifier() else 'name'} }}}}")
        problems.append(
            f"input.system is a text, but {system!r} is a column of the input; if it holds the rows' system messages, "
            f"{first}set input.system = {remedy}"
        )
    sentences = list(dict.fromkeys(sentence for sentence in problems if sentence is not None))
    if sentences:
        raise ConfigErrors(sentences)
    return _kept(job, shards)


def why_no_rows(shard: Shard, schema: pa.Schema, s3: S3Config = DEFAULT_S3) -> str:
    """Return why a shard has no columns, or no row that can be read."""
    if not shard.num_rows:
        return f"the input has no rows and no columns: {shard.path} is empty; correct input.files"
    hint = format_advice(first_bytes(shard, s3), shard.format)
    reason = why_no_row(schema)
    if shard.format == "jsonl":
        first = "" if reason is None else f": {reason}"
        return (
            f"no row of the input can be read{first}; in {shard.path} no line is a JSON object with a key in it{hint}"
        )
    return f"no row of the input can be read; the first of {shard.path}: {reason or 'it has no columns'}{hint}"


def other_delimiter(schema: pa.Schema) -> str:
    """Return the remedy for a CSV header with another delimiter (semicolons, bars, tabs); "" if the header is right."""
    for delimiter, words in ((";", "semicolons"), ("|", "bars"), ("\t", "tabs")):
        if len(schema.names) == 1 and delimiter in schema.names[0]:
            return f"its fields seem to be separated by {words}: write it with commas, or with tabs as *.tsv"
    return ""


def _kept(job: JobConfig, shards: list[Shard]) -> list[pa.Field]:
    kept = kept_fields(shards, job.output.keep_columns)
    if job.output.format == "jsonl":
        refuse_unknown_types(kept)
    may_score = job.sampling.prompt_logprobs is not None or job.input.sampling is not None
    own = {column.name for table in asked_for(job, prompt_logprobs=may_score) for column in table.columns}
    found = [
        f"output.keep_columns names {name!r}, which outputs of this job have already; rename it in the input"
        for name in job.output.keep_columns
        if name in own
    ]
    if job.output.push is not None:
        unread = [(field.name, part) for field in kept if (part := part_without_dataset(field.type)) is not None]
        found += [
            f"output.keep_columns names {name!r}, which holds {part}, a type that Hugging Face's datasets cannot read; "
            "convert it, or leave out output.push"
            for name, part in unread
        ]
    if found:
        raise ConfigErrors(found)
    return kept


def _problem(column: WantedColumn, schemas: list[pa.Schema]) -> str | None:
    first = schemas[0]
    if not any(column.name in schema.names for schema in schemas):
        have = ", ".join(first.names[:NAMED_COLUMNS])
        no_ids = f'set input.id = "{NO_IDS}" if rows have no ids'
        hint = did_you_mean(column.name, first.names, no_ids if column.key == "id" else "")
        if are_requests(first):
            hint = _OF_BATCH
        hint = other_delimiter(first) or hint
        sentence = f"input.{column.key} names {column.name!r}, which no input shard has; the first shard has {have}"
        return f"{sentence}; {hint}" if hint else sentence
    problems = [column.problem(schema) for schema in schemas]
    if any(problem is None for problem in problems):
        return None  # the rows of some shards are good: those of the others become error rows
    return f"input.{column.key}: {problems[0]}{_setting(column, first)}"


def doubles_hint(kind: pa.DataType | None) -> str:
    """Return how to write a column of ids that holds doubles; "" for any other type."""
    is_double = kind == pa.float64()
    return '; pandas makes doubles of integers with nulls: write the column with astype("Int64")' if is_double else ""


def _setting(column: WantedColumn, schema: pa.Schema) -> str:
    """Return the setting that reads the column, or how to write it correctly; "" if neither is known."""
    if column.key == "id" and (hint := doubles_hint(column_type(schema, column.name))):
        return hint
    if column.key not in ("user", "prompt", "messages", "token_ids"):
        return ""
    kind = column_type(schema, column.name)
    settings = None if kind is None else prompt_settings(kind)
    if settings is not None:
        words, keys = settings
        return f"; it is {words}: set {assignments(keys, column.name)} instead"
    if are_requests(schema):
        return f"; {_OF_BATCH}"
    for name in schema.names:
        other = column_type(schema, name)
        if other is not None and column.type[0](other):
            return f"; column {name!r} is: set input.{column.key} = {json.dumps(name, ensure_ascii=False)}"
    return ""


def assignments(keys: dict[str, str], name: str) -> str:
    """Return keys of [input] in the form of a job file, with the column's name for the value ""."""
    return " and ".join(f"input.{key} = {json.dumps(value or name, ensure_ascii=False)}" for key, value in keys.items())


def _instead(name: str, schema: pa.Schema) -> str:
    if name == "*":
        return f"write the names of the columns: {', '.join(schema.names[:NAMED_COLUMNS])}"
    return did_you_mean(name, schema.names, "remove it or correct the name")
