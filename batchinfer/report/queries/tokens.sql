-- tokens: one row, rows and tokens delivered. Token sums cover ok rows; a prompt counts once per sample or choice.
-- Rows with answers of an earlier run are in no sum but their own: this run did no work for them.
--   reused_rows, reused_input_tokens, reused_output_tokens   ok rows with such answers, duplicates of them included
--   cached_tokens          prompt tokens not computed for their row: found in memory, loaded from disk, or of a duplicate row
--   memory_, disk_, duplicate_tokens   the same by source
--   optimal_cached_tokens  tokens that a perfect cache would have served: all but the tokens of distinct prefixes that the
--                          store on disk did not hold, scored prefixes once per row (tokens read from the store beyond
--                          the plan's prefixes were there before)
--   output_tokens          delivered, duplicates included
--   generated_tokens       output tokens that ran through the model
--   needed_tokens          prompt tokens that had to run once in the plan's order: neither shared nor on disk
--   computed_tokens        prompt tokens that ran, counted in prefill steps
WITH ok AS (
    SELECT *, cached_memory_tokens + cached_disk_tokens AS found_tokens
    FROM requests WHERE status = 'ok' AND is_reused IS NOT TRUE
),
bad_choices AS (  -- a row with choices has one row in requests per choice; several runs have a column run
    SELECT DISTINCT COLUMNS(lambda name: name IN ('run', 'shard', 'row'))
    FROM requests WHERE status <> 'ok' AND choice IS NOT NULL
),
computed_choices AS (  -- such a row is reused if all its choices are
    SELECT DISTINCT COLUMNS(lambda name: name IN ('run', 'shard', 'row'))
    FROM requests WHERE is_reused IS NOT TRUE AND choice IS NOT NULL
),
reused AS (
    SELECT
        count(*) FILTER (is_reused AND choice IS NULL) + count(*) FILTER (choice = 0)
            - (SELECT count(*) FROM computed_choices) AS reused_rows,
        coalesce(sum(prompt_tokens) FILTER (is_reused), 0) AS reused_input_tokens,
        coalesce(sum(completion_tokens) FILTER (is_reused), 0) AS reused_output_tokens
    FROM requests
),
counted AS (
    SELECT
        count(*) FILTER (coalesce(choice, 0) = 0) AS rows,
        count(*) FILTER (status <> 'ok' AND choice IS NULL) + (SELECT count(*) FROM bad_choices) AS rows_error
    FROM requests
),
sums AS (
    SELECT
        coalesce(sum(prompt_tokens), 0) AS input_tokens,
        coalesce(sum(found_tokens + cached_duplicate_tokens), 0) AS cached_tokens,
        coalesce(sum(cached_memory_tokens), 0) AS memory_tokens,
        coalesce(sum(cached_disk_tokens), 0) AS disk_tokens,
        coalesce(sum(cached_duplicate_tokens), 0) AS duplicate_tokens,
        coalesce(sum(completion_tokens), 0) AS output_tokens,
        coalesce(sum(generated_tokens), 0) AS generated_tokens,
        coalesce(sum(prompt_tokens - found_tokens) FILTER (cached_duplicate_tokens = 0), 0) AS needed_tokens,
        count(*) FILTER (generated_tokens > 0) AS num_generated,
        coalesce(sum(kv_tokens_sum) FILTER (generated_tokens > 0), 0) AS kv_tokens
    FROM ok
)
SELECT
    counted.rows,
    counted.rows - rows_error AS rows_ok,
    rows_error,
    reused_rows,
    reused_input_tokens,
    reused_output_tokens,
    input_tokens,
    cached_tokens,
    cached_tokens / nullif(input_tokens, 0) AS cache_hit_rate,
    memory_tokens,
    disk_tokens,
    duplicate_tokens,
    -- the plan's distinct prefixes include those of failed rows, input_tokens does not
    greatest(cached_tokens, input_tokens - (SELECT sum(distinct_tokens) FROM run) + disk_tokens)
        AS optimal_cached_tokens,
    output_tokens,
    generated_tokens,
    needed_tokens,
    (SELECT CAST(coalesce(sum(new_tokens), 0) AS BIGINT) FROM steps WHERE kind = 'prefill') AS computed_tokens,
    num_generated,
    kv_tokens
FROM sums, counted, reused
