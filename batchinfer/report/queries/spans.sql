-- spans: the times covered by at least one session, overlapping sessions merged into one span, by scope.
--   'wall'  all sessions   'working'  sessions that hold ranks   'node'  the same, host by host
--   'prefill', 'decode'  sessions that hold ranks of this kind, host by host
--
--   sessions  [-----)  [------)          spans  [-----)  [----------)
--                         [-----)
WITH intervals AS (
    SELECT 'wall' AS scope, '' AS node, start_s, end_s FROM sessions
    UNION ALL
    SELECT 'working', '', start_s, end_s FROM sessions WHERE num_ranks > 0
    UNION ALL
    SELECT 'node', node, start_s, end_s FROM sessions WHERE num_ranks > 0
    UNION ALL
    SELECT 'prefill', node, start_s, end_s FROM sessions WHERE num_prefill > 0
    UNION ALL
    SELECT 'decode', node, start_s, end_s FROM sessions WHERE num_decode > 0
),
marked AS (
    SELECT
        *,
        start_s > max(end_s) OVER (
            PARTITION BY scope, node ORDER BY start_s, end_s
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS opens_span
    FROM intervals
),
numbered AS (
    SELECT
        *,
        count(*) FILTER (opens_span) OVER (
            PARTITION BY scope, node ORDER BY start_s, end_s
            ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
        ) AS span
    FROM marked
)
SELECT scope, node, min(start_s) AS start_s, max(end_s) AS end_s
FROM numbered
GROUP BY scope, node, span
