-- revenue: one row, the revenue of tokens at list prices, by kind; null unless all three prices are known.
--   cached_input, computed_input, output   in $; the sum is the report's revenue_usd
SELECT
    cached_tokens * input_hit / 1e6 AS cached_input,
    (input_tokens - cached_tokens) * input_miss / 1e6 AS computed_input,
    output_tokens * output / 1e6 AS output
FROM tokens, run
