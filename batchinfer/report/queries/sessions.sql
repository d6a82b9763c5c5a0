-- sessions: one row per session of `nodes`, with its length and start-up.
--   length_s   start of the process to its end (or last sign of life)
--   startup_s  until its first prefill step (import, plan, load, compile); all of it when there was none
WITH clean AS (
    SELECT
        session,
        coalesce(node, '') AS node,
        coalesce(num_ranks, 0) AS num_ranks,
        start_s,
        first_prefill_s,
        -- a clock that was set back must not give a negative length
        greatest(start_s, coalesce(end_s, start_s)) AS end_s
    FROM nodes
    WHERE start_s IS NOT NULL
)
SELECT
    session,
    node,
    num_ranks,
    start_s,
    end_s,
    end_s - start_s AS length_s,
    greatest(0, least(coalesce(first_prefill_s, end_s), end_s) - start_s) AS startup_s
FROM clean
