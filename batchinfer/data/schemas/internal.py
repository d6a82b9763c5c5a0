"""Tables of the run folder that plan, work and finish exchange: the plan and durable results."""

import pyarrow as pa

from batchinfer.data.schemas.table import COMPUTED, KEY, LOGPROBS, TOKEN_IDS, table

TOKENS = table(
    "tokens",
    "one file per shard, one row per input row: tokenised and checked",
    ("shard", pa.int32(), "index of the input shard in run.json"),
    ("row", pa.int64(), "position of the row in its shard"),
    ("id", pa.string(), "the row's id as text; null when the input has none"),
    ("n", pa.int32(), "samples asked for (output rows of this input row)"),
    ("token_ids", TOKEN_IDS, "prompt tokens (see `with_token_type`); null for a bad row"),
    ("max_tokens", pa.int32(), "new tokens allowed, cut to the model's window; 0 for a bad row"),
    ("sampling", pa.string(), "the row's resolved sampling as JSON; null: the job's own"),
    ("error", pa.string(), "why the row is bad; null: it is good"),
    ("control_tokens", pa.bool_(), "whether its text holds control tokens"),
    ("choices", pa.list_(TOKEN_IDS), "tokens of each choice; null for a bad row, or where the job has no choices"),
)


def with_token_type(schema: pa.Schema, token_type: pa.DataType) -> pa.Schema:
    """Return the schema of a plan's table with another type of the prompts' token ids, those of choices among them.

    Plans are written in `smallest_token_type`; run folders of earlier versions have int32.
    """
    lists = pa.list_(token_type)
    for name, kind in (("token_ids", lists), ("choices", pa.list_(lists))):
        if (place := schema.get_field_index(name)) >= 0:
            schema = schema.set(place, pa.field(name, kind))
    return schema


def smallest_token_type(vocab_size: int) -> pa.DataType:
    """Return the smallest type for token ids below `vocab_size`."""
    return pa.uint16() if vocab_size <= 1 << 16 else pa.uint32()


