"""The columns of every Parquet table in a run folder, with what they mean: the contract that `schema --stats` prints.

Written by plan, work and finish.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from batchinfer.config import JobConfig

TOKEN_IDS = pa.list_(pa.int32())
_TOKEN, _TEXT, _LOGPROB = ("token_id", pa.int32()), ("token", pa.string()), ("logprob", pa.float32())
LOGPROBS = pa.list_(pa.struct([_TOKEN, _LOGPROB, ("top", pa.list_(pa.struct([_TOKEN, _LOGPROB])))]))
LOGPROBS_WITH_TEXTS = pa.list_(
    pa.struct([_TOKEN, _TEXT, _LOGPROB, ("top", pa.list_(pa.struct([_TOKEN, _TEXT, _LOGPROB])))])
)


@dataclass(frozen=True, slots=True)
class Column:
    """One column: name, Arrow type and what it holds (with its unit)."""

    name: str
    type: pa.DataType
    doc: str


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the run folder."""

    name: str
    doc: str
    columns: tuple[Column, ...]

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([(column.name, column.type) for column in self.columns])


def _table(name: str, doc: str, *columns: tuple[str, pa.DataType, str]) -> Table:
    return Table(name, doc, tuple(Column(*column) for column in columns))


_KEY = (
    ("shard", pa.int32(), "index of the input shard in run.json"),
    ("row", pa.int64(), "position of the row in its shard, from 0"),
    ("sample", pa.int32(), "0 .. n - 1"),
)

# ---- internal tables: plan and results

