-- Output rows of a job with choices: one per row, with the scores of all choices; without scores if a choice failed.
WITH choices AS (
    SELECT *, coalesce(status = 'ok', false) AS is_ok,
           list_sum([item.logprob::DOUBLE for item in prompt_logprobs]) AS total, len(prompt_logprobs)::INTEGER AS num_tokens,
           list_bool_and([item.token_id = item.top[1].token_id for item in prompt_logprobs]) AS is_greedy
    FROM ({output_rows})
),
together AS (
    SELECT shard, row, sample, any_value(id) AS id,
           CASE WHEN bool_and(is_ok) THEN 'ok' ELSE 'error' END AS status, min(error) AS error,
           sum(prompt_tokens)::INTEGER AS prompt_tokens,
           sum(planned_tokens + cached_disk_tokens + cached_duplicate_tokens)::INTEGER AS cached_tokens,
           list(total ORDER BY choice) AS choice_logprobs, list(num_tokens ORDER BY choice) AS choice_num_tokens,
           list(is_greedy ORDER BY choice) AS choice_is_greedy
    FROM choices GROUP BY shard, row, sample
)
SELECT * REPLACE (
           CASE WHEN status = 'ok' THEN choice_logprobs END AS choice_logprobs,
           CASE WHEN status = 'ok' THEN choice_num_tokens END AS choice_num_tokens,
           CASE WHEN status = 'ok' THEN choice_is_greedy END AS choice_is_greedy
       ),
       CASE WHEN status = 'ok' THEN '' END AS text, CASE WHEN status = 'ok' THEN []::INTEGER[] END AS token_ids,
       CASE WHEN status = 'ok' THEN 'length' ELSE 'error' END AS finish_reason, NULL::VARCHAR AS stop_reason,
       0 AS completion_tokens, NULL AS logprobs, NULL::VARCHAR AS reasoning, 0 AS reasoning_tokens,
       NULL::BIGINT AS answer_place,
       CASE WHEN status = 'ok' THEN list_position(choice_logprobs, list_max(choice_logprobs)) - 1 END AS choice,
       CASE WHEN status = 'ok' THEN
           list_position([x / choice_num_tokens[i] for x, i in choice_logprobs],
                         list_max([x / choice_num_tokens[i] for x, i in choice_logprobs])) - 1
       END AS choice_normalized
FROM together
