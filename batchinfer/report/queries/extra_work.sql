-- extra_work: one row, tokens that ran through the model more often than needed.
--   replicated_tokens     prefix tokens computed on more than one rank on purpose
--   recomputed_tokens     prompt tokens computed again on the same rank, which had released their pages for others
--   wasted_prompt_tokens  other tokens of prefill steps that no delivered request needed: lost with a killed rank or
--                         session, or spent on rows that became error rows
--   wasted_tokens         wasted_prompt_tokens, and tokens of decode steps that no delivered request has
-- Every token of a prefill step is one of four: computed = needed + replicated + recomputed + wasted_prompt. A request
-- needs one token of decode per output token but the first, which prefill gives.
--
--   prompt    [ shared, by the plan                                  )[ new )
--   run       [ found on this rank )[ replicated )[    recomputed    )[ new )
WITH extra AS (
    SELECT
        (SELECT CAST(coalesce(sum(replicated_tokens), 0) AS BIGINT) FROM run) AS replicated_tokens,
        (SELECT CAST(coalesce(sum(recomputed_tokens), 0) AS BIGINT) FROM requests WHERE status = 'ok')
            AS recomputed_tokens,
        (SELECT coalesce(sum(new_tokens), 0) FROM steps WHERE kind = 'decode') AS decode_tokens
),
wasted AS (
    SELECT
        replicated_tokens,
        recomputed_tokens,
        greatest(0, computed_tokens - needed_tokens - replicated_tokens - recomputed_tokens) AS of_prompts,
        greatest(0, decode_tokens - (generated_tokens - num_generated)) AS of_outputs
    FROM extra, tokens
)
SELECT
    replicated_tokens,
    recomputed_tokens,
    CAST(of_prompts AS BIGINT) AS wasted_prompt_tokens,
    CAST(of_prompts + of_outputs AS BIGINT) AS wasted_tokens
FROM wasted
