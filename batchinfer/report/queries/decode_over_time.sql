-- decode_over_time: one row per bin in which decode steps with requests started.
--   second     start of the bin, in seconds from the start of the axis
--   num_steps  decode steps
--   kv_mean, kv_busiest, requests_mean, requests_busiest   per step: mean over the ranks, and the busiest rank
--   kv_max_over_mean, requests_max_over_mean   the busiest rank by the mean, over these steps
--   kv_bound, requests_bound                   lower bounds of the two ratios, given the requests of each step
SELECT
    CAST(greatest(0, least(num_bins - 1, floor((decode_steps.start_s - axis.start_s) / width_s))) AS INTEGER) AS bin,
    bin * any_value(width_s) AS second,
    count(*) AS num_steps,
    avg(kv_mean) AS kv_mean,
    avg(kv_busiest) AS kv_busiest,
    sum(kv_busiest) / nullif(sum(kv_mean), 0) AS kv_max_over_mean,
    sum(kv_at_least) / nullif(sum(kv_mean), 0) AS kv_bound,
    avg(requests_mean) AS requests_mean,
    avg(requests_busiest) AS requests_busiest,
    sum(requests_busiest) / nullif(sum(requests_mean), 0) AS requests_max_over_mean,
    sum(requests_at_least) / nullif(sum(requests_mean), 0) AS requests_bound
FROM decode_steps, axis
WHERE kv_mean > 0
GROUP BY bin
ORDER BY bin
