-- communication: one row, the expert exchange over all steps, rank-seconds (the ranks' seconds added up).
--   comm_s             seconds in which rows were packed, transferred or unpacked
--   wait_comm_share    share of comm_s in which nothing moved, because another rank had not sent its rows
--   hidden_comm_share  share of the other comm_s, in which rows moved, in which the rank computed at the same time
--   hidden_comm_prefill, hidden_comm_decode  the same for steps of one kind
--   overlap_prefill, overlap_decode          share of steps of one kind that ran as two micro-batches
-- All shares are null without an exchange. Shares of seconds are null, too, if steps do not distinguish waiting from moving
-- (GPUs).
WITH
step AS (
    SELECT *, kind = 'prefill' AS is_prefill, comm_s - wait_comm_s AS moving_s, micro_batches - 1 AS in_pairs FROM steps
),
total AS (
    SELECT
        count(wait_comm_s) = count(*) AS is_told,
        sum(comm_s) AS comm_s,
        sum(wait_comm_s) AS wait_s,
        sum(moving_s) AS moving_s,
        sum(hidden_comm_s) AS hidden_s,
        sum(moving_s) FILTER (is_prefill) AS prefill_moving_s,
        sum(hidden_comm_s) FILTER (is_prefill) AS prefill_hidden_s,
        sum(moving_s) FILTER (NOT is_prefill) AS decode_moving_s,
        sum(hidden_comm_s) FILTER (NOT is_prefill) AS decode_hidden_s,
        max(greatest(comm_s, in_pairs)) FILTER (is_prefill) > 0 AS prefill_exchanges,
        max(greatest(comm_s, in_pairs)) FILTER (NOT is_prefill) > 0 AS decode_exchanges,
        avg(in_pairs) FILTER (is_prefill) AS prefill_in_pairs,
        avg(in_pairs) FILTER (NOT is_prefill) AS decode_in_pairs
    FROM step
)
SELECT
    coalesce(comm_s, 0) AS comm_s,
    CASE WHEN is_told THEN wait_s / nullif(comm_s, 0) END AS wait_comm_share,
    CASE WHEN is_told THEN hidden_s / nullif(moving_s, 0) END AS hidden_comm_share,
    CASE WHEN is_told THEN prefill_hidden_s / nullif(prefill_moving_s, 0) END AS hidden_comm_prefill,
    CASE WHEN is_told THEN decode_hidden_s / nullif(decode_moving_s, 0) END AS hidden_comm_decode,
    CASE WHEN prefill_exchanges THEN prefill_in_pairs END AS overlap_prefill,
    CASE WHEN decode_exchanges THEN decode_in_pairs END AS overlap_decode
FROM total
