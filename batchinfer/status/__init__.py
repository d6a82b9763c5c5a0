"""The status of a run, read from its folder while other processes work on it."""