REQUESTS = table(
    "plan/requests",
    "one row per request in the order of execution; a unit's rows are together, in row groups of their own",
    ("unit", pa.int32(), "work unit"),
    *KEY,
    ("sampling_key", pa.uint64(), "key of the request's random draws"),
    ("sampling", pa.string(), "resolved sampling as JSON; null: the job's own"),
    ("max_tokens", pa.int32(), "new tokens allowed, cut to the model's window"),
    ("cached_tokens", pa.int32(), "prompt tokens predicted to be in memory when the request starts"),
    ("score_from", pa.int32(), "the prompt's tokens from this place on are scored; 0: none"),
    (
        "last_units",
        pa.list_(pa.int32()),
        "last unit that needs each KV block, from the first block on that no earlier request computes, while that is a "
        "later unit than its own; null: none",
    ),
    ("prompt_group", pa.int64(), "prompts with the same long start, the same number in every job; 0: no group"),
    ("expected_tokens", pa.float32(), "answer length of the group in an earlier run; null: not known"),
    ("token_ids", TOKEN_IDS, "prompt tokens (see `with_token_type`)"),
)
DUPLICATES = table(
    "plan/duplicates",
    "greedy requests equal to another one: computed once, delivered to each",
    *KEY,
    ("of_shard", pa.int32(), "shard of the request that is computed"),
    ("of_row", pa.int64(), "its row"),
    ("of_sample", pa.int32(), "its sample"),
)
PLAN_UNITS = table(
    "plan/units",
    "work units, claimed one by one",
    ("unit", pa.int32(), "work unit, from 0"),
    ("first_request", pa.int64(), "its first row in plan/requests"),
    ("num_requests", pa.int64(), "requests in it"),
    ("first_row_group", pa.int32(), "its first row group in plan/requests"),
    ("num_row_groups", pa.int32(), "row groups it spans"),
    ("prompt_tokens", pa.int64(), "prompt tokens of its requests"),
    ("new_tokens", pa.int64(), "prompt tokens predicted to be computed"),
    ("shared_tokens", pa.int64(), "tokens that its first prompt shares with the last one of the unit before"),
    ("max_output_tokens", pa.int64(), "sum of max_tokens"),
    ("kv_tokens", pa.int64(), "most KV tokens of its requests, each in whole pages"),
    ("largest_kv_tokens", pa.int64(), "most KV tokens of one of them"),
    ("largest_output_tokens", pa.int64(), "largest max_tokens of one of them"),
)
PLAN_EXPERTS = table(
    "plan/experts",
    "one row per group of ranks, layer and expert slot; only with several ranks, once loads are known",
    ("phase", pa.string(), "what the group runs: 'both', 'prefill' or 'decode'"),
    ("layer", pa.int32(), "decoder layer"),
    ("slot", pa.int32(), "physical slot, over all ranks of the group"),
    ("rank", pa.int32(), "rank of the group that holds it"),
    ("node", pa.int32(), "part of the group that all copies of its expert are in; 0 where they may be anywhere"),
    ("expert", pa.int32(), "logical expert in it"),
    ("share", pa.float64(), "part of the expert's tokens that this slot gets"),
    ("tokens", pa.float64(), "tokens it would have got of the load that was measured"),
    ("bound", pa.float64(), "of the layer: tokens that no placement's busiest rank goes below"),
)
# A plan's predictions of balance and time; null if not known. Copied to stats/run.
PREDICTIONS = (
    ("expected_output_tokens", pa.int64(), "output tokens expected from answer lengths of an earlier run"),
    ("prefill_tokens_max_over_mean", pa.float64(), "new tokens of the busiest rank of prefill steps, by the mean"),
    (
        "prefill_attention_max_over_mean",
        pa.float64(),
        "attention work of the busiest rank of prefill steps, by the mean",
    ),
    ("decode_max_over_mean", pa.float64(), "KV tokens of the busiest decode rank, by the mean, over all steps"),
    ("decode_bound", pa.float64(), "what decode_max_over_mean cannot be below, with what runs in each step"),
    ("work_s", pa.float64(), "seconds from the ranks' start to the last step, on one group"),
    ("is_simulated", pa.bool_(), "whether at the speed of cluster.gpu by tables, not of an earlier run"),
    ("gpu_hours", pa.float64(), "accelerator-hours held in that time"),
    ("cost_usd", pa.float64(), "their price"),
    ("nodes_to_finish", pa.int64(), "nodes of cluster.gpu that finish within cluster.finish_hours"),
)
PLAN_SUMMARY = table(
    "plan/summary",
    "one row: what the plan predicts",
    ("input_rows", pa.int64(), "rows in readable shards"),
    ("rows", pa.int64(), "output rows (input rows x n)"),
    ("bad_rows", pa.int64(), "output rows that are error rows already"),
    ("unreadable_shards", pa.int64(), "shards that have no outputs"),
    ("control_rows", pa.int64(), "input rows whose text holds control tokens"),
    ("requests", pa.int64(), "requests to compute"),
    ("reused_requests", pa.int64(), "further requests, whose answers an earlier run has"),
    ("duplicates", pa.int64(), "greedy requests answered by another one"),
    ("units", pa.int64(), "work units"),
    ("input_tokens", pa.int64(), "prompt tokens of good output rows, counted per sample"),
    ("duplicate_tokens", pa.int64(), "of these, prompt tokens of duplicates"),
    ("computed_tokens", pa.int64(), "prompt tokens predicted to be computed"),
    ("distinct_tokens", pa.int64(), "prompt tokens of distinct prefixes, scored ones per row: least without a store"),
    ("max_output_tokens", pa.int64(), "most output tokens that the requests may produce"),
    ("plan_s", pa.float64(), "seconds the planning took"),
    ("rows_per_s", pa.float64(), "input rows planned per second"),
    *PREDICTIONS,
)
RESULTS = table(
    "results",
    "units/<unit>/<claim>/part-*.parquet: finished requests, durable once the file is there",
    *KEY,
    ("unit", pa.int32(), "work unit"),
    ("status", pa.string(), "'ok' or 'error'"),
    ("error", pa.string(), "why it failed; null when ok"),
    ("text", pa.string(), "generated text"),
    ("token_ids", TOKEN_IDS, "generated tokens, the end token included"),
    ("finish_reason", pa.string(), "'stop', 'length' or 'error'"),
    ("stop_reason", pa.string(), "the stop string, or the stop token's id; null at the model's own end token"),
    ("prompt_tokens", pa.int32(), "prompt tokens"),
    ("cached_memory_tokens", pa.int32(), "of these, shared in memory with earlier rows, by the plan"),
    ("cached_disk_tokens", pa.int32(), "of these, KV loaded from the store on disk"),
    *COMPUTED,
    ("completion_tokens", pa.int32(), "generated tokens"),
    ("reasoning", pa.string(), "what was thought before the text; null: nothing, or nobody asked"),
    ("reasoning_tokens", pa.int32(), "of the generated tokens"),
    ("structured_valid", pa.bool_(), "whether the text is all that structured_outputs asked for; null: nothing"),
    ("kv_tokens_sum", pa.int64(), "sum over generated tokens of the KV length each attended to"),
    ("logprobs", LOGPROBS, "per generated token, when asked for"),
    ("prompt_logprobs", LOGPROBS, "per scored token of the prompt: of all but its first, or of the choice"),
    ("admitted_s", pa.float64(), "Unix time when its prefill was admitted; null: reused from an earlier run"),
    ("first_token_s", pa.float64(), "Unix time of its first new token; null: reused"),
    ("finished_s", pa.float64(), "Unix time of its last token; null: reused"),
)
