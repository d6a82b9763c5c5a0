-- finish_reasons: one row, output rows by why they ended.
SELECT
    count(*) FILTER (finish_reason = 'stop') AS "finish_reasons.stop",
    count(*) FILTER (finish_reason = 'length') AS "finish_reasons.length",
    count(*) FILTER (finish_reason = 'error') AS "finish_reasons.error"
FROM outputs
