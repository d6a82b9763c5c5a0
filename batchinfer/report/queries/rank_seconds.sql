-- rank_seconds: one row, the ranks' time by part; the first seven columns add up to the rank-seconds held.
--   startup   until the session's first prefill step
--   prefill, decode   in steps that ran tokens, without exchange and waste
--   exchange  in steps that ran tokens, while expert rows were transferred and the rank computed nothing
--   waste     share of the steps that ran wasted_tokens
--   tail      after a rank's last tokens, until the last tokens of its session
--   idle      the rest
--   prefill_share  the prefill pool's share of the cost: by number of ranks if pools are separate, else by step seconds
--
--   rank 0  [ startup )[ prefill )[ decode )[ decode )[ decode )[ idle )     idle at the end: finishing
--   rank 1  [ startup )[ prefill )[ decode )[ tail              )[ idle )
WITH working AS (
    SELECT session, rank, kind, duration_s, start_s + duration_s AS end_s, exposed_comm_s AS waits_s
    FROM steps
    WHERE new_tokens > 0
),
steps_sum AS (
    SELECT
        coalesce(sum(duration_s - waits_s) FILTER (kind = 'prefill'), 0) AS prefill,
        coalesce(sum(duration_s - waits_s) FILTER (kind = 'decode'), 0) AS decode,
        coalesce(sum(waits_s), 0) AS exchange
    FROM working
),
last_tokens AS (SELECT session, rank, max(end_s) AS end_s FROM working GROUP BY session, rank),
tails AS (
    SELECT coalesce(sum(session_end_s - end_s), 0) AS tail
    FROM (SELECT end_s, max(end_s) OVER (PARTITION BY session) AS session_end_s FROM last_tokens)
),
totals AS (
    SELECT
        (SELECT gpu_hours * 3600 FROM held) AS held,
        (SELECT coalesce(sum(num_ranks * startup_s), 0) FROM sessions) AS startup,
        -- wasted tokens are assumed to run as fast as others
        coalesce((SELECT wasted_tokens FROM extra_work) / nullif((SELECT sum(new_tokens) FROM steps), 0), 0) AS wasted
),
parts AS (
    SELECT
        *,
        -- clocks of several hosts may differ: at most the time held
        least(1, (held - startup) / nullif(prefill + decode + exchange + tail, 0)) AS fits
    FROM totals, steps_sum, tails
),
session_kinds AS (
    SELECT session, sum(duration_s) FILTER (kind = 'prefill') AS prefill, sum(duration_s) AS any_kind
    FROM working
    GROUP BY session
),
pools AS (
    SELECT
        sessions.num_ranks * length_s AS rank_s,
        CASE
            WHEN mode = 'disaggregated' THEN prefill_ranks / nullif(prefill_ranks + decode_ranks, 0)
            ELSE coalesce(prefill, 0) / any_kind
        END AS prefill_share
    FROM sessions JOIN nodes USING (session) LEFT JOIN session_kinds USING (session)
)
SELECT
    CAST(startup AS DOUBLE) AS startup,
    coalesce(prefill * fits * (1 - wasted), 0) AS prefill,
    coalesce(decode * fits * (1 - wasted), 0) AS decode,
    coalesce(exchange * fits * (1 - wasted), 0) AS exchange,
    coalesce((prefill + decode + exchange) * fits * wasted, 0) AS waste,
    coalesce(tail * fits, 0) AS tail,
    greatest(0, held - startup - coalesce((prefill + decode + exchange + tail) * fits, 0)) AS idle,
    -- the cost of a session without steps is split like that of the others
    (SELECT sum(rank_s * prefill_share) / nullif(sum(rank_s) FILTER (prefill_share IS NOT NULL), 0) FROM pools)
        AS prefill_share
FROM parts
