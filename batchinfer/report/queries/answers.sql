-- answers: one row, the quality of answers over all delivered rows, duplicates included.
--   structured_outputs.*  computed rows that asked for a structured output; valid: the whole answer fits; cut: cut at
--                         max_tokens. The others ended by a stop string or token, in their thinking or as an error.
--                         Null for runs of earlier versions, whose requests have no finish_reason.
--   reasoning.*           ok rows whose thinking is separated from the answer. Of rows with tokens of thinking only:
--                         cut: by max_tokens; ended: by the model's end token or a stop token. Null if not known.
--   mean_logprob          mean over all output tokens of rows with log-probabilities
WITH sums AS (
    SELECT
        CASE WHEN count(finish_reason) = count(*) THEN count(structured_valid) END AS asked,
        count(*) FILTER (structured_valid) AS valid,
        count(structured_valid) FILTER (finish_reason = 'length') AS cut,
        count(*) FILTER (reasoning_tokens > 0) AS with_thinking,
        count(*) FILTER (reasoning_tokens > 0 AND reasoning_tokens = completion_tokens AND finish_reason = 'length')
            AS cut_thinking,
        count(*) FILTER (reasoning_tokens > 0 AND reasoning_tokens = completion_tokens AND finish_reason = 'stop')
            AS ended_thinking,
        avg(reasoning_tokens) FILTER (reasoning_tokens > 0) AS mean_thinking,
        sum(mean_logprob * completion_tokens) / sum(completion_tokens) FILTER (mean_logprob IS NOT NULL) AS mean_logprob
    FROM requests
)
SELECT
    asked AS "structured_outputs.rows",
    CASE WHEN asked IS NOT NULL THEN valid END AS "structured_outputs.valid",
    CASE WHEN asked IS NOT NULL THEN cut END AS "structured_outputs.cut",
    valid / nullif(asked, 0) AS "structured_outputs.valid_share",
    with_thinking AS "reasoning.rows",
    mean_thinking AS "reasoning.mean_tokens",
    CASE WHEN asked IS NOT NULL THEN cut_thinking END AS "reasoning.cut",
    "reasoning.cut" / nullif(with_thinking, 0) AS "reasoning.cut_share",
    CASE WHEN asked IS NOT NULL THEN ended_thinking END AS "reasoning.ended",
    "reasoning.ended" / nullif(with_thinking, 0) AS "reasoning.ended_share",
    mean_logprob
FROM sums
