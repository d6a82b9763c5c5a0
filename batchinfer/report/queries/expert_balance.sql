-- expert_balance: one row, the rows that the ranks' experts computed next to the rows that the active placements promised;
-- null if one rank holds all experts.
--   expert_rows_max_over_mean           (token, expert) rows of the busiest rank by the mean: per layer, placement
--                                       and phase, weighted by rows
--   expert_rows_promised_max_over_mean  the same for the rows that the active placement gives each rank of the
--                                       counted tokens
--   expert_rows_measured_by_promised    measured ratio / promised ratio
--   expert_rows_furthest                largest difference of measured and promised rows over all ranks and phases,
--                                       as a share of the promised rows
--   expert_placements, calibration_tokens   see nodes
WITH spread AS (
    SELECT
        max(rows) AS busiest,
        avg(rows) AS mean,
        max(promised_rows) AS promised_busiest,
        avg(promised_rows) AS promised_mean
    FROM expert_rows
    WHERE promised_rows IS NOT NULL
    GROUP BY session, placement, phase, layer
),
of_ranks AS (
    SELECT abs(sum(rows) / nullif(sum(promised_rows), 0) - 1) AS off
    FROM expert_rows
    GROUP BY session, rank, phase
),
ratios AS (
    SELECT
        sum(busiest) / nullif(sum(mean), 0) AS measured,
        sum(promised_busiest) / nullif(sum(promised_mean), 0) AS promised
    FROM spread
)
SELECT
    measured AS expert_rows_max_over_mean,
    promised AS expert_rows_promised_max_over_mean,
    measured / promised AS expert_rows_measured_by_promised,
    (SELECT max(off) FROM of_ranks) AS expert_rows_furthest,
    (SELECT CAST(sum(placements) AS BIGINT) FROM nodes) AS expert_placements,
    (SELECT CAST(sum(calibration_tokens) AS BIGINT) FROM nodes) AS calibration_tokens
FROM ratios
