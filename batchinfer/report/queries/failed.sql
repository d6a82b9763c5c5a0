-- failed: the first twenty error rows in the order of the input.
SELECT shard, row, sample
FROM requests
WHERE status <> 'ok'
ORDER BY shard, row, sample
LIMIT 20
