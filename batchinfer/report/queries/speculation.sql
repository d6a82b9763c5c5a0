-- speculation: one row, tokens that the model's layer for multi-token prediction has drafted in decode steps.
--   drafted_tokens    guesses run together with the tokens that were due
--   accepted_tokens   correct guesses: tokens that needed no step for themselves
--   acceptance_rate   accepted_tokens / drafted_tokens
--   speculation_gain  estimated seconds without guesses / seconds of steps with guesses and of their drafting. The
--                     estimate takes the median pace of this run's steps without guesses at the same number of
--                     requests; steps without such a pace are left out; null if none is left
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
