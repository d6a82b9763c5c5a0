-- trouble: one row, what the controllers of the run did about ranks that died or had no work.
SELECT
    CAST(coalesce(sum(restarts), 0) AS BIGINT) AS restarts,
    CASE WHEN (SELECT decode_idle_share FROM balance) IS NOT NULL THEN CAST(coalesce(sum(moves), 0) AS BIGINT) END AS moves
FROM nodes
