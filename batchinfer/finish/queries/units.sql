-- Tokens and times of each planned unit, by the claim that counts.
SELECT unit, any_value(planned.num_requests) AS num_requests, any_value(planned.prompt_tokens) AS prompt_tokens,
       any_value(planned.new_tokens) AS new_tokens,
       coalesce(sum(computed_tokens), 0) AS computed_tokens,
       coalesce(sum(completion_tokens) FILTER (admitted_s IS NOT NULL), 0) AS completion_tokens,  -- not of reused rows
       coalesce(any_value(num_claims), 0) AS num_claims, any_value(claim) AS claim,
       min(admitted_s) AS started_s, max(finished_s) AS finished_s
FROM {units} AS planned LEFT JOIN claims USING (unit) LEFT JOIN results USING (unit)
GROUP BY unit ORDER BY unit
