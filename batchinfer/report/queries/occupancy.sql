-- occupancy: one row per bin: nodes held, their cost, and the income of tokens at list prices.
--   nodes       mean number of hosts held
--   cost_usd    cost of the held ranks; null without a price
--   income_usd  null without token prices. Prompts count during their prefill, answers during the steps that generated them;
--               the share of duplicates and failed rows is spread like the rest, so that all bins add up to the revenue
WITH held_nodes AS (
    SELECT bin, sum(least(bins.end_s, spans.end_s) - greatest(bins.start_s, spans.start_s)) AS node_s
    FROM bins JOIN spans ON spans.start_s < bins.end_s AND spans.end_s > bins.start_s
    WHERE scope = 'node'
    GROUP BY bin
),
held_ranks AS (
    SELECT bin, sum(num_ranks * (least(bins.end_s, sessions.end_s) - greatest(bins.start_s, sessions.start_s))) AS rank_s
    FROM bins JOIN sessions ON sessions.start_s < bins.end_s AND sessions.end_s > bins.start_s
    WHERE num_ranks > 0
    GROUP BY bin
),
weights AS (
    SELECT bin, (memory + disk) * input_hit + computed * input_miss AS asked, sampled AS answered
    FROM throughput, run
),
earned AS (
    SELECT
        (cached_tokens * input_hit + (input_tokens - cached_tokens) * input_miss) / 1e6 AS input_usd,
        output_tokens * output / 1e6 AS output_usd
    FROM tokens, run
)
SELECT
    bin,
    coalesce(node_s, 0) / width_s AS nodes,
    coalesce(rank_s, 0) / 3600 * gpu_hour AS cost_usd,
    coalesce(asked / nullif(sum(asked) OVER (), 0), 0) * input_usd
        + coalesce(answered / nullif(sum(answered) OVER (), 0), 0) * output_usd AS income_usd
FROM bins
JOIN weights USING (bin)
LEFT JOIN held_nodes USING (bin)
LEFT JOIN held_ranks USING (bin), run, earned
ORDER BY bin
