-- lengths: ok rows by number of tokens; a row per bin, from the bin of the shortest row to the bin of the longest.
--   from_tokens, to_tokens  the bin, both ends included. Bins begin at 1, 2, 3, 4, 6, 8, 12, 16, 24, …
--   rows                    number of rows by output tokens
--   reasoning_rows          number of rows by tokens of thinking, if thinking is separated from the answer
WITH starts AS (
    SELECT 1 AS from_tokens UNION ALL SELECT unnest([2, 3]) << power::INTEGER FROM range(30) AS powers(power)
),
bins AS (
    SELECT from_tokens, lead(from_tokens) OVER (ORDER BY from_tokens) - 1 AS to_tokens FROM starts
),
outputs_by_length AS (
    SELECT completion_tokens AS tokens, count(*) AS rows FROM requests WHERE status = 'ok' GROUP BY tokens
),
thinking_by_length AS (
    SELECT reasoning_tokens AS tokens, count(*) AS rows FROM requests WHERE status = 'ok' GROUP BY tokens
),
counted AS (
    SELECT
        from_tokens,
        to_tokens,
        (SELECT sum(rows) FROM outputs_by_length WHERE tokens BETWEEN from_tokens AND to_tokens) AS rows,
        (SELECT sum(rows) FROM thinking_by_length WHERE tokens BETWEEN from_tokens AND to_tokens) AS reasoning_rows
    FROM bins
)
SELECT from_tokens, to_tokens, coalesce(rows, 0) AS rows, coalesce(reasoning_rows, 0) AS reasoning_rows
FROM counted
WHERE from_tokens BETWEEN
    (SELECT min(from_tokens) FROM counted WHERE rows > 0 OR reasoning_rows > 0)
    AND (SELECT max(from_tokens) FROM counted WHERE rows > 0)
ORDER BY from_tokens
