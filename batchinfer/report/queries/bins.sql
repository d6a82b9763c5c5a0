-- bins: one row per stretch of the time axis (see report/time_axis.py), numbered from 0.
SELECT
    CAST(bin AS INTEGER) AS bin,
    axis.start_s + bin * width_s AS start_s,
    axis.start_s + (bin + 1) * width_s AS end_s,
    width_s
FROM axis, range(num_bins) AS numbers(bin)
