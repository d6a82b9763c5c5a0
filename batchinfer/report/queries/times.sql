-- times: one row, the run's time by kind.
--   wall_s     seconds covered by the sessions of the run (plan and finish too, repeats not); gaps between them do not count
--   busy_s     in a model step        }  of the time in which ranks were held, averaged over the ranks: rank-seconds
--   startup_s  until the first step   }  divided by the mean number of ranks held; the three add up to held.working_s
--   idle_s     the rest               }  (with one rank: to the time in which the rank was held)
WITH shares AS (
    SELECT
        (SELECT coalesce(sum(duration_s), 0) FROM steps) / mean_ranks AS busy_s,
        (SELECT coalesce(sum(num_ranks * startup_s), 0) FROM sessions) / mean_ranks AS startup_s,
        working_s
    FROM held
)
SELECT
    (SELECT coalesce(sum(end_s - start_s), 0) FROM spans WHERE scope = 'wall') AS wall_s,
    coalesce(busy_s, 0) AS busy_s,
    coalesce(greatest(0, working_s - busy_s - startup_s), 0) AS idle_s,
    coalesce(startup_s, 0) AS startup_s
FROM shares
