-- together: one row in the form of `run` for several runs. Counts add up, and are null unless every run has them; prices
-- are null unless all runs have the same; the balance of single runs says nothing about several, and is null.
SELECT
    string_agg(run, ' + ' ORDER BY run) AS run,
    string_agg(DISTINCT model, ' + ' ORDER BY model) AS model,
    string_agg(DISTINCT dtype, ' + ' ORDER BY dtype) AS dtype,
    sum(distinct_tokens) AS distinct_tokens,
    sum(replicated_tokens) AS replicated_tokens,
    CASE WHEN count(predicted_computed_tokens) = count(*) THEN sum(predicted_computed_tokens) END
        AS predicted_computed_tokens,
    CASE WHEN count(predicted_expected_output_tokens) = count(*) THEN sum(predicted_expected_output_tokens) END
        AS predicted_expected_output_tokens,
    NULL::DOUBLE AS predicted_prefill_tokens_max_over_mean,
    NULL::DOUBLE AS predicted_prefill_attention_max_over_mean,
    NULL::DOUBLE AS predicted_decode_max_over_mean,
    NULL::DOUBLE AS predicted_decode_bound,
    NULL::DOUBLE AS predicted_expert_max_over_mean,
    NULL::DOUBLE AS predicted_expert_bound,
    CASE WHEN count(predicted_work_s) = count(*) THEN sum(predicted_work_s) END AS predicted_work_s,
    CASE WHEN count(predicted_gpu_hours) = count(*) THEN sum(predicted_gpu_hours) END AS predicted_gpu_hours,
    CASE WHEN count(predicted_cost_usd) = count(*) THEN sum(predicted_cost_usd) END AS predicted_cost_usd,
    CASE WHEN NOT bool_and(bit_equal) THEN false WHEN count(bit_equal) = count(*) THEN true END AS bit_equal,
    string_agg(DISTINCT bit_equal_reason, '; ' ORDER BY bit_equal_reason) AS bit_equal_reason,
    (
        SELECT string_agg(DISTINCT one, ' + ' ORDER BY one)
        FROM (SELECT unnest(string_split(processor, ' + ')) AS one FROM run)
    ) AS processor,
    CASE WHEN count(gpu_hour) = count(*) AND min(gpu_hour) = max(gpu_hour) THEN min(gpu_hour) END AS gpu_hour,
    CASE WHEN count(input_hit) = count(*) AND min(input_hit) = max(input_hit) THEN min(input_hit) END AS input_hit,
    CASE WHEN count(input_miss) = count(*) AND min(input_miss) = max(input_miss) THEN min(input_miss) END AS input_miss,
    CASE WHEN count(output) = count(*) AND min(output) = max(output) THEN min(output) END AS output
FROM run
