"""Columns of the outputs, which depend on the job."""

from collections.abc import Sequence

import pyarrow as pa

from batchinfer.config import JobConfig
from batchinfer.data.schemas.table import LOGPROBS, LOGPROBS_WITH_TEXTS, TOKEN_IDS, Table, table

OUTPUTS = table(
    "outputs",
    "one file per input shard, its rows in its order, each n times; kept input columns follow",
    ("id", pa.string(), "the row's id (int64 when all shards have integer ids, none of them uint64)"),
    ("row", pa.int64(), "position of the row in its shard"),
    ("sample", pa.int32(), "0 .. n - 1"),
    ("status", pa.string(), "'ok' or 'error'"),
    ("error", pa.string(), "why the row failed; null when ok"),
    ("text", pa.string(), "generated text; null for an error row"),
    ("token_ids", TOKEN_IDS, "generated tokens, the end token included; null for an error row"),
    ("finish_reason", pa.string(), "'stop', 'length' or 'error'"),
    ("stop_reason", pa.string(), "the stop string, or the stop token's id; null at the model's own end token"),
    ("prompt_tokens", pa.int32(), "prompt tokens (hit + miss); 0 for an error row"),
    ("cached_tokens", pa.int32(), "prompt tokens that need not be computed for this row (memory, disk or duplicate)"),
    ("completion_tokens", pa.int32(), "generated tokens"),
    ("logprobs", LOGPROBS, "per generated token, when asked for; by output.token_texts with its text as `token`"),
)
OUTPUTS_WITH_REASONING = table(
    "outputs with reasoning",
    "behind the columns of outputs, where output.reasoning is not 'none'",
    ("reasoning", pa.string(), "what was thought before the text; null: nothing"),
    ("reasoning_tokens", pa.int32(), "of completion_tokens, those up to the end of thinking"),
)
TOOL_CALLS = pa.list_(pa.struct([("name", pa.string()), ("arguments", pa.string())]))
OUTPUTS_WITH_TOOLS = table(
    "outputs with tools",
    "behind these, where input.tools is set or input.format is 'openai'",
    ("tool_calls", TOOL_CALLS, "calls in the text, arguments as JSON; empty: none, null: unreadable or not offered"),
)
OUTPUTS_WITH_PROMPT_LOGPROBS = table(
    "outputs with prompt_logprobs",
    "behind these, where sampling.prompt_logprobs is set for the job or its rows may set it",
    ("prompt_logprobs", LOGPROBS, "per prompt token, when asked for, of sample 0; the first token's entry is null"),
)
OUTPUTS_WITH_CHOICES = table(
    "outputs with choices",
    "behind these, where input.choices is set; null for an error row",
    ("choice", pa.int32(), "number of the most likely choice, from 0; the first of equal ones"),
    ("choice_normalized", pa.int32(), "the same by log-probability per token of the choice"),
    ("choice_logprobs", pa.list_(pa.float64()), "log-probability of each choice: the sum over its tokens"),
    ("choice_num_tokens", pa.list_(pa.int32()), "tokens of each choice"),
    ("choice_is_greedy", pa.list_(pa.bool_()), "whether each token of it is the model's most likely one"),
)
OUTPUT_TABLES = OUTPUTS, OUTPUTS_WITH_REASONING, OUTPUTS_WITH_TOOLS, OUTPUTS_WITH_PROMPT_LOGPROBS, OUTPUTS_WITH_CHOICES


def asked_for(job: JobConfig, *, prompt_logprobs: bool) -> list[Table]:
    """Return the tables of optional columns that a job's outputs have after the columns of OUTPUTS.

    Args:
        prompt_logprobs: whether any row wants log-probabilities of the prompt.
    """
    is_asked_for = {
        OUTPUTS_WITH_REASONING: job.output.reasoning != "none",
        OUTPUTS_WITH_TOOLS: job.input.tools is not None or job.input.format == "openai",
        OUTPUTS_WITH_PROMPT_LOGPROBS: prompt_logprobs,
        OUTPUTS_WITH_CHOICES: job.input.choices is not None,
    }
    return [table for table, is_wanted in is_asked_for.items() if is_wanted]


def output_schema(
    id_type: pa.DataType, kept: list[pa.Field], tables: Sequence[Table] = (), *, with_texts: bool = False
) -> pa.Schema:
    """Return the schema of the outputs, which is the same for every shard of a job.

    Args:
        tables: from `asked_for`.
        with_texts: whether log-probabilities have the texts of their tokens.
    """
    more = [field for table in tables for field in table.schema]
    own = [pa.field("id", id_type), *list(OUTPUTS.schema)[1:], *more]
    if with_texts:
        own = [field.with_type(LOGPROBS_WITH_TEXTS) if field.type == LOGPROBS else field for field in own]
    return pa.schema([*own, *kept])
