-- speculation: one row, tokens that the model's layer for multi-token prediction has drafted in decode steps.
--   drafted_tokens    guesses run together with the tokens that were due
--   accepted_tokens   of these, right ones: tokens that needed no step of their own
--   acceptance_rate   the one by the other
--   speculation_gain  seconds that steps with guesses would have taken for their tokens at the pace of this run's steps
--                     without, as many requests running (their median), by the seconds that they and their drafting
--                     took: over those with such a pace; null: there are none
WITH drafting AS (
    SELECT DISTINCT session, rank FROM steps WHERE drafted_tokens > 0
),
plain AS (
    SELECT session, rank, num_requests, median(duration_s) / num_requests AS token_s
    FROM steps JOIN drafting USING (session, rank)
    WHERE kind = 'decode' AND coalesce(drafted_tokens, 0) = 0 AND num_requests > 0
    GROUP BY session, rank, num_requests
)
SELECT
    coalesce(sum(steps.drafted_tokens), 0) AS drafted_tokens,
    coalesce(sum(steps.accepted_tokens), 0) AS accepted_tokens,
    sum(steps.accepted_tokens) / nullif(sum(steps.drafted_tokens), 0) AS acceptance_rate,
    sum(output_tokens * token_s) FILTER (steps.drafted_tokens > 0)
        / nullif(sum(duration_s) FILTER (steps.drafted_tokens > 0 AND token_s IS NOT NULL), 0) AS speculation_gain
FROM steps LEFT JOIN plain USING (session, rank, num_requests)
WHERE kind = 'decode'
