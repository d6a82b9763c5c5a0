-- extra_work: one row, tokens run through the model beyond once.
--   replicated_tokens  prefix tokens computed on more than one rank on purpose
--   wasted_tokens      run in a recorded step, but neither needed by a delivered request nor replicated: work lost with
--                      a killed session, done again after preemption, or spent on rows that became error rows
-- A request needs the prompt tokens that the plan did not find cached, and one token per output token but the first,
-- which prefill gives. What a rank computes of a cached prefix because another rank has it comes on top:
--
--   prompt    [ cached by the plan                      )[ new )
--   run       [ cached on this rank )[    replicated    )[ new )
SELECT
    replicated_tokens,
    greatest(
        0,
        (SELECT coalesce(sum(new_tokens), 0) FROM steps)
            - (computed_tokens + replicated_tokens + generated_tokens - num_generated)
    ) AS wasted_tokens
FROM tokens, (SELECT coalesce(sum(replicated_tokens), 0) AS replicated_tokens FROM run)
