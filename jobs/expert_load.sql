-- How evenly the routed experts were used, per layer and phase: batchinfer report runs/demo --sql @jobs/expert_load.sql
-- busiest: tokens of the busiest expert ÷ mean over the layer's experts; 1 would be perfectly even.
SELECT phase, layer, sum(tokens) AS tokens, round(max(tokens) / avg(tokens), 2) AS busiest, round(min(tokens) / avg(tokens), 2) AS idlest
FROM (SELECT phase, layer, expert, sum(tokens) AS tokens FROM experts GROUP BY ALL)
GROUP BY phase, layer
ORDER BY phase DESC, layer
