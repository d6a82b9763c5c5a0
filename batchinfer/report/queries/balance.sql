-- balance: one row, how evenly the ranks were loaded; null where one rank did it all or nobody did.
--   prefill_max_over_mean  tokens of the busiest prefill rank by the mean, session by session, weighted by tokens; with
--                          the tokens it decodes when the same ranks do both
--   expert_max_over_mean   (token, expert) rows of the rank with most by the mean, role by role, weighted by rows
--   decode_idle_share      of the decode ranks' turns: those in which a rank had no request
--   tail_s                 seconds at the end of sessions in which not all decode ranks had requests
WITH groups AS (
    SELECT session, mode, prefill_ranks, decode_ranks FROM nodes WHERE mode IS NOT NULL AND prefill_ranks > 0
),
prefill_work AS (
    SELECT session, rank, any_value(prefill_ranks) AS num_ranks, sum(new_tokens) AS tokens
    FROM steps JOIN groups USING (session)
    WHERE kind = 'prefill' OR mode = 'colocated'
    GROUP BY session, rank
),
prefill_sessions AS (
    SELECT max(tokens) AS busiest, sum(tokens) / any_value(num_ranks) AS mean
    FROM prefill_work
    WHERE num_ranks > 1
    GROUP BY session
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
    (SELECT sum(busiest) / nullif(sum(mean), 0) FROM prefill_sessions) AS prefill_max_over_mean,
    (SELECT sum(busiest) / nullif(sum(mean), 0) FROM expert_roles) AS expert_max_over_mean,
    (SELECT 1 - sum(num_working) / nullif(sum(num_ranks), 0) FROM decode_steps) AS decode_idle_share,
    (SELECT sum(tail_s) FROM tails) AS tail_s
