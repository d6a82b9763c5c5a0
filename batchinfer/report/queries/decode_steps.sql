-- decode_steps: a view; one row per decode step of a group with several decode ranks (see schemas/statistics.py).
-- With several runs it has the column `run`, which views.py inserts.
SELECT
    /* run, */
    session,
    step,
    min(steps.start_s) AS start_s,
    max(steps.start_s + duration_s) AS end_s,
    any_value(decode_ranks) AS num_ranks,
    count(*) FILTER (num_requests > 0) AS num_working,
    coalesce(max(kv_tokens), 0) AS kv_busiest,
    coalesce(sum(kv_tokens), 0) / any_value(decode_ranks) AS kv_mean,
    greatest(coalesce(sum(kv_tokens), 0) / any_value(decode_ranks), max(largest_kv_tokens)) AS kv_at_least,
    coalesce(max(num_requests), 0) AS requests_busiest,
    coalesce(sum(num_requests), 0) / any_value(decode_ranks) AS requests_mean,
    ceil(coalesce(sum(num_requests), 0) / any_value(decode_ranks)) AS requests_at_least
FROM memory.main.steps JOIN memory.main.nodes USING (/* run, */ session)
WHERE kind = 'decode' AND mode IS NOT NULL AND decode_ranks > 1
GROUP BY /* run, */ session, step
