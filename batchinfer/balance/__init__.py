"""The balancers: requests to ranks, experts to GPUs. Pure functions on numpy arrays."""
