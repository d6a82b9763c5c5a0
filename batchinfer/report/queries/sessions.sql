-- sessions: one row per session of `nodes`, with its length and start-up.
--   num_prefill, num_decode   of its ranks those that run prefill, and those that run decode; a disaggregated group
--              counts its prefill ranks first
--   length_s   start of the process to its end; of one that was killed to its last sign of life, or to the last step of
--              its own ranks that is known (those of other nodes have other clocks)
--   startup_s  until its first prefill step (import, plan, load, compile); all of it when there was none
WITH last_steps AS (SELECT session, rank, max(start_s + duration_s) AS step_end_s FROM steps GROUP BY session, rank),
killed AS (
    SELECT session, max(step_end_s) AS step_end_s
    FROM nodes JOIN last_steps USING (session)
    WHERE state = 'running' AND rank >= first_rank AND rank < first_rank + num_ranks
    GROUP BY session
),
clean AS (
    SELECT
        session,
        coalesce(node, '') AS node,
        coalesce(num_ranks, 0) AS num_ranks,
        mode,
        coalesce(first_rank, 0) AS first_rank,
        coalesce(prefill_ranks, 0) AS prefill_ranks,
        start_s,
        first_prefill_s,
        -- a clock that was set back must not give a negative length
        greatest(start_s, coalesce(end_s, start_s), coalesce(step_end_s, start_s)) AS end_s
    FROM nodes LEFT JOIN killed USING (session)
    WHERE start_s IS NOT NULL
)
SELECT
    session,
    node,
    num_ranks,
    CASE
        WHEN mode = 'disaggregated' THEN greatest(0, least(num_ranks, prefill_ranks - first_rank))
        ELSE num_ranks
    END AS num_prefill,
    CASE
        WHEN mode = 'disaggregated' THEN least(num_ranks, greatest(0, first_rank + num_ranks - prefill_ranks))
        ELSE num_ranks
    END AS num_decode,
    start_s,
    end_s,
    end_s - start_s AS length_s,
    greatest(0, least(coalesce(first_prefill_s, end_s), end_s) - start_s) AS startup_s
FROM clean
