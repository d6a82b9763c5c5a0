"""The balancers: which rank runs which request, which GPU holds which expert. Pure functions on numpy arrays."""
