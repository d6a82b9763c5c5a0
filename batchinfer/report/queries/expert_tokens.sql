-- expert_tokens: one row per layer and expert that got tokens, in prefill and decode, over all ranks.
SELECT layer, expert, CAST(sum(tokens) AS BIGINT) AS tokens
FROM experts
GROUP BY layer, expert
ORDER BY layer, expert
