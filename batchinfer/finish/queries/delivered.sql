-- One row per computed or duplicate request; a duplicate has the result of its original.
SELECT *, false AS is_duplicate FROM results
UNION ALL BY NAME
SELECT results.* REPLACE (duplicates.shard AS shard, duplicates.row AS row, duplicates.sample AS sample),
       true AS is_duplicate
FROM duplicates JOIN results
  ON results.shard = of_shard AND results.row = of_row AND results.sample = of_sample
ORDER BY shard, row, sample
