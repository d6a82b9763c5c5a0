-- graphs: one row, decode steps that ran as CUDA graphs.
--   graph_share     share of decode steps on ranks that can use graphs; null if there are none, as all ranks are CPUs
--   recorded_graphs graphs that were recorded, over all ranks
--   no_graph        most frequent reason of the other steps; null if there are none
SELECT
    count(graph) / nullif(count(*) FILTER (graph IS NOT NULL OR no_graph <> 'the rank computes on a CPU'), 0)
        AS graph_share,
    count(*) FILTER (graph = 'recorded') AS recorded_graphs,
    mode(no_graph) FILTER (no_graph <> 'the rank computes on a CPU') AS no_graph
FROM steps
WHERE kind = 'decode'
