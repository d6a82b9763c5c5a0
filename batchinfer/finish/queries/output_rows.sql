-- The output rows of shards {first} to {last} with all columns of outputs and stats/requests, in no order; a row
-- with choices has one row per choice.
SELECT wanted.shard, wanted.row, CASE WHEN choices IS NULL THEN wanted.sample ELSE 0 END AS sample, wanted.id,
       CASE WHEN choices IS NOT NULL THEN wanted.sample END AS choice,
       coalesce(delivered.status, 'error') AS status,
       coalesce(wanted.error, delivered.error, CASE WHEN delivered.status IS NULL THEN {not_computed} END) AS error,
       delivered.text, delivered.token_ids, coalesce(delivered.finish_reason, 'error') AS finish_reason,
       delivered.stop_reason, coalesce(delivered.prompt_tokens, 0) AS prompt_tokens,
       CASE WHEN is_duplicate THEN 0 ELSE coalesce(cached_memory_tokens, 0) END AS cached_memory_tokens,
       CASE WHEN is_duplicate OR delivered.status IS DISTINCT FROM 'ok' THEN 0 ELSE planned_tokens END AS planned_tokens,
       CASE WHEN is_duplicate THEN 0 ELSE coalesce(cached_disk_tokens, 0) END AS cached_disk_tokens,
       CASE WHEN is_duplicate THEN delivered.prompt_tokens ELSE 0 END AS cached_duplicate_tokens,
       CASE WHEN is_duplicate THEN 0 ELSE coalesce(replicated_tokens, 0) END AS replicated_tokens,
       CASE WHEN is_duplicate THEN 0 ELSE coalesce(recomputed_tokens, 0) END AS recomputed_tokens,
       CASE WHEN is_duplicate THEN 0 ELSE coalesce(computed_tokens, 0) END AS computed_tokens,
       coalesce(delivered.completion_tokens, 0) AS completion_tokens,
       CASE WHEN is_duplicate OR is_reused THEN 0 ELSE coalesce(delivered.completion_tokens, 0) END AS generated_tokens,
       CASE WHEN is_duplicate THEN 0 ELSE coalesce(delivered.kv_tokens_sum, 0) END AS kv_tokens_sum,
       delivered.reasoning, coalesce(delivered.reasoning_tokens, 0) AS reasoning_tokens,
       delivered.structured_valid, delivered.prompt_logprobs,
       delivered.logprobs, delivered.mean_logprob, delivered.answer_place,
       delivered.unit, coalesce(is_reused, false) AS is_reused,
       CASE WHEN NOT is_duplicate THEN admitted_s END AS admitted_s,
       CASE WHEN NOT is_duplicate THEN first_token_s END AS first_token_s,
       CASE WHEN NOT is_duplicate THEN finished_s END AS finished_s
FROM (
    SELECT shard, row, id, error, choices, unnest(range(coalesce(len(choices), n)))::INTEGER AS sample
    FROM {tokens}
) AS wanted
LEFT JOIN (SELECT *, status = 'ok' AND admitted_s IS NULL AS is_reused FROM delivered WHERE shard BETWEEN {first} AND {last}) AS delivered USING (shard, row, sample)
