-- speeds: one row, rates over delivered tokens (the first two) and over generated tokens.
--   rows_per_s, tokens_per_s         output rows (reused ones too), and input and output tokens (without those of reused
--                                    rows), per second of the run's time (times.wall_s)
--   output_tokens_per_s_per_request  mean over generated requests of two or more tokens of
--                                    (generated tokens - 1) / (time of the last token - time of the first)
--   mean_kv_tokens_per_output_token  KV length attended to, averaged over generated tokens
--   prefill_tokens_per_s_per_rank    prompt tokens (cached ones included) of prefill steps, per rank-second in these steps
--   decode_tokens_per_s_per_rank     output tokens of decode steps, per rank-second in these steps
--   prefill_, decode_tokens_per_s_per_node   the rate per rank, times the mean number of ranks of this kind on a node that
--                                    holds any (held.sql)
WITH per_request AS (
    SELECT avg((generated_tokens - 1) / (finished_s - first_token_s)) AS tokens_per_s
    FROM requests
    WHERE status = 'ok' AND generated_tokens >= 2 AND finished_s > first_token_s
),
per_rank AS (
    SELECT
        sum(new_tokens + cached_tokens) FILTER (kind = 'prefill')
            / nullif(sum(duration_s) FILTER (kind = 'prefill'), 0) AS prefill_tokens_per_s,
        sum(output_tokens) FILTER (kind = 'decode')
            / nullif(sum(duration_s) FILTER (kind = 'decode'), 0) AS decode_tokens_per_s
    FROM steps
)
SELECT
    tokens.rows / nullif(times.wall_s, 0) AS rows_per_s,
    (tokens.input_tokens + tokens.output_tokens) / nullif(times.wall_s, 0) AS tokens_per_s,
    per_request.tokens_per_s AS output_tokens_per_s_per_request,
    tokens.kv_tokens / nullif(tokens.generated_tokens, 0) AS mean_kv_tokens_per_output_token,
    per_rank.prefill_tokens_per_s AS prefill_tokens_per_s_per_rank,
    per_rank.decode_tokens_per_s AS decode_tokens_per_s_per_rank,
    per_rank.prefill_tokens_per_s * prefill_ranks_per_node AS prefill_tokens_per_s_per_node,
    per_rank.decode_tokens_per_s * decode_ranks_per_node AS decode_tokens_per_s_per_node
FROM per_request, per_rank, tokens, times, held
