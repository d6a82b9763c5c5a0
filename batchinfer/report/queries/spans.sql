-- spans: the times covered by at least one session, overlapping sessions merged into one span, by scope.
--   'wall'  all sessions but repeats: the same command once more on a finished run, with nothing to compute
--   'working'  sessions that hold ranks   'node'  the same, host by host
--   'prefill', 'decode'  sessions that hold ranks of this kind, host by host
--
--   sessions  [-----)  [------)          spans  [-----)  [----------)
--                         [-----)
WITH finishers AS (
    SELECT sessions.end_s FROM sessions JOIN nodes USING (session)
    WHERE nodes.command IN ('run', 'finish') AND nodes.state = 'done'
),
repeats AS (
    SELECT late.session FROM sessions AS late JOIN finishers ON finishers.end_s <= late.start_s
    WHERE late.num_ranks = 0 AND NOT EXISTS (
        FROM sessions AS computing
        WHERE computing.num_ranks > 0 AND computing.end_s > finishers.end_s AND computing.start_s < late.end_s
    )
),
intervals AS (
    SELECT 'wall' AS scope, '' AS node, start_s, end_s FROM sessions
    WHERE session NOT IN (SELECT session FROM repeats)
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
