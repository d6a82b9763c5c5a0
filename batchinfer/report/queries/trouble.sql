-- trouble: one row, restarts of dead ranks and moves of requests to idle ranks, over all controllers of the run.
SELECT
    CAST(coalesce(sum(restarts), 0) AS BIGINT) AS restarts,
    CASE WHEN (SELECT decode_idle_share FROM balance) IS NOT NULL THEN CAST(coalesce(sum(moves), 0) AS BIGINT) END AS moves
FROM nodes
