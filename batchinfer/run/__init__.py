"""A run folder: the identity of its job, its documents and units, and the sessions that work on it."""
