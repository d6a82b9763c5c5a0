-- clocks: one row, whether the run's times fit together.
--   steps_outside_s  most seconds by which a step began before its session or ended after it; null up to a second. Then
--                    a host's clock was wrong, or set while the session ran, and figures of time say little.
-- The end of a killed session is a guess.
WITH outside AS (
    SELECT
        greatest(
            nodes.start_s - steps.start_s,
            CASE WHEN state <> 'running' THEN steps.start_s + duration_s - nodes.end_s END
        ) AS off_s
    FROM steps JOIN nodes USING (session)
)
SELECT max(off_s) FILTER (off_s > 1) AS steps_outside_s FROM outside
