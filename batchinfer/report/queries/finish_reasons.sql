-- finish_reasons: one row, output rows by finish reason; no_output: rows with max_tokens = 0, which are 'length' in outputs.
SELECT
    count(*) FILTER (finish_reason = 'stop') AS "finish_reasons.stop",
    count(*) FILTER (finish_reason = 'length' AND completion_tokens > 0) AS "finish_reasons.length",
    count(*) FILTER (finish_reason = 'length' AND completion_tokens = 0) AS "finish_reasons.no_output",
    count(*) FILTER (finish_reason = 'error') AS "finish_reasons.error"
FROM outputs
