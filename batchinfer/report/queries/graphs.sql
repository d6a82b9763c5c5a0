-- graphs: one row, decode steps that ran as CUDA graphs.
--   graph_share     of decode steps of ranks from which graphs are expected; null: of none, all compute on CPUs
--   recorded_graphs graphs that were recorded, over all ranks
--   no_graph        why most of the other steps did not; null: all did
SELECT
    count(graph) / nullif(count(*) FILTER (graph IS NOT NULL OR no_graph <> 'the rank computes on a CPU'), 0)
        AS graph_share,
    count(*) FILTER (graph = 'recorded') AS recorded_graphs,
    mode(no_graph) FILTER (no_graph <> 'the rank computes on a CPU') AS no_graph
FROM steps
WHERE kind = 'decode'
