-- weights: one row, weights that were read from disk again for each sweep (cluster.weights).
--   weights_streamed_bytes  bytes of weights read in all sweeps
--   weights_wait_s          seconds in which ranks waited for them
--   weights_wait_share      weights_wait_s / seconds of all steps of sweeps; null without sweeps
--   sweeps                  passes of steps through all layers that read weights; ranks of a group sweep together
WITH of_ranks AS (
    SELECT session, rank, count(*) FILTER (streamed_bytes > 0) AS sweeps FROM steps GROUP BY session, rank
)
SELECT
    CAST(coalesce(sum(streamed_bytes), 0) AS BIGINT) AS weights_streamed_bytes,
    coalesce(sum(weights_wait_s), 0) AS weights_wait_s,
    CASE WHEN sum(streamed_bytes) > 0 THEN sum(weights_wait_s) / nullif(sum(duration_s), 0) END AS weights_wait_share,
    (SELECT CAST(coalesce(sum(most), 0) AS BIGINT) FROM (SELECT max(sweeps) AS most FROM of_ranks GROUP BY session)) AS sweeps
FROM steps