TOKENS = _table(
    "tokens",
    "one file per shard, one row per input row: tokenised and checked",
    ("shard", pa.int32(), "index of the input shard in run.json"),
    ("row", pa.int64(), "position of the row in its shard"),
    ("id", pa.string(), "the row's id as text; null when the input has none"),
    ("n", pa.int32(), "samples asked for (output rows of this input row)"),
    ("token_ids", TOKEN_IDS, "prompt tokens; null for a bad row"),
    ("max_tokens", pa.int32(), "new tokens allowed, cut to the model's window; 0 for a bad row"),
    ("sampling", pa.string(), "the row's resolved sampling as JSON; null: the job's own"),
    ("error", pa.string(), "why the row is bad; null: it is good"),
    ("control_tokens", pa.bool_(), "whether its text holds control tokens"),
    ("choices", pa.list_(TOKEN_IDS), "tokens of each choice; null for a bad row, or where the job has no choices"),
)
REQUESTS = _table(
    "plan/requests",
    "one row per request in the order of execution; a unit's rows are together, in row groups of their own",
    ("unit", pa.int32(), "work unit"),
    *_KEY,
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
    ("token_ids", TOKEN_IDS, "prompt tokens"),
)
DUPLICATES = _table(
    "plan/duplicates",
    "greedy requests equal to another one: computed once, delivered to each",
    *_KEY,
    ("of_shard", pa.int32(), "shard of the request that is computed"),
    ("of_row", pa.int64(), "its row"),
    ("of_sample", pa.int32(), "its sample"),
)
PLAN_UNITS = _table(
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
)
PLAN_EXPERTS = _table(
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
# What a plan predicts of balance and time; null what is not known. Copied to stats/run.
PREDICTIONS = (
    ("expected_output_tokens", pa.int64(), "output tokens expected from answer lengths of an earlier run"),
    (
        "prefill_max_over_mean",
        pa.float64(),
        "tokens the busiest prefill rank runs, by the mean (answers if it decodes)",
    ),
    ("prefill_bound", pa.float64(), "what no plan's prefill_max_over_mean goes below"),
    ("decode_max_over_mean", pa.float64(), "KV tokens of the busiest decode rank, by the mean, over all steps"),
    ("decode_bound", pa.float64(), "what decode_max_over_mean cannot be below, with what runs in each step"),
    ("work_s", pa.float64(), "seconds from the ranks' start to the last step, on one group"),
    ("is_simulated", pa.bool_(), "whether at the speed of cluster.gpu by published figures, not of an earlier run"),
    ("gpu_hours", pa.float64(), "accelerator-hours held in that time"),
    ("cost_usd", pa.float64(), "their price"),
    ("nodes_to_finish", pa.int64(), "nodes of cluster.gpu that finish within cluster.finish_hours"),
)
PLAN_SUMMARY = _table(
    "plan/summary",
    "one row: what the plan predicts",
    ("input_rows", pa.int64(), "rows in readable shards"),
    ("rows", pa.int64(), "output rows (input rows x n)"),
    ("bad_rows", pa.int64(), "output rows that are error rows already"),
    ("unreadable_shards", pa.int64(), "shards that have no outputs"),
    ("control_rows", pa.int64(), "input rows whose text holds control tokens"),
    ("requests", pa.int64(), "requests to compute"),
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
RESULTS = _table(
    "results",
    "units/<unit>/<claim>/part-*.parquet: finished requests, durable once the file is there",
    *_KEY,
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
    ("replicated_tokens", pa.int32(), "prompt tokens computed on a second rank, too (below 0: not, against the plan)"),
    ("recomputed_tokens", pa.int32(), "prompt tokens that its rank computed again: their pages had been given up"),
    ("computed_tokens", pa.int32(), "prompt tokens that ran for it, the last two columns' among them"),
    ("completion_tokens", pa.int32(), "generated tokens"),
    ("reasoning", pa.string(), "what was thought before the text; null: nothing, or nobody asked"),
    ("reasoning_tokens", pa.int32(), "of the generated tokens"),
    ("structured_valid", pa.bool_(), "whether the text is all that structured_outputs asked for; null: nothing"),
    ("kv_tokens_sum", pa.int64(), "sum over generated tokens of the KV length each attended to"),
    ("logprobs", LOGPROBS, "per generated token, when asked for"),
    ("prompt_logprobs", LOGPROBS, "per scored token of the prompt: of all but its first, or of the choice"),
    ("admitted_s", pa.float64(), "Unix time when its prefill was admitted"),
    ("first_token_s", pa.float64(), "Unix time of its first new token"),
    ("finished_s", pa.float64(), "Unix time of its last token"),
)

# ---- outputs and statistics: what people query

OUTPUTS = _table(
    "outputs",
    "one file per input shard, its rows in its order, each n times; kept input columns follow",
    ("id", pa.string(), "the row's id (integer when all shards have integer ids)"),
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
OUTPUTS_WITH_REASONING = _table(
    "outputs with reasoning",
    "behind the columns of outputs, where output.reasoning is not 'none'",
    ("reasoning", pa.string(), "what was thought before the text; null: nothing"),
    ("reasoning_tokens", pa.int32(), "of completion_tokens, those up to the end of thinking"),
)
TOOL_CALLS = pa.list_(pa.struct([("name", pa.string()), ("arguments", pa.string())]))
OUTPUTS_WITH_TOOLS = _table(
    "outputs with tools",
    "behind these, where input.tools is set or input.format is 'openai'",
    ("tool_calls", TOOL_CALLS, "calls in the text, arguments as JSON; empty: none, null: not to be read"),
)
OUTPUTS_WITH_PROMPT_LOGPROBS = _table(
    "outputs with prompt_logprobs",
    "behind these, where sampling.prompt_logprobs is set for the job or its rows may set it",
    ("prompt_logprobs", LOGPROBS, "per prompt token, when asked for, of sample 0; the first token's entry is null"),
)
OUTPUTS_WITH_CHOICES = _table(
    "outputs with choices",
    "behind these, where input.choices is set; null for an error row",
    ("choice", pa.int32(), "number of the most likely choice, from 0; the first of equal ones"),
    ("choice_normalized", pa.int32(), "the same by log-probability per token of the choice"),
    ("choice_logprobs", pa.list_(pa.float64()), "log-probability of each choice: the sum over its tokens"),
    ("choice_num_tokens", pa.list_(pa.int32()), "tokens of each choice"),
    ("choice_is_greedy", pa.list_(pa.bool_()), "whether each token of it is the model's most likely one"),
)
OUTPUT_TABLES = OUTPUTS, OUTPUTS_WITH_REASONING, OUTPUTS_WITH_TOOLS, OUTPUTS_WITH_PROMPT_LOGPROBS, OUTPUTS_WITH_CHOICES
STATS_REQUESTS = _table(
    "requests",
    "one row per output row, of a row with choices one per choice",
    *_KEY,
    ("choice", pa.int32(), "the choice that was scored, from 0; null in a job without choices"),
    ("unit", pa.int32(), "work unit; null for error rows of the plan"),
    ("status", pa.string(), "'ok' or 'error'"),
    ("finish_reason", pa.string(), "'stop', 'length' or 'error'"),
    ("prompt_tokens", pa.int32(), "prompt tokens; 0 for an error row"),
    ("cached_memory_tokens", pa.int32(), "prompt tokens that earlier rows share, by the plan"),
    ("cached_disk_tokens", pa.int32(), "prompt tokens whose KV came from the store on disk"),
    ("cached_duplicate_tokens", pa.int32(), "prompt tokens of a duplicate: answered by another request"),
    ("replicated_tokens", pa.int32(), "prompt tokens computed on a second rank, too (below 0: not, against the plan)"),
    ("recomputed_tokens", pa.int32(), "prompt tokens that its rank computed again: their pages had been given up"),
    ("computed_tokens", pa.int32(), "prompt tokens that ran for it, the last two columns' among them"),
    ("completion_tokens", pa.int32(), "output tokens delivered"),
    ("reasoning_tokens", pa.int32(), "of these, the thinking's, where it is told from the answer"),
    (
        "structured_valid",
        pa.bool_(),
        "whether the answer is all that structured_outputs asked for; null: it asked for nothing, or was not computed",
    ),
    ("mean_logprob", pa.float64(), "mean log-probability of its output tokens; null: nobody asked"),
    ("generated_tokens", pa.int32(), "output tokens generated for this row (0 for a duplicate)"),
    ("kv_tokens_sum", pa.int64(), "sum over generated tokens of the KV length each attended to"),
    ("admitted_s", pa.float64(), "Unix time when its prefill was admitted; null when not run itself"),
    ("first_token_s", pa.float64(), "Unix time of its first new token; null when not run itself"),
    ("finished_s", pa.float64(), "Unix time of its last token; null when not run itself"),
)
STATS_UNITS = _table(
    "units",
    "one row per work unit",
    ("unit", pa.int32(), "work unit"),
    ("num_requests", pa.int64(), "requests in it"),
    ("prompt_tokens", pa.int64(), "prompt tokens"),
    ("new_tokens", pa.int64(), "prompt tokens the plan predicted to be computed"),
    ("computed_tokens", pa.int64(), "prompt tokens that ran for its rows, in steps of the counted claims"),
    ("completion_tokens", pa.int64(), "tokens generated"),
    ("num_claims", pa.int32(), "how often it was claimed; more than 1 after an interrupt or a failure"),
    ("claim", pa.string(), "the claim whose results count"),
    ("started_s", pa.float64(), "Unix time when its first request was admitted"),
    ("finished_s", pa.float64(), "Unix time of its last token"),
)
STATS_STEPS = _table(
    "steps",
    "one row per model step",
    ("session", pa.string(), "session (see nodes)"),
    ("rank", pa.int32(), "rank that ran it"),
    ("step", pa.int64(), "number of the step in its session, from 0"),
    ("kind", pa.string(), "'prefill' or 'decode'"),
    ("start_s", pa.float64(), "Unix time of its start"),
    ("duration_s", pa.float64(), "seconds, sampling included"),
    ("num_requests", pa.int32(), "requests in it"),
    ("new_tokens", pa.int32(), "tokens run through the model"),
    ("cached_tokens", pa.int32(), "prompt tokens of requests admitted in it whose KV was there already"),
    ("output_tokens", pa.int32(), "new tokens of its requests"),
    ("kv_tokens", pa.int64(), "sum over requests of the KV length attended to"),
    ("largest_kv_tokens", pa.int64(), "of these, the largest request's"),
    ("pages_used", pa.int32(), "KV pages in use, cached prefixes included"),
    ("micro_batches", pa.int32(), "1, or 2 when two micro-batches were interleaved"),
    ("placement", pa.int32(), "where the experts were in it (see placements)"),
    ("expert_rows", pa.int64(), "(token, expert) rows that this rank's experts computed, all layers"),
    (
        "comm_s",
        pa.float64(),
        "seconds in which this step's expert rows were packed, under way or unpacked; 0 on one rank",
    ),
    ("wait_comm_s", pa.float64(), "of these, when nothing moved: another rank had not sent its rows; null: not known"),
    ("hidden_comm_s", pa.float64(), "of the others, when rows moved while the rank computed; null: not known"),
    ("exposed_comm_s", pa.float64(), "of comm_s, seconds in which the rank computed nothing"),
    (
        "fallback_calls",
        pa.int32(),
        "operations that another kernel ran than the chosen one, which did not take them",
    ),
    ("drafted_tokens", pa.int32(), "guesses of the model's layer for multi-token prediction that were run, too"),
    ("accepted_tokens", pa.int32(), "of these, guesses that were right, which are among output_tokens"),
    ("graph", pa.string(), "decode as a CUDA graph: 'replayed', or 'recorded' where it was the first of its size"),
    ("graph_rows", pa.int32(), "rows of that graph, or of each of its two micro-batches, filler among them"),
    ("no_graph", pa.string(), "why a decode step ran as plain operations instead; null where graph is not"),
)
STATS_EXPERTS = _table(
    "experts",
    "tokens per expert; in prefill the last layer only gets those that give an answer's first token",
    ("session", pa.string(), "session (see nodes)"),
    ("rank", pa.int32(), "rank that counted them"),
    ("placement", pa.int32(), "where the experts were meanwhile (see placements)"),
    ("phase", pa.string(), "'prefill' or 'decode'"),
    ("layer", pa.int32(), "decoder layer"),
    ("expert", pa.int32(), "logical expert"),
    ("tokens", pa.int64(), "tokens sent to it"),
)
STATS_EXPERT_ROWS = _table(
    "expert_rows",
    "(token, expert) rows that the ranks' experts computed, and what the placement gives them of the tokens counted",
    ("session", pa.string(), "session (see nodes)"),
    ("rank", pa.int32(), "rank whose experts computed them"),
    ("placement", pa.int32(), "where the experts were meanwhile (see placements)"),
    ("phase", pa.string(), "'prefill' or 'decode'"),
    ("layer", pa.int32(), "decoder layer"),
    ("rows", pa.int64(), "measured: rows that its experts computed"),
    ("promised_rows", pa.float64(), "by experts and placements: tokens of its experts times their shares; null: alone"),
)
STATS_PLACEMENTS = _table(
    "placements",
    "where the experts of a group of ranks were: one row per placement, layer and slot; the column placement of steps "
    "says in which steps",
    ("session", pa.string(), "session (see nodes)"),
    ("placement", pa.int32(), "number of the placement of this group in its session, from 0"),
    ("made_by", pa.string(), "'order', 'table' (plan/experts), 'calibration' or 'loads' (measured in the session)"),
    *((column.name, column.type, column.doc) for column in PLAN_EXPERTS.columns),
)
STATS_NODES = _table(
    "nodes",
    "one row per session: one command on one machine",
    ("session", pa.string(), "name of the session"),
    ("command", pa.string(), "'plan', 'work', 'finish' or 'run'"),
    ("node", pa.string(), "host name, or the node's name in Slurm"),
    ("num_ranks", pa.int32(), "ranks (accelerators, or processes on a CPU) held on this node; 0 for plan and finish"),
    ("first_rank", pa.int32(), "number in its group of the first of them; the others follow. 0 for plan and finish"),
    ("mode", pa.string(), "'colocated' or 'disaggregated'; null for plan and finish"),
    ("prefill_ranks", pa.int32(), "ranks of the group that run prefill; 0 for plan and finish"),
    ("decode_ranks", pa.int32(), "ranks of the group that run decode; 0 for plan and finish"),
    ("device", pa.string(), "'cpu' or the accelerator's name; null for plan and finish"),
    ("bit_equal", pa.bool_(), "whether a row has the same bits whatever it is batched with; null: not known, no ranks"),
    ("bit_equal_reason", pa.string(), "why bit_equal is false or not known; null where it holds"),
    ("processor", pa.string(), "the ranks' processor and its vector units in use; null for plan and finish"),
    ("numerics", pa.string(), "what rounds: ranks with the same give the same bits"),
    ("restarts", pa.int32(), "how often the ranks were started again after one died"),
    ("moves", pa.int32(), "running requests that went from one rank to another, for balance"),
    ("calibration_tokens", pa.int64(), "prompt tokens run before the first step to see which experts they ask for"),
    ("placements", pa.int32(), "how often experts were placed while its ranks ran"),
    ("start_s", pa.float64(), "Unix time when the process started"),
    ("first_prefill_s", pa.float64(), "Unix time of the first prefill step; null when there was none"),
    ("end_s", pa.float64(), "Unix time of its end (or of its last sign of life)"),
    ("state", pa.string(), "'done', 'interrupted', 'failed' or 'running' (killed)"),
)
STATS_KV = _table(
    "kv",
    "one row per rank that used the KV store on disk, and per start of it",
    ("session", pa.string(), "session (see nodes)"),
    ("rank", pa.int32(), "rank"),
    ("start", pa.int32(), "how often the ranks had been started again before"),
    ("hit_blocks", pa.int64(), "blocks read, intact"),
    ("hit_bytes", pa.int64(), "bytes of them"),
    ("missing_blocks", pa.int64(), "blocks that a look-up had found and that could not be read then"),
    ("read_s", pa.float64(), "seconds of reading and checking, over all threads"),
    ("wait_s", pa.float64(), "seconds that prefill waited for blocks"),
    ("damaged_files", pa.int64(), "files that failed a check and were moved to quarantine"),
    ("written_blocks", pa.int64(), "blocks written"),
    ("written_bytes", pa.int64(), "bytes of them"),
    ("write_s", pa.float64(), "seconds of checksums and writing, behind the computation"),
    ("dropped_blocks", pa.int64(), "blocks not written: the disk was too slow, or the block before them was missing"),
    ("refused_blocks", pa.int64(), "blocks not written: all that the store held was worth more"),
    ("evicted_files", pa.int64(), "files removed to make room"),
    ("evicted_bytes", pa.int64(), "bytes of them"),
    ("fetched_files", pa.int64(), "files that came from the second tier"),
    ("fetched_bytes", pa.int64(), "bytes of them"),
    ("sent_files", pa.int64(), "files put there"),
    ("sent_bytes", pa.int64(), "bytes of them"),
)
STATS_RUN = _table(
    "run",
    "one row: the job",
    ("run", pa.string(), "name of the run folder"),
    ("version", pa.string(), "version of batchinfer"),
    ("model", pa.string(), "model folder"),
    ("dtype", pa.string(), "model.dtype, and ', KV in fp8' where kv.dtype is"),
    ("finished_s", pa.float64(), "Unix time when finish wrote the outputs"),
    ("num_shards", pa.int64(), "input shards"),
    ("unreadable_shards", pa.int64(), "of these, not readable"),
    ("input_rows", pa.int64(), "rows in readable shards"),
    ("rows", pa.int64(), "output rows (input rows x n)"),
    ("distinct_tokens", pa.int64(), "prompt tokens of all distinct prefixes, scored ones per row"),
    ("replicated_tokens", pa.int64(), "prefix tokens computed on more than one rank on purpose"),
    ("predicted_computed_tokens", pa.int64(), "prompt tokens the plan predicted to be computed"),
    *((f"predicted_{name}", type, f"of the plan: {doc}") for name, type, doc in PREDICTIONS),
    ("predicted_expert_max_over_mean", pa.float64(), "of the placement: busiest rank's expert tokens by the mean"),
    ("predicted_expert_bound", pa.float64(), "what no placement's predicted_expert_max_over_mean goes below"),
    ("bit_equal", pa.bool_(), "whether a row has the same bits whatever it is batched with; null: not known"),
    ("bit_equal_reason", pa.string(), "why bit_equal is false or not known; null where it holds"),
    ("processor", pa.string(), "processors that computed, with their vector units in use"),
    ("numerics", pa.string(), "what rounds: runs with the same give the same bits"),
    ("gpu_hour", pa.float64(), "$ per accelerator-hour; null when unset"),
    ("input_hit", pa.float64(), "$ per million input tokens served from a cache"),
    ("input_miss", pa.float64(), "$ per million input tokens computed"),
    ("output", pa.float64(), "$ per million output tokens"),
)

DECODE_STEPS = _table(
    "decode_steps",
    "one row per decode step of a group with several decode ranks, made of steps and nodes",
    ("session", pa.string(), "session (see nodes)"),
    ("step", pa.int64(), "number of the step in its session"),
    ("start_s", pa.float64(), "Unix time of its start on the first rank"),
    ("end_s", pa.float64(), "Unix time of its end on the last rank"),
    ("num_ranks", pa.int32(), "ranks that decode"),
    ("num_working", pa.int64(), "of these, ranks with a request"),
    ("kv_busiest", pa.int64(), "KV tokens attended to by the rank with most"),
    ("kv_mean", pa.float64(), "mean over all ranks that decode"),
    ("kv_at_least", pa.float64(), "what kv_busiest cannot be below: the mean, or the largest request"),
    ("requests_busiest", pa.int32(), "requests of the rank with most"),
    ("requests_mean", pa.float64(), "mean over all ranks that decode"),
    ("requests_at_least", pa.float64(), "what requests_busiest cannot be below: the mean, rounded up"),
)
STATS_TABLES = (
    STATS_REQUESTS,
    STATS_UNITS,
    STATS_STEPS,
    STATS_EXPERTS,
    STATS_EXPERT_ROWS,
    STATS_PLACEMENTS,
    STATS_NODES,
    STATS_KV,
    STATS_RUN,
)


def asked_for(job: JobConfig, *, prompt_logprobs: bool) -> list[Table]:
    """The tables whose columns a job's outputs have behind those of OUTPUTS.

    Args:
        prompt_logprobs: whether any row wants them.
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
    """The outputs' schema: fixed before row one, the same for every shard of a job.

    Args:
        tables: from `asked_for`.
        with_texts: log-probabilities have the texts of their tokens.
    """
    more = [field for table in tables for field in table.schema]
    own = [pa.field("id", id_type), *list(OUTPUTS.schema)[1:], *more]
    if with_texts:
        own = [field.with_type(LOGPROBS_WITH_TEXTS) if field.type == LOGPROBS else field for field in own]
    return pa.schema([*own, *kept])
