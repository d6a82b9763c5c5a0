-- communication: one row, the expert exchange over all steps, rank-seconds (the ranks' seconds added up).
--   comm_s             seconds in which an exchange was under way
--   hidden_comm_share  of these, the share in which the rank computed meanwhile; null while there was no exchange
SELECT
    coalesce(sum(comm_s), 0) AS comm_s,
    sum(hidden_comm_s) / nullif(sum(comm_s), 0) AS hidden_comm_share
FROM steps
