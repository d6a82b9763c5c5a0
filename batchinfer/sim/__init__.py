"""A simulated cluster: the time and cost of a job on hardware that is not here.

In: a spec (TOML), a model's config.json, published tables of hardware and kernels. Out: seconds per step, tokens/s per
node, the bottleneck of each stage, nodes over time, cost and margin. No torch, no model weights.

    hardware.py   accelerators and their links          kernels.py   published kernel tables, times of single operations
    layers.py     operations of a layer -> stages       exchange.py  expert rows between GPUs
    overlap.py    two micro-batches, both schedules     steps.py     seconds of a step of a unit
    dealing.py    the real balancers on sampled batches arriving.py  a server's prefill steps, for comparison
    suggest.py    the way to the cheapest layout        memory.py    weights and KV in a GPU's memory
    workload.py   requests: described, or of a planned run
    cluster.py    events: units, queues, nodes          search.py    full units, their busiest GPU, the best EP sizes
    answer.py     all of it as figures                  table.py     the figures for a terminal
    spec.py       the TOML file                         speeds.py    full units of a job, for the plan
"""
