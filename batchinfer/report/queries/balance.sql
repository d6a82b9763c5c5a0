-- balance: one row, the load balance of ranks; null if a single rank, or none, did such work.
--   prefill_tokens_max_over_mean     new tokens of the busiest rank of each prefill step, added up, by the sum of the
--                                    means: all ranks of a group take part in a step, also with nothing to compute
--   prefill_attention_max_over_mean  the same for the attention work
--   expert_max_over_mean   (token, expert) rows of the busiest rank by the mean, per role, weighted by rows
--   decode_idle_share      share of the decode ranks' turns in which the rank had no request
--   tail_s                 seconds at the end of sessions in which not all decode ranks had requests
WITH groups AS (
    SELECT session, mode, prefill_ranks, decode_ranks FROM nodes WHERE mode IS NOT NULL AND prefill_ranks > 0
),
prefill_steps AS (
    SELECT
        max(new_tokens) AS tokens_busiest, sum(new_tokens) / any_value(prefill_ranks) AS tokens_mean,
        max(attention_work) AS attention_busiest, sum(attention_work) / any_value(prefill_ranks) AS attention_mean
    FROM steps JOIN groups USING (session)
    WHERE kind = 'prefill' AND prefill_ranks > 1
    GROUP BY session, step
),
tails AS (
    SELECT max(end_s) - coalesce(max(end_s) FILTER (num_working = num_ranks), min(end_s)) AS tail_s
    FROM decode_steps
    GROUP BY session
),
expert_roles AS (
    SELECT max(expert_rows) AS busiest, avg(expert_rows) AS mean FROM ranks GROUP BY role HAVING count(*) > 1
)
SELECT
    (SELECT sum(tokens_busiest) / nullif(sum(tokens_mean), 0) FROM prefill_steps) AS prefill_tokens_max_over_mean,
    (SELECT sum(attention_busiest) / nullif(sum(attention_mean), 0) FROM prefill_steps)
        AS prefill_attention_max_over_mean,
    (SELECT sum(busiest) / nullif(sum(mean), 0) FROM expert_roles) AS expert_max_over_mean,
    (SELECT 1 - sum(num_working) / nullif(sum(num_ranks), 0) FROM decode_steps) AS decode_idle_share,
    (SELECT sum(tail_s) FROM tails) AS tail_s
