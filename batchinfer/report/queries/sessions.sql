-- sessions: one row per session of `nodes`, with its length and start-up.
--   num_prefill, num_decode   number of ranks that run prefill, and of ranks that run decode; in a disaggregated
--              group the prefill ranks have the lowest numbers
--   length_s   from start to end of the process. The end of a killed session is its last heartbeat or the last known step
--              of its own ranks (ranks on other nodes have other clocks)
--   startup_s  until the first prefill step (import, plan, load, compile); length_s if there was none
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
        -- the length is not negative even if the clock was set back
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
