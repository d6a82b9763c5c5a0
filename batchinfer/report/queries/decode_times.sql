-- decode_times: one row per line of the pictures of decode ranks and bin with decode steps of these ranks.
--   kv_tokens, num_requests   per step, mean over the steps that start in the bin
-- A line is one rank; with more than 48 ranks a line is the mean of several consecutive ranks.
WITH placed AS (
    SELECT node, rank, row_number() OVER (ORDER BY position) - 1 AS place FROM rank_work WHERE role LIKE '%decode%'
),
lines AS (
    SELECT node, rank, place // CAST(ceil((SELECT count(*) FROM placed) / 48) AS INTEGER) AS line FROM placed
)
SELECT
    line,
    CAST(floor((steps.start_s - axis.start_s) / width_s) AS INTEGER) AS bin,
    coalesce(avg(kv_tokens), 0) AS kv_tokens,
    coalesce(avg(num_requests), 0) AS num_requests
FROM steps JOIN sessions USING (session) JOIN lines USING (node, rank), axis
WHERE kind = 'decode' AND bin BETWEEN 0 AND num_bins - 1
GROUP BY line, bin
ORDER BY line, bin
