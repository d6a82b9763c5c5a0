-- Output rows by sample: the rows of outputs/ for a job without choices.
SELECT * REPLACE (
           CASE WHEN sample = 0 AND prompt_logprobs IS NOT NULL THEN list_prepend(NULL, prompt_logprobs) END
               AS prompt_logprobs
       ),
       planned_tokens + cached_disk_tokens + cached_duplicate_tokens AS cached_tokens
FROM ({output_rows})
