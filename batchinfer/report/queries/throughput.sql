-- throughput: one row per bin.
--   prefill_per_s  prompt tokens, cached ones included, of prefill steps, per second
--   decode_per_s   tokens sampled by decode steps, per second
--   sampled        tokens sampled by any step
--   memory, disk, computed   prompt tokens of the requests in prefill, by the source of their KV
-- The tokens of a step are spread evenly over its time, the tokens of a prompt from admission to the first new token.
WITH parts AS (
    SELECT
        bin,
        kind,
        new_tokens + cached_tokens AS run_tokens,
        output_tokens,
        (least(bins.end_s, steps.start_s + duration_s) - greatest(bins.start_s, steps.start_s)) / duration_s AS part
    FROM steps JOIN bins ON steps.start_s < bins.end_s AND steps.start_s + duration_s > bins.start_s
    WHERE duration_s > 0
),
stepped AS (
    SELECT
        bin,
        sum(run_tokens * part) FILTER (kind = 'prefill') AS prefill,
        sum(output_tokens * part) FILTER (kind = 'decode') AS decode,
        sum(output_tokens * part) AS sampled
    FROM parts
    GROUP BY bin
),
prefills AS (
    SELECT
        computed_tokens,
        cached_disk_tokens,
        prompt_tokens,
        -- a step is at least a thousandth of a bin long
        admitted_s - start_s AS opens_s,
        greatest(coalesce(first_token_s, 0), admitted_s + width_s / 1000) - start_s AS closes_s,
        width_s,
        num_bins
    FROM requests, axis
    WHERE admitted_s IS NOT NULL
),
prefill_parts AS (
    SELECT *, unnest(range(
        greatest(0, least(num_bins - 1, CAST(floor(opens_s / width_s) AS INTEGER))),
        greatest(0, least(num_bins - 1, CAST(floor(closes_s / width_s) AS INTEGER))) + 1
    )) AS bin
    FROM prefills
),
shares AS (
    SELECT
        *,
        greatest(0, least(closes_s, (bin + 1) * width_s) - greatest(opens_s, bin * width_s)) / (closes_s - opens_s) AS part
    FROM prefill_parts
),
admitted AS (
    SELECT
        CAST(bin AS INTEGER) AS bin,
        -- cached tokens that are not counted for the disk
        sum((prompt_tokens - computed_tokens - cached_disk_tokens) * part) AS memory,
        sum(cached_disk_tokens * part) AS disk,
        sum(computed_tokens * part) AS computed
    FROM shares
    GROUP BY bin
)
SELECT
    bin,
    coalesce(prefill, 0) / width_s AS prefill_per_s,
    coalesce(decode, 0) / width_s AS decode_per_s,
    coalesce(sampled, 0) AS sampled,
    coalesce(memory, 0) AS memory,
    coalesce(disk, 0) AS disk,
    coalesce(computed, 0) AS computed
FROM bins LEFT JOIN stepped USING (bin) LEFT JOIN admitted USING (bin)
ORDER BY bin
