-- slowest: the ten requests that took longest from their prefill to their last token.
SELECT shard, row, sample, prompt_tokens, completion_tokens, finished_s - admitted_s AS seconds
FROM requests
WHERE status = 'ok' AND finished_s > admitted_s
ORDER BY seconds DESC, shard, row, sample
LIMIT 10
