-- rank_work: one row per rank of a node that ran a step, with its position in the pictures.
--   node, rank   host name, and number in the group
--   role         as in `ranks`
--   prefill_tokens, decode_tokens, kv_tokens, expert_rows, working_s   the rank's work: tokens of prefill and of decode steps,
--                KV tokens attended to in decode steps, rows of its experts, seconds in steps that ran tokens
WITH worked AS (
    SELECT
        node,
        rank,
        sum(new_tokens) FILTER (kind = 'prefill') AS prefill_tokens,
        sum(new_tokens) FILTER (kind = 'decode') AS decode_tokens,
        sum(kv_tokens) FILTER (kind = 'decode') AS kv_tokens,
        sum(expert_rows) AS expert_rows,
        sum(duration_s) FILTER (new_tokens > 0) AS working_s
    FROM steps JOIN sessions USING (session)
    GROUP BY node, rank
)
SELECT
    CAST(row_number() OVER (ORDER BY node, rank) - 1 AS INTEGER) AS position,
    node,
    rank,
    role,
    CAST(coalesce(worked.prefill_tokens, 0) AS BIGINT) AS prefill_tokens,
    CAST(coalesce(worked.decode_tokens, 0) AS BIGINT) AS decode_tokens,
    CAST(coalesce(worked.kv_tokens, 0) AS BIGINT) AS kv_tokens,
    CAST(coalesce(worked.expert_rows, 0) AS BIGINT) AS expert_rows,
    coalesce(working_s, 0) AS working_s
FROM worked JOIN ranks USING (rank)
ORDER BY position
