-- predictions: one row per prediction of the plan, in the report's order.
--   name      of the predicted figure
--   planned   by the plan
--   happened  in the run
--   at_best   lower bound of any plan; null if not known
SELECT 1 AS position, 'computed_tokens' AS name, predicted_computed_tokens::DOUBLE AS planned,
       computed_tokens::DOUBLE AS happened, (input_tokens - optimal_cached_tokens)::DOUBLE AS at_best
FROM run, tokens
UNION ALL
SELECT 2, 'output_tokens', predicted_expected_output_tokens, generated_tokens, NULL FROM run, tokens
UNION ALL
SELECT 3, 'prefill_tokens_balance', predicted_prefill_tokens_max_over_mean, prefill_tokens_max_over_mean, NULL
FROM run, balance
UNION ALL
SELECT 4, 'prefill_attention_balance', predicted_prefill_attention_max_over_mean, prefill_attention_max_over_mean, NULL
FROM run, balance
UNION ALL
SELECT 5, 'decode_balance', predicted_decode_max_over_mean, decode_kv_max_over_mean, decode_kv_bound
FROM run, decode_balance
UNION ALL
SELECT 6, 'expert_balance', predicted_expert_max_over_mean, coalesce(expert_rows_max_over_mean, expert_max_over_mean),
       predicted_expert_bound
FROM run, balance, expert_balance
UNION ALL
SELECT 7, 'work_s', predicted_work_s, working_s, NULL FROM run, held
UNION ALL
SELECT 8, 'gpu_hours', predicted_gpu_hours, gpu_hours, NULL FROM run, held
UNION ALL
SELECT 9, 'cost_usd', predicted_cost_usd, gpu_hours * gpu_hour, NULL FROM run, held
