-- store: one row, what the KV store on disk did for the ranks, added up over all of them; zeros without a store.
SELECT
    count(*) > 0 AS is_used,
    coalesce(sum(hit_bytes), 0) AS read_bytes,
    coalesce(sum(written_bytes), 0) AS written_bytes,
    coalesce(sum(wait_s), 0) AS wait_s,
    coalesce(sum(damaged_files), 0) AS damaged_files,
    coalesce(sum(dropped_blocks + refused_blocks), 0) AS unwritten_blocks,
    coalesce(sum(evicted_bytes), 0) AS evicted_bytes
FROM kv
