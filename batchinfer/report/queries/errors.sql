-- errors: error rows grouped by what went wrong, the most frequent first (long texts are cut).
--   num_texts  different texts in all
SELECT
    left(coalesce(error, 'no reason was recorded'), 1000) AS error,
    count(*) AS rows,
    count(*) OVER () AS num_texts
FROM outputs
WHERE status = 'error'
GROUP BY left(coalesce(error, 'no reason was recorded'), 1000)
ORDER BY rows DESC, 1
