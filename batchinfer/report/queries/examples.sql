-- examples: the first, the middle and the last answered row in the order of the input.
SELECT shard, row, sample, prompt_tokens, completion_tokens, finished_s - admitted_s AS seconds
FROM (
    SELECT *, row_number() OVER (ORDER BY shard, row) AS number, count(*) OVER () AS num_rows
    FROM requests
    WHERE status = 'ok' AND sample = 0
)
WHERE number IN (1, (num_rows + 1) // 2, num_rows)
ORDER BY shard, row
