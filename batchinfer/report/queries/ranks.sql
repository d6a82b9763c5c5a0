-- ranks: one row per rank of the groups that ran a step, added up over sessions (each numbers its ranks from 0).
--   role            'prefill + decode', 'prefill' or 'decode'
--   prefill_tokens  tokens run in prefill steps
--   output_tokens   tokens sampled in decode steps
--   busy_s          seconds in steps
--   expert_rows     (token, expert) rows that its experts computed
-- The role is that of the rank in its group, even if the rank ran only one kind of step, or none:
--
--   colocated      0 .. R-1  prefill + decode
--   disaggregated  0 .. P-1  prefill             P .. P+D-1  decode
WITH members AS (
    SELECT
        unnest(range(CASE mode WHEN 'colocated' THEN prefill_ranks ELSE prefill_ranks + decode_ranks END)) AS rank,
        mode = 'colocated' OR rank < prefill_ranks AS does_prefill,
        mode = 'colocated' OR rank >= prefill_ranks AS does_decode
    FROM nodes
    WHERE mode IS NOT NULL AND session IN (SELECT session FROM steps)
    UNION ALL
    SELECT DISTINCT rank, kind = 'prefill', kind = 'decode' FROM steps
),
roles AS (
    SELECT
        rank,
        CASE
            WHEN bool_or(does_prefill) AND bool_or(does_decode) THEN 'prefill + decode'
            WHEN bool_or(does_prefill) THEN 'prefill'
            ELSE 'decode'
        END AS role
    FROM members
    GROUP BY rank
)
SELECT
    rank,
    role,
    CAST(coalesce(sum(new_tokens) FILTER (kind = 'prefill'), 0) AS BIGINT) AS prefill_tokens,
    CAST(coalesce(sum(output_tokens) FILTER (kind = 'decode'), 0) AS BIGINT) AS output_tokens,
    coalesce(sum(duration_s), 0) AS busy_s,
    CAST(coalesce(sum(expert_rows), 0) AS BIGINT) AS expert_rows
FROM roles LEFT JOIN steps USING (rank)
GROUP BY rank, role
ORDER BY rank
