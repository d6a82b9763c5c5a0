-- The most frequent reason of error rows, and the number of its rows. Reasons that differ only in the line number count as one.
WITH named AS (
    SELECT
        left(
            regexp_replace(regexp_replace(error, '^line [0-9]+: ', ''), '^line [0-9]+ is ', 'the line is '), 300
        ) AS reason
    FROM {outputs}
    WHERE status = 'error' AND error IS NOT NULL
)
SELECT reason, count(*) AS num_rows
FROM named
GROUP BY reason
ORDER BY num_rows DESC, reason
LIMIT 1
