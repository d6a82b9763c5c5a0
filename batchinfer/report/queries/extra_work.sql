-- extra_work: one row, tokens run through the model beyond once.
--   replicated_tokens  prefix tokens computed on more than one rank on purpose
--   wasted_tokens      run in a recorded step, but not part of what the delivered requests needed: work lost with a
--                      killed session, done again after preemption, or spent on rows that became error rows
-- A request needs its computed prompt tokens, and one token per output token but the first, which prefill gives.
SELECT
    (SELECT coalesce(sum(replicated_tokens), 0) FROM run) AS replicated_tokens,
    greatest(
        0,
        (SELECT coalesce(sum(new_tokens), 0) FROM steps) - (computed_tokens + generated_tokens - num_generated)
    ) AS wasted_tokens
FROM tokens
