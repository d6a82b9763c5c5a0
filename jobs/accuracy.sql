-- Share of right answers per task: batchinfer report runs/demo --sql @jobs/accuracy.sql
-- `task` and `expected` are input columns that jobs/demo.toml keeps.
SELECT
    coalesce(task, 'all tasks') AS task,
    count(*) AS prompts,
    count(*) FILTER (text = expected) AS right_answers,
    round(100.0 * count(*) FILTER (text = expected) / count(*), 1) AS percent
FROM outputs
WHERE expected IS NOT NULL
GROUP BY ROLLUP (task)
ORDER BY grouping(task), task
