-- errors: error rows grouped by error text, the most frequent first (long texts are cut, line numbers removed).
--   num_texts  number of different texts
WITH named AS (
    SELECT
        left(
            regexp_replace(
                regexp_replace(coalesce(error, 'no reason was recorded'), '^line [0-9]+: ', ''),
                '^line [0-9]+ is ',
                'the line is '
            ),
            1000
        ) AS error
    FROM outputs
    WHERE status = 'error'
)
SELECT error, count(*) AS rows, count(*) OVER () AS num_texts
FROM named
GROUP BY error
ORDER BY rows DESC, 1
