-- held: one row, the machines that the run held. A node is a host name; it is held while a session holds ranks on it.
--   working_s       seconds in which at least one session held ranks
--   peak_nodes      most nodes held at one time
--   mean_nodes      node-seconds held / working_s
--   mean_ranks      rank-seconds held / working_s
--   prefill_ranks_per_node, decode_ranks_per_node   rank-seconds of this kind / seconds of nodes that held such ranks
--   gpu_hours       rank-seconds held / 3600
WITH changes AS (
    SELECT start_s AS time_s, 1 AS change FROM spans WHERE scope = 'node' AND end_s > start_s
    UNION ALL
    SELECT end_s, -1 FROM spans WHERE scope = 'node' AND end_s > start_s
),
counted AS (
    -- ends before starts: a node that leaves at the moment at which another comes does not overlap with it
    SELECT sum(change) OVER (ORDER BY time_s, change ROWS UNBOUNDED PRECEDING) AS num_nodes FROM changes
),
totals AS (
    SELECT
        (SELECT coalesce(sum(end_s - start_s), 0) FROM spans WHERE scope = 'working') AS working_s,
        (SELECT coalesce(sum(end_s - start_s), 0) FROM spans WHERE scope = 'node') AS node_s,
        (SELECT coalesce(sum(num_ranks * length_s), 0) FROM sessions) AS rank_s,
        (SELECT coalesce(sum(num_prefill * length_s), 0) FROM sessions) AS prefill_rank_s,
        (SELECT sum(end_s - start_s) FROM spans WHERE scope = 'prefill') AS prefill_node_s,
        (SELECT coalesce(sum(num_decode * length_s), 0) FROM sessions) AS decode_rank_s,
        (SELECT sum(end_s - start_s) FROM spans WHERE scope = 'decode') AS decode_node_s,
        (SELECT coalesce(max(num_nodes), 0) FROM counted) AS peak_nodes
)
SELECT
    working_s,
    CAST(peak_nodes AS BIGINT) AS peak_nodes,
    node_s / nullif(working_s, 0) AS mean_nodes,
    rank_s / nullif(working_s, 0) AS mean_ranks,
    prefill_rank_s / nullif(prefill_node_s, 0) AS prefill_ranks_per_node,
    decode_rank_s / nullif(decode_node_s, 0) AS decode_ranks_per_node,
    rank_s / 3600 AS gpu_hours
FROM totals
