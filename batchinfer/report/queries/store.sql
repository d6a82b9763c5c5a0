-- store: one row, reads, writes and waits of the KV store on disk, added up over ranks; nulls without a store.
SELECT
    CAST(sum(hit_bytes) AS BIGINT) AS store_read_bytes,
    CAST(sum(written_bytes) AS BIGINT) AS store_written_bytes,
    sum(wait_s) AS store_wait_s,
    CAST(sum(damaged_files) AS BIGINT) AS store_damaged_files,
    CAST(sum(dropped_blocks + refused_blocks) AS BIGINT) AS store_unwritten_blocks,
    CAST(sum(evicted_bytes) AS BIGINT) AS store_evicted_bytes
FROM kv
