-- communication: one row, the expert exchange over all steps, rank-seconds (the ranks' seconds added up).
--   comm_s             seconds in which rows were packed, under way or unpacked
--   wait_comm_share    of these, the share in which nothing moved: another rank had not sent its rows
--   hidden_comm_share  of the others, in which rows moved, the share in which the rank computed meanwhile
-- The shares are null while there was no exchange, and where steps do not tell waiting from moving (GPUs).
SELECT
    coalesce(sum(comm_s), 0) AS comm_s,
    CASE WHEN count(wait_comm_s) = count(*) THEN sum(wait_comm_s) / nullif(sum(comm_s), 0) END AS wait_comm_share,
    CASE
        WHEN count(wait_comm_s) = count(*) THEN sum(hidden_comm_s) / nullif(sum(comm_s) - sum(wait_comm_s), 0)
    END AS hidden_comm_share
FROM steps
