-- rank_times: one row per line of the picture and bin: the share of the bin in which its ranks were in steps with tokens.
-- A line is one rank; with more than 48 ranks a line is the mean of several consecutive ranks.
WITH lines AS (
    SELECT position, node, rank, position // CAST(ceil((SELECT count(*) FROM rank_work) / 48) AS INTEGER) AS line
    FROM rank_work
),
sizes AS (SELECT line, count(*) AS num_ranks FROM lines GROUP BY line),
worked AS (
    SELECT
        line,
        bin,
        sum(
            greatest(0, least(bins.end_s, steps.start_s + duration_s) - greatest(bins.start_s, steps.start_s))
        ) AS working_s
    FROM steps
    JOIN sessions USING (session)
    JOIN lines USING (node, rank)
    JOIN bins ON steps.start_s < bins.end_s AND steps.start_s + duration_s > bins.start_s
    WHERE new_tokens > 0
    GROUP BY line, bin
)
SELECT line, bin, least(1, working_s / num_ranks / width_s) AS share
FROM worked JOIN sizes USING (line) JOIN bins USING (bin)
ORDER BY line, bin
